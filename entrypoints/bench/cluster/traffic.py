"""What arrives at a cluster: Poisson arrivals of prompts, some of which begin alike."""

from __future__ import annotations

import msgspec
import numpy as np

from engine.core.wire import AddRequest
from engine.errors import ConfigError
from engine.step import RowParams


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    rate: float
    """requests a second"""
    input_len: int
    """tokens of a prompt, heads included"""
    output_len: int
    range_ratio: float = 0.0
    """lengths vary by this share around their mean"""
    heads: int = 0
    """beginnings, one of which each prompt has; 0: none"""
    head_tokens: int = 0

    def of_some(self, share: float) -> Traffic:
        """What arrives at that share of all replicas."""
        return msgspec.structs.replace(self, rate=self.rate * share)

    @property
    def longest(self) -> int:
        """Tokens of a request, at most."""
        return _most(self.input_len, self.range_ratio) + _most(self.output_len, self.range_ratio)


class Arrival(msgspec.Struct, frozen=True):
    at_s: float
    message: AddRequest


def check(traffic: Traffic, max_model_len: int) -> None:
    """Raises ConfigError."""
    if not 0.0 <= traffic.range_ratio < 1.0:
        raise ConfigError(f"range_ratio must be in [0, 1), got {traffic.range_ratio}")
    if not traffic.rate > 0.0:
        raise ConfigError(f"rate must be positive, got {traffic.rate}")
    if traffic.heads and traffic.head_tokens >= _least(traffic.input_len, traffic.range_ratio):
        raise ConfigError(f"head_tokens ({traffic.head_tokens}) leave the shortest prompt no token of its own")
    if traffic.longest > max_model_len:
        raise ConfigError(f"requests of up to {traffic.longest} tokens exceed max_model_len ({max_model_len})")


def arrivals(traffic: Traffic, seconds: float, seed: int, vocab_size: int) -> list[Arrival]:
    """All of so many seconds; at least one."""
    draw = np.random.default_rng(seed)
    heads = [draw.integers(0, vocab_size, size=traffic.head_tokens).tolist() for _ in range(traffic.heads)]
    found: list[Arrival] = []
    now = 0.0
    while not found or now < seconds:
        head = heads[int(draw.integers(len(heads)))] if heads else []
        length = _length(draw, traffic.input_len, traffic.range_ratio)
        own = draw.integers(0, vocab_size, size=max(length - len(head), 1)).tolist()
        message = AddRequest(
            request_id=f"r{len(found)}",
            prompt_token_ids=[*head, *own],
            params=RowParams(seed=0, temperature=0.0),
            max_tokens=_length(draw, traffic.output_len, traffic.range_ratio),
        )
        found.append(Arrival(now, message))
        now += float(draw.exponential(1.0 / traffic.rate))
    return found


def _length(draw: np.random.Generator, mean: int, ratio: float) -> int:
    return int(draw.integers(_least(mean, ratio), _most(mean, ratio) + 1))


def _least(mean: int, ratio: float) -> int:
    return max(round(mean * (1 - ratio)), 1)


def _most(mean: int, ratio: float) -> int:
    return max(round(mean * (1 + ratio)), 1)
