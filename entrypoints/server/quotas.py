"""What one client may ask for: requests and tokens a minute, and requests at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from entrypoints.server.counts import Cells, Counts

Quota = Literal["requests", "tokens", "concurrency"]


class RateLimitedError(Exception):
    """A client asks for more than it may."""

    def __init__(self, message: str, quota: Quota, retry_after_s: float) -> None:
        super().__init__(message)
        self.quota, self.retry_after_s = quota, retry_after_s


class Bucket:
    """`per_minute` at most, and as many more each minute, evenly. It may be overdrawn by what is known only when it has
    been used."""

    CELLS = 3

    def __init__(self, cells: Cells, first: int) -> None:
        """What it holds is in three of the cells: per minute (0: as yet nothing was set), what is left, as of when."""
        self._cells, self._first = cells, first

    @property
    def per_minute(self) -> int:
        return int(self._cells[self._first])

    def set(self, per_minute: int, now: float) -> None:
        """What has been used stays used; what was lawful before is no debt."""
        before = self.per_minute
        if per_minute != before:
            left = self.left(now) if before else 0.0
            used = before - left
            self._cells[self._first] = per_minute
            self._put(max(per_minute - used, min(left, 0.0)), now)

    def left(self, now: float) -> float:
        left, at = self._cells[self._first + 1], self._cells[self._first + 2]
        if now > at:
            left = min(left + (now - at) * self.per_minute / 60, self.per_minute)
            self._put(left, now)
        return left

    def take(self, count: float, now: float) -> None:
        left = self.left(now)
        self._cells[self._first + 1] = left - count

    def wait_s(self, count: float, now: float) -> float:
        """Until so many are left."""
        return max(count - self.left(now), 0.0) * 60 / self.per_minute

    def _put(self, left: float, now: float) -> None:
        self._cells[self._first + 1], self._cells[self._first + 2] = left, now


class Shown(NamedTuple):
    """Of a bucket, in headers."""

    limit: int
    remaining: int
    reset_s: float
    """until it is full"""


class Quotas:
    """Of one client. `None`: as much as it wants."""

    def __init__(self, clock: Callable[[], float], counts: Counts) -> None:
        """`clock`: one for all who share the counts."""
        self._clock, self._counts = clock, counts
        self._requests_bucket, self._tokens_bucket = Bucket(counts.shared, 0), Bucket(counts.shared, Bucket.CELLS)
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._most_running: int | None = None

    @property
    def running(self) -> int:
        """Requests, of this process."""
        return int(self._counts.own)

    def set(self, requests: int | None, tokens: int | None, running: int | None) -> None:
        now, self._most_running = self._clock(), running
        self._requests = None if requests is None else self._requests_bucket
        self._tokens = None if tokens is None else self._tokens_bucket
        with self._counts.alone():
            for bucket, per_minute in ((self._requests, requests), (self._tokens, tokens)):
                if bucket is not None and per_minute is not None:
                    bucket.set(per_minute, now)

    def begin(self) -> None:
        """One request more, whose `end` will be told. Raises `RateLimitedError`; takes nothing then."""
        if self._most_running is None and self._requests is None and self._tokens is None:
            self.hold()
            return
        with self._counts.alone():
            self._begin()

    def _begin(self) -> None:
        now, most = self._clock(), self._most_running
        if most is not None and (running := int(self._counts.of_all)) >= most:
            raise RateLimitedError(f"{running} requests of this key are running, of {most}", "concurrency", 1.0)
        buckets = self._buckets
        waits = {name: each.wait_s(1, now) for name, each in buckets.items() if each is not None}
        quota = max(waits, key=lambda name: waits[name], default=None)
        if quota is not None and waits[quota] > 0 and (bucket := buckets[quota]) is not None:
            may = "send" if quota == "requests" else "use"
            message = f"this key may {may} {bucket.per_minute} {quota} a minute"
            raise RateLimitedError(message, quota, waits[quota])  # who waits for the longest has waited for all
        if self._requests is not None:
            self._requests.take(1, now)
        self.hold()

    def hold(self) -> None:
        """A request goes on behind its answer: it was asked for before."""
        self._counts.own += 1

    def end(self) -> None:
        self._counts.own -= 1

    def use(self, tokens: int) -> None:
        if self._tokens is not None:
            with self._counts.alone():
                self._tokens.take(tokens, self._clock())

    @property
    def _buckets(self) -> dict[Quota, Bucket | None]:
        return {"requests": self._requests, "tokens": self._tokens}

    def shown(self) -> dict[Quota, Shown]:
        buckets = self._buckets
        if not any(buckets.values()):
            return {}
        with self._counts.alone():
            now = self._clock()
            return {
                name: Shown(each.per_minute, max(math.floor(each.left(now)), 0), each.wait_s(each.per_minute, now))
                for name, each in buckets.items()
                if each is not None
            }
