"""Requests that are known to kill cores. What ends with an error is sent again, by a person or by a client library: it
gets the same error at once, as long as the deaths that it has caused count."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from engine.core.wire import AddRequest
from engine.replicas.restarts import WINDOW_S
from engine.request import NOBODY

_MOST = 256


class Convicts:
    """By what is computed of a request, not by who asks, how urgently, or for which seed. Times are seconds of one
    monotonic clock. Not thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def add(self, request: AddRequest, why: str, now: float) -> None:
        key = _key(request)
        self._known[key] = now, why
        self._known.move_to_end(key)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)

    def why(self, request: AddRequest, now: float) -> str | None:
        """What it ends with; None: nothing is known of it."""
        while self._known and (oldest := next(iter(self._known.items())))[1][0] < now - WINDOW_S:
            del self._known[oldest[0]]
        if not self._known:  # nearly always
            return None
        found = self._known.get(_key(request))
        return None if found is None else found[1]


def _key(request: AddRequest) -> bytes:
    same = replace(
        request,
        request_id="",
        followers=[],
        params=replace(request.params, seed=0),
        priority=0,
        tenant=NOBODY,
        cache_salt=None,
        wait_s=None,
        deadline_s=None,
        pin=None,
        resumed=[],
    )
    return blake2b(msgspec.msgpack.encode(same), digest_size=16).digest()
