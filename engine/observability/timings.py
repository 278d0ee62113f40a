"""What one finished request took: the front end fills it in, metrics and logs read it. Torch-free."""

from __future__ import annotations

import msgspec

from engine.request import FinishReason


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds on `time.monotonic`'s clock."""

    arrival_time: float
    first_token_time: float | None
    """None: it ended before its first token"""
    finished_time: float
    prompt_tokens: int
    generated_tokens: int
    """over all samples"""
    samples: int
    finish_reasons: list[FinishReason]
    """one per sample"""

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_per_output_token_s(self) -> float | None:
        """Mean time between the tokens of one sample after its first; None with fewer than two tokens a sample."""
        steps = self.generated_tokens / self.samples - 1
        if self.first_token_time is None or steps <= 0:
            return None
        return (self.finished_time - self.first_token_time) / steps

    @property
    def end_to_end_s(self) -> float:
        return self.finished_time - self.arrival_time
