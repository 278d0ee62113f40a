"""What one client may ask for: requests and tokens a minute, and requests at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

Quota = Literal["requests", "tokens", "concurrency"]


class RateLimitedError(Exception):
    """A client asks for more than it may."""

    def __init__(self, message: str, quota: Quota, retry_after_s: float) -> None:
        super().__init__(message)
        self.quota, self.retry_after_s = quota, retry_after_s


class Bucket:
    """`per_minute` at most, and as many more each minute, evenly. It may be overdrawn by what is known only when it has
    been used."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._left, self._at = float(per_minute), now

    def change(self, per_minute: int, now: float) -> None:
        """What has been used stays used."""
        used = self.per_minute - self.left(now)
        self.per_minute = per_minute
        self._left = per_minute - used

    def left(self, now: float) -> float:
        if now > self._at:
            self._left = min(self._left + (now - self._at) * self.per_minute / 60, self.per_minute)
            self._at = now
        return self._left

    def take(self, count: float, now: float) -> None:
        self._left = self.left(now) - count

    def wait_s(self, count: float, now: float) -> float:
        """Until so many are left."""
        return max(count - self.left(now), 0.0) * 60 / self.per_minute


class Shown(NamedTuple):
    """Of a bucket, in headers."""

    limit: int
    remaining: int
    reset_s: float
    """until it is full"""


class Quotas:
    """Of one client. `None`: as much as it wants."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._most_running: int | None = None
        self.running = 0

    def set(self, requests: int | None, tokens: int | None, running: int | None) -> None:
        now = self._clock()
        self._requests = _bucket(self._requests, requests, now)
        self._tokens = _bucket(self._tokens, tokens, now)
        self._most_running = running

    def begin(self) -> None:
        """One request more, whose `end` will be told. Raises `RateLimitedError`; takes nothing then."""
        now, most = self._clock(), self._most_running
        if most is not None and self.running >= most:
            raise RateLimitedError(f"{self.running} requests of this key are running, of {most}", "concurrency", 1.0)
        if self._requests is not None and (wait_s := self._requests.wait_s(1, now)) > 0:
            message = f"this key may send {self._requests.per_minute} requests a minute"
            raise RateLimitedError(message, "requests", wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(1, now)) > 0:
            raise RateLimitedError(f"this key may use {self._tokens.per_minute} tokens a minute", "tokens", wait_s)
        if self._requests is not None:
            self._requests.take(1, now)
        self.running += 1

    def end(self) -> None:
        self.running -= 1

    def use(self, tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock())

    def shown(self) -> dict[Quota, Shown]:
        now = self._clock()
        buckets: dict[Quota, Bucket | None] = {"requests": self._requests, "tokens": self._tokens}
        return {
            name: Shown(each.per_minute, max(math.floor(each.left(now)), 0), each.wait_s(each.per_minute, now))
            for name, each in buckets.items()
            if each is not None
        }


def _bucket(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None or bucket is None:
        return None if per_minute is None else Bucket(per_minute, now)
    bucket.change(per_minute, now)
    return bucket
