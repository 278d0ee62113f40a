"""From request timings to the figures that serving benchmarks print."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Record:
    """One finished request; times in seconds on one clock."""

    submitted: float
    first_token: float | None
    finished: float
    input_tokens: int
    output_tokens: int
    wanted_tokens: int
    gaps: list[float] = field(default_factory=list)
    """between tokens as they arrived (inter-token latency)"""
    error: str | None = None


Figures = dict[str, float | int]


def figures(records: Sequence[Record], start: float, end: float) -> Figures:
    """Throughput in tokens and requests per second; latencies in milliseconds as mean, median (p50) and p99."""
    good = [r for r in records if r.error is None]
    wall = end - start
    out, inp = sum(r.output_tokens for r in good), sum(r.input_tokens for r in good)
    result: Figures = {
        "requests": len(good),
        "failed": len(records) - len(good),
        "short": sum(r.output_tokens != r.wanted_tokens for r in good),
        "wall_s": wall,
        "input_tokens": inp,
        "output_tokens": out,
        "requests_per_s": len(good) / wall,
        "output_tokens_per_s": out / wall,
        "total_tokens_per_s": (inp + out) / wall,
    }
    seen = [r for r in good if r.first_token is not None]
    _spread(result, "ttft", ((r.first_token or 0.0) - r.submitted for r in seen))
    _spread(
        result,
        "tpot",
        ((r.finished - (r.first_token or 0.0)) / (r.output_tokens - 1) for r in seen if r.output_tokens > 1),
    )
    _spread(result, "itl", (gap for r in good for gap in r.gaps))
    _spread(result, "e2el", (r.finished - r.submitted for r in good))
    _spread(
        result, "normalized_latency", ((r.finished - r.submitted) / r.output_tokens for r in good if r.output_tokens)
    )
    return result


def _spread(result: Figures, name: str, seconds: Iterable[float]) -> None:
    values = np.array(list(seconds)) * 1e3
    if values.size:
        result[f"{name}_mean_ms"] = float(values.mean())
        result[f"{name}_p50_ms"] = float(np.percentile(values, 50))
        result[f"{name}_p99_ms"] = float(np.percentile(values, 99))


def median_of(runs: Sequence[Figures]) -> Figures:
    """Figure-wise median over repeats."""
    merged: Figures = {k: statistics.median(r[k] for r in runs if k in r) for k in runs[0]}
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in merged.items()} | {"repeats": len(runs)}


_ROWS = [
    ("Successful requests", "requests", "d"),
    ("Failed requests", "failed", "d"),
    ("Benchmark duration (s)", "wall_s", ".2f"),
    ("Total input tokens", "input_tokens", "d"),
    ("Total generated tokens", "output_tokens", "d"),
    ("Request throughput (req/s)", "requests_per_s", ".2f"),
    ("Output token throughput (tok/s)", "output_tokens_per_s", ".2f"),
    ("Total token throughput (tok/s)", "total_tokens_per_s", ".2f"),
]
_LATENCIES = [
    ("Time to First Token", "ttft", "TTFT"),
    ("Time per Output Token (excl. 1st token)", "tpot", "TPOT"),
    ("Inter-token Latency", "itl", "ITL"),
    ("End-to-end Latency", "e2el", "E2EL"),
    ("Normalized Latency (end-to-end / output tokens)", "normalized_latency", "NL"),
]


def table(title: str, result: Figures) -> str:
    """The figures as vLLM's bench lays them out."""
    width = 56
    lines = [f" {title} ".center(width, "=")]
    for label, key, form in _ROWS:
        if key in result:
            value = result[key]
            lines.append(f"{label + ':':<42}{format(int(value) if form == 'd' else value, form):>14}")
    for heading, key, short in _LATENCIES:
        if f"{key}_mean_ms" in result:
            lines.append(f" {heading} ".center(width, "-"))
            for name, suffix in (("Mean", "mean"), ("Median", "p50"), ("P99", "p99")):
                lines.append(f"{f'{name} {short} (ms):':<42}{result[f'{key}_{suffix}_ms']:>14.2f}")
    return "\n".join([*lines, "=" * width])
