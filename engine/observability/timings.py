"""What one request took: the front end fills it in, metrics, logs and traces read it. Torch-free."""

from __future__ import annotations

import msgspec

from engine.request import RequestMetrics


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Of a request that has ended, for whatever reason."""

    times: RequestMetrics
    finished_time: float
    prompt_tokens: int
    cached_tokens: int
    """of them, those that the prefix cache had"""
    sample_tokens: list[int]
    """generated, of each sample"""
    n: int
    """samples asked for"""
    max_tokens: int
    """what held for each of them, within the context"""
    finish_reasons: list[str]
    """one per sample"""
    pooled: bool = False
    """nothing was to be generated"""

    @property
    def generated_tokens(self) -> int:
        """Over all samples."""
        return sum(self.sample_tokens)

    @property
    def time_to_first_token_s(self) -> float | None:
        return _between(self.times.arrival_time, self.times.first_token_time)

    @property
    def queue_s(self) -> float | None:
        """From the hand-over to the core until a step took it up; None where no token came of it, as below."""
        return _between(self.times.queued_time, self.times.first_scheduled_time)

    @property
    def prefill_s(self) -> float | None:
        """From then until its first token."""
        return _between(self.times.first_scheduled_time, self.times.first_token_time)

    @property
    def decode_s(self) -> float | None:
        """From then until its end."""
        return _between(self.times.first_token_time, self.finished_time)

    @property
    def inference_s(self) -> float | None:
        """Prefill and decode."""
        return _between(self.times.first_scheduled_time, self.finished_time)

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean time between the tokens of one sample after its first; None with fewer than two tokens a sample."""
        steps = self.generated_tokens / len(self.sample_tokens) - 1
        decode = self.decode_s
        return None if decode is None or steps <= 0 else decode / steps

    @property
    def end_to_end_s(self) -> float:
        return self.finished_time - self.times.arrival_time


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
