"""What a step changed in the prefix cache, told to the front end."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.wire import KVDigests
from engine.kv_cache.events import Cleared, KVEvent
from engine.kv_cache.kv_cache import KVCache


class KVEventReporter:
    """Takes a cache's events once a turn of the loop."""

    def __init__(self, kv: KVCache) -> None:
        """Of a cache that keeps events."""
        assert kv.events is not None
        self._kv, self._events = kv, kv.events

    def take(self) -> KVDigests | None:
        """What is to be told the front end; None: nothing."""
        events = self._events.take()
        return digests_of(events, self._kv) if events else None


def digests_of(events: Sequence[KVEvent], kv: KVCache) -> KVDigests | None:
    """Of layer group 0, in either tier: what `events`, the last ones of `kv`, come to. None where that is nothing."""
    touched: dict[bytes, None] = {}
    cleared = False
    for event in events:
        if isinstance(event, Cleared):
            cleared = True
            touched.clear()
        elif event.group == 0:
            touched.update(dict.fromkeys(event.digests))
    if not touched and not cleared:
        return None
    stored = [digest for digest in touched if kv.finds(digest)]
    removed = [digest for digest in touched if not kv.finds(digest)]
    return KVDigests(stored=stored, removed=removed, cleared=cleared)
