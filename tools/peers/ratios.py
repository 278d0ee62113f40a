"""From measurements to medians, ratios to the peers, and whether the targets are met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from peers.catalogue import START
from peers.rounds import Measurement

MEMORY = "MEMORY"
FIGURES: dict[str, tuple[tuple[str, str], ...]] = {
    "W1": (("tpot_mean_ms", "TPOT, ms"), ("ttft_mean_ms", "TTFT, ms")),
    "W2": (("output_tokens_per_s", "output tokens/s"),),
    "W3": (
        ("output_tokens_per_s", "output tokens/s"),
        ("normalized_latency_mean_ms", "normalised latency mean, ms"),
        ("normalized_latency_p99_ms", "normalised latency p99, ms"),
    ),
    "W4": (("wall_s", "total, s"),),
    "W5": (("ttft_mean_ms", "TTFT, ms"),),
    "W6": (
        ("ttft_p50_ms", "TTFT p50, ms"),
        ("ttft_p99_ms", "TTFT p99, ms"),
        ("tpot_p50_ms", "TPOT p50, ms"),
        ("tpot_p99_ms", "TPOT p99, ms"),
    ),
    "W7": (("output_tokens_per_s", "output tokens/s"),),
    START: (("startup_s", "process start to first token, s"),),
    MEMORY: (("peak_memory_mib", "peak memory, MiB"),),
}
MORE_IS_BETTER = {"output_tokens_per_s"}


@dataclass(frozen=True)
class Target:
    """ours / peer must be at most `bound` (at least, where more is better); without a peer, ours itself."""

    workload: str
    figure: str
    kind: str
    peer: str | None
    bound: float


TARGETS = (
    Target("W1", "tpot_mean_ms", "bf16", "llamacpp", 0.75),
    Target("W1", "tpot_mean_ms", "int8", "llamacpp-q4_1", 0.55),
    Target("W1", "tpot_mean_ms", "int4", "llamacpp-q4_1", 0.42),
    Target("W1", "tpot_mean_ms", "bf16", "linear", 1.25),
    Target("W2", "output_tokens_per_s", "bf16", "openvino", 1.35),
    Target("W2", "output_tokens_per_s", "bf16", "vllm", 1.5),
    Target("W2", "output_tokens_per_s", "int8", "openvino", 2.1),
    Target("W3", "output_tokens_per_s", "bf16", "openvino", 1.45),
    Target("W3", "normalized_latency_p99_ms", "bf16", "openvino", 0.7),
    Target("W4", "wall_s", "bf16", "vllm", 0.65),
    Target("W5", "ttft_mean_ms", "bf16", "openvino", 0.90),
    Target("W5", "ttft_mean_ms", "int8", "openvino", 0.60),
    Target("W6", "ttft_p50_ms", "bf16", "vllm", 0.6),
    Target("W6", "tpot_p50_ms", "bf16", "vllm", 0.65),
    Target("W7", "output_tokens_per_s", "bf16", "vllm", 3.0),
    Target(START, "startup_s", "bf16", None, 8.0),
)


def target_workloads(kind: str) -> tuple[str, ...]:
    """Where weights of this kind have a target, in order."""
    return tuple(name for name in FIGURES if any(t.workload == name and t.kind == kind for t in TARGETS))


@dataclass(frozen=True)
class Cell:
    """One figure of one engine over the alternations."""

    median: float
    low: float
    high: float
    count: int
    worst_outside_cores: float


@dataclass(frozen=True)
class Ratio:
    workload: str
    figure: str
    ours: str
    peer: str
    ratio: float
    """of the medians, ours / peer"""
    low: float
    high: float
    """over the alternations, each against its own"""
    target: float | None
    met: bool | None


def cells(measurements: Sequence[Measurement]) -> dict[tuple[str, str, str], Cell]:
    """By (workload, figure, engine)."""
    found: dict[tuple[str, str, str], Cell] = {}
    for workload, figures in FIGURES.items():
        for engine in dict.fromkeys(m.engine for m in measurements):
            for figure, _ in figures:
                taken = [
                    m for m in measurements if (m.workload, m.engine) == (workload, engine) and figure in m.figures
                ]
                if taken:
                    values = [float(m.figures[figure]) for m in taken]
                    noise = max(m.outside_cores for m in taken)
                    found[workload, figure, engine] = Cell(
                        statistics.median(values), min(values), max(values), len(values), noise
                    )
    return found


def better(figure: str, ratio: float, bound: float) -> bool:
    return ratio >= bound if figure in MORE_IS_BETTER else ratio <= bound


def ratios(measurements: Sequence[Measurement], kinds: dict[str, str], ours: set[str]) -> list[Ratio]:
    """Each of our engines beside each peer, wherever both were measured. `kinds`: of the weights, by engine."""
    table = cells(measurements)
    rows = []
    for workload, figure, our in table:
        for other_workload, other_figure, peer in table:
            if our not in ours or peer in ours or (workload, figure) != (other_workload, other_figure):
                continue
            mine, theirs = table[workload, figure, our].median, table[workload, figure, peer].median
            if not theirs:
                continue
            paired = _paired(measurements, workload, figure, our, peer) or [mine / theirs]
            bound = next((t.bound for t in TARGETS if _applies(t, workload, figure, kinds[our], peer)), None)
            ratio = mine / theirs
            met = None if bound is None else better(figure, ratio, bound)
            rows.append(Ratio(workload, figure, our, peer, ratio, min(paired), max(paired), bound, met))
    return rows


def absolute_targets(
    measurements: Sequence[Measurement], kinds: dict[str, str], ours: set[str]
) -> list[dict[str, Any]]:
    """Targets that need no peer."""
    rows = []
    for (workload, figure, engine), cell in cells(measurements).items():
        for target in TARGETS:
            if engine in ours and _applies(target, workload, figure, kinds[engine], None):
                met = better(figure, cell.median, target.bound)
                rows.append({**asdict(target), "engine": engine, "value": cell.median, "met": met})
    return rows


def _applies(target: Target, workload: str, figure: str, kind: str, peer: str | None) -> bool:
    return (target.workload, target.figure, target.kind, target.peer) == (workload, figure, kind, peer)


def _paired(measurements: Sequence[Measurement], workload: str, figure: str, ours: str, peer: str) -> list[float]:
    values: dict[str, dict[int, float]] = {ours: {}, peer: {}}
    for m in measurements:
        if m.workload == workload and m.engine in values and figure in m.figures:
            values[m.engine][m.repeat] = float(m.figures[figure])
    both = values[ours].keys() & values[peer].keys()
    return [values[ours][repeat] / values[peer][repeat] for repeat in sorted(both) if values[peer][repeat]]


Verdict = Literal["met", "missed", ""]


def verdict(met: bool | None) -> Verdict:
    return "" if met is None else "met" if met else "missed"
