"""The figures that the suite must show, each judged from what its parts measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Figures = Mapping[str, list[Any]]
"""figure → its values, over all parts"""
Verdict = Literal["pass", "fail", "not measured", "dry"]
Document = dict[str, Any]


@dataclass(frozen=True)
class Target:
    name: str
    better: Literal["at least", "at most"]
    limit: float
    unit: str
    measured: Callable[[Document, Figures], float | None]


def _worst(values: Iterable[float], pick: Callable[[list[float]], float]) -> float | None:
    found = list(values)
    return pick(found) if found else None


def _rows(figures: Figures, key: str, **wanted: object) -> list[dict[str, Any]]:
    return [row for row in figures.get(key, []) if all(row.get(k) == v for k, v in wanted.items())]


def _failed_correctness(document: Document, figures: Figures) -> float | None:
    """Parts that failed, or did not come to an end; None while one was not run at all."""
    parts = [p for p in document["parts"].values() if p["kind"] == "correctness"]
    bad = sum(p["status"] in ("failed", "crashed", "timeout") for p in parts)
    unknown = any(p["status"] in ("skipped", "not selected", "not run yet", "cut off") or _cut_short(p) for p in parts)
    native = [
        p["status"] for n, p in document["parts"].items() if n in ("attention-cuda", "graph-modes") or "models-" in n
    ]
    return float(bad) if bad or not (unknown or "unavailable" in native) else None


def _cut_short(part: dict[str, Any]) -> bool:
    return any(s["reason"] == "no time" for s in part["skipped"])


def _decode_share(document: Document, figures: Figures) -> float | None:
    rows = _rows(figures, "decode", backend="cuda")
    return _worst((r["copy_share"] for r in rows if r["batch"] >= 32 and r["context"] >= 2048), min)


def _prefill(document: Document, figures: Figures) -> float | None:
    rows = _rows(figures, "prefill", backend="cuda", batch=1, queries=8192, context=8192, heads="32/8x128")
    return _worst((r["tflop_per_s"] for r in rows), min)


def _step(figures: Figures, batch: int, field: str, shape: str, graphs: str) -> float | None:
    rows = _rows(figures, "decode_step", shape=shape, graphs=graphs, backend="cuda", batch=batch)
    return _worst((r[field] for r in rows if r[field] is not None), min)


def _piecewise_over_full(document: Document, figures: Figures) -> float | None:
    steps = [_step(figures, 1, "step_ms", "qwen3-8b", graphs) for graphs in ("piecewise", "both")]
    return None if steps[0] is None or steps[1] is None else round(steps[0] / steps[1], 4)


def _throughput(document: Document, figures: Figures) -> float | None:
    rows = _rows(figures, "throughput", shape="qwen3-8b", backend="cuda", graphs="both")
    return _worst((r["over_floor"] for r in rows), min)


def _graph_bytes(document: Document, figures: Figures) -> float | None:
    rows = _rows(figures, "start", shape="qwen3-8b", backend="cuda", graphs="both")
    return _worst((r["graph_bytes"] / 2**30 for r in rows), max)


def _hidden_waits(document: Document, figures: Figures) -> float | None:
    part = document["parts"]["no-hidden-wait"]
    return float(part["checks"]["failed"]) if part["status"] in ("passed", "failed") else None


TARGETS: tuple[Target, ...] = (
    Target("correctness parts that failed", "at most", 0, "parts", _failed_correctness),
    Target("decode kernel, batch >= 32, context >= 2k: worst", "at least", 0.75, "of copy bandwidth", _decode_share),
    Target("prefill, head 128, 8k causal", "at least", 300, "TFLOP/s", _prefill),
    Target(
        "8B decode step, batch 1, full graphs",
        "at most",
        1.15,
        "x weights/bandwidth",
        lambda _, f: _step(f, 1, "over_weights_floor", "qwen3-8b", "both"),
    ),
    Target("8B decode step, batch 1, piecewise", "at most", 1.07, "x full graphs", _piecewise_over_full),
    Target(
        "exposed host time, batch 256, 8B",
        "at most",
        0.05,
        "of the step",
        lambda _, f: _step(f, 256, "exposed_host_share", "qwen3-8b", "both"),
    ),
    Target(
        "exposed host time, batch 256, 0.6B",
        "at most",
        0.05,
        "of the step",
        lambda _, f: _step(f, 256, "exposed_host_share", "qwen3-0.6b", "both"),
    ),
    Target("256 x 1,024/1,024 on the 8B shape", "at most", 1.3, "x the floor", _throughput),
    Target("graphs of the 8B shape", "at most", 1.0, "GiB", _graph_bytes),
    Target("hidden waits in a steady decode step", "at most", 0, "modes with one", _hidden_waits),
    Target("the whole suite, over its runs", "at most", 1620, "s", lambda d, _: d["seconds"]),
)


def judge(document: Document) -> list[dict[str, Any]]:
    """name, target, measured, verdict of each; in a dry run the figures mean nothing, and the verdict says so."""
    figures: dict[str, list[Any]] = {}
    for part in document["parts"].values():
        for key, values in part["figures"].items():
            figures.setdefault(key, []).extend(values)
    judged = []
    for target in TARGETS:
        measured = target.measured(document, figures)
        verdict: Verdict
        if measured is None:
            verdict = "not measured"
        elif document["dry"]:
            verdict = "dry"
        elif target.better == "at least":
            verdict = "pass" if measured >= target.limit else "fail"
        else:
            verdict = "pass" if measured <= target.limit else "fail"
        limit = f"{target.better} {target.limit:g} {target.unit}"
        judged.append({"name": target.name, "target": limit, "measured": measured, "verdict": verdict})
    return judged
