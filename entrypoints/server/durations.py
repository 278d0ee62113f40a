"""How long an answer took, as llama.cpp's and Ollama's clients are told."""

from __future__ import annotations

from typing import NamedTuple

from engine.request import RequestOutput


class Durations(NamedTuple):
    """Seconds: until the first token, waiting for a turn with it, and from there to the end."""

    prompt_s: float
    answer_s: float


def durations_of(output: RequestOutput) -> Durations:
    """Of one that is finished."""
    metrics = output.metrics
    if metrics is None or metrics.first_token_time is None or metrics.finished_time is None:
        return Durations(0.0, 0.0)
    first = metrics.first_token_time
    return Durations(max(first - metrics.arrival_time, 0.0), max(metrics.finished_time - first, 0.0))
