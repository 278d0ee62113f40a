"""The figures of a benchmark against brute force."""

from __future__ import annotations

import random
import statistics

import pytest

from entrypoints.bench.metrics import Record, figures, median_of, table


def made_up(count: int) -> list[Record]:
    rng = random.Random(3)
    records = []
    for i in range(count):
        at = rng.random() * 5
        gaps = [rng.random() * 0.1 for _ in range(rng.randrange(0, 9))]
        first = at + rng.random()
        record = Record(at, first, first + sum(gaps), rng.randrange(1, 50), len(gaps) + 1, len(gaps) + 1, gaps)
        record.error = "lost" if i % 7 == 3 else None
        records.append(record)
    return records


def percentile(values: list[float], q: float) -> float:
    values = sorted(values)
    at = (len(values) - 1) * q / 100
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def test_figures_equal_brute_force() -> None:
    records = made_up(40)
    good = [r for r in records if r.error is None]
    result = figures(records, 0.0, 8.0)
    out, inp = sum(r.output_tokens for r in good), sum(r.input_tokens for r in good)
    assert (result["requests"], result["failed"], result["short"]) == (len(good), 40 - len(good), 0)
    assert result["output_tokens_per_s"] == out / 8 and result["total_tokens_per_s"] == (out + inp) / 8
    assert result["requests_per_s"] == len(good) / 8
    first = [(r.first_token or 0.0) for r in good]
    many = [(r, f) for r, f in zip(good, first) if r.output_tokens > 1]
    expected = {
        "ttft": [f - r.submitted for r, f in zip(good, first)],
        "tpot": [(r.finished - f) / (r.output_tokens - 1) for r, f in many],
        "itl": [g for r in good for g in r.gaps],
        "e2el": [r.finished - r.submitted for r in good],
        "normalized_latency": [(r.finished - r.submitted) / r.output_tokens for r in good],
    }
    for name, seconds in expected.items():
        assert result[f"{name}_mean_ms"] == pytest.approx(1e3 * statistics.fmean(seconds)), name
        assert result[f"{name}_p50_ms"] == pytest.approx(1e3 * statistics.median(seconds)), name
        assert result[f"{name}_p99_ms"] == pytest.approx(1e3 * percentile(seconds, 99)), name


def test_answers_of_another_length_are_counted_as_short() -> None:
    records = [Record(0, 1, 2, 5, 4, 4), Record(0, 1, 2, 5, 3, 4)]
    assert figures(records, 0, 2)["short"] == 1


def test_the_median_is_taken_figure_by_figure_and_the_table_shows_it() -> None:
    runs = [figures(made_up(n), 0.0, 2.0) for n in (5, 12, 9)]
    merged = median_of(runs)
    assert merged["repeats"] == 3
    assert merged["output_tokens"] == sorted(r["output_tokens"] for r in runs)[1]
    text = table("Serving, W1", merged)
    for label in ("Mean TTFT (ms)", "Median TPOT (ms)", "P99 ITL (ms)", "P99 E2EL (ms)", "Output token throughput"):
        assert label in text
    assert f"{merged['ttft_mean_ms']:.2f}" in text
