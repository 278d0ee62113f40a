"""Which adapter is in which slot of the device: the least recently taken one gives way, if nobody uses it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from engine.adapters.request import LoRARequest


class Slots:
    """Who waits for a slot is served in the order of arrival, and nobody for ever: as many resident adapters as wait,
    those taken longest ago, take no new users, so that their slots become free."""

    def __init__(self, count: int) -> None:
        self.resident: OrderedDict[LoRARequest, int] = OrderedDict()
        """the least recently taken first"""
        self.loading: dict[LoRARequest, int] = {}
        self.users: Counter[LoRARequest] = Counter()
        """sequences that are to run, or do, or are still in a step in flight"""
        self._free = list(range(count))[::-1]

    def take(self, adapter: LoRARequest, users: int, waiting: int = 0) -> int | None:
        """Its slot, if it is resident and open to new users. `waiting`: adapters that wait for a slot."""
        slot = self.resident.get(adapter)
        if slot is None or adapter in list(self.resident)[:waiting]:
            return None
        self.resident.move_to_end(adapter)
        self.users[adapter] += users
        return slot

    def leave(self, adapter: LoRARequest) -> None:
        """One user less."""
        self.users[adapter] -= 1
        if not self.users[adapter]:
            del self.users[adapter]

    def begin(self, adapter: LoRARequest) -> int | None:
        """The slot that it is to be loaded into; None: all are in use."""
        if not self._free:
            unused = next(self._unused(), None)
            if unused is None:
                return None
            self._free.append(self.resident.pop(unused))
        self.loading[adapter] = self._free.pop()
        return self.loading[adapter]

    def loaded(self, adapter: LoRARequest) -> None:
        self.resident[adapter] = self.loading.pop(adapter)

    def failed(self, adapter: LoRARequest) -> None:
        self._free.append(self.loading.pop(adapter))

    def _unused(self) -> Iterator[LoRARequest]:
        return (adapter for adapter in self.resident if adapter not in self.users)
