"""What each turn of the loop changed in the prefix cache: told to the front end, and to the world."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import EngineConfig
from engine.core.kv_publisher import KVEventPublisher
from engine.core.wire import KVDigests
from engine.kv_cache.events import Cleared, KVEvent
from engine.kv_cache.kv_cache import KVCache


class KVEventReports:
    """Takes a cache's events once a turn of the loop."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises `ConfigError` where events are to be published and an endpoint is not to be had."""
        self.tells_front_end = config.cache.tell_front_end
        self._publisher = KVEventPublisher(config) if config.kv_events is not None else None
        self._kv: KVCache | None = None

    @property
    def wanted(self) -> bool:
        """Somebody is to be told of what the cache does."""
        return self.tells_front_end or self._publisher is not None

    def attach(self, kv: KVCache) -> None:
        """From now on it is told of this cache, which keeps events if that is `wanted`."""
        self._kv = kv
        if self._publisher is not None:
            self._publisher.start(kv.windows)

    def take(self) -> KVDigests | None:
        """Publishes what happened since the last call; returns what is to be told the front end."""
        kv = self._kv
        events = kv.events.take() if kv is not None and kv.events is not None else None
        if not events or kv is None:
            return None
        if self._publisher is not None:
            self._publisher.publish(events)
        return digests_of(events, kv) if self.tells_front_end else None

    def close(self) -> None:
        """What was taken is sent, if it can be within a second. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()


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
