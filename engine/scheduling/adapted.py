"""Requests with an adapter: they wait until it is in a slot of the device, without holding up those behind them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

from engine.adapters.interface import AdapterLoader
from engine.adapters.request import LoRARequest
from engine.adapters.slots import Slots
from engine.errors import InvalidRequestError
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.steps_in_flight import StepsInFlight

_Samples = list[Sequence]
"""a request's sequences, or the members of its search"""
_WAITS = -2
"""in the place of a sequence's slot, while it waits for one"""


class _Line(msgspec.Struct, eq=False):
    """Those that wait for an adapter."""

    requests: list[_Samples] = []
    """of some sequences may have ended"""
    alive: int = 0
    """sequences"""


class Adapted:
    """A sequence holds its adapter in its slot from before it waits for a row until it has ended and no step in flight
    has it: what is computed for a row always reads the adapter that it began with.

    While others wait for slots, of those that wait for a row as many keep their adapter's as there are rows."""

    def __init__(
        self, steps: StepsInFlight, loader: AdapterLoader | None, rows: int, begun: Callable[[str], None]
    ) -> None:
        """`begun`: is told for whom an adapter is loaded."""
        self._steps, self._loader, self._rows, self._begun = steps, loader, rows, begun
        self._slots = Slots(0 if loader is None else loader.num_slots)
        self._waiting: OrderedDict[LoRARequest, _Line] = OrderedDict()
        """the adapter that was asked for first, first; somebody waits for each, or it loads"""
        self._num_waiting = 0
        self._queued: dict[LoRARequest, dict[int, _Samples]] = {}
        """requests that have a slot, and of which nothing was computed yet, in order; by their samples' list"""
        self._leaving: deque[tuple[int, LoRARequest]] = deque()
        """sequences that have ended, with the step before which all must be complete"""
        self._ready: list[_Samples] = []
        self._failed: list[tuple[_Samples, str]] = []
        self.wants_rest = False
        """an adapter can be loaded when no step is in flight any more: none is to be planned"""

    def __len__(self) -> int:
        """Sequences that wait for an adapter."""
        return self._num_waiting

    @property
    def has_news(self) -> bool:
        """Of `take_ready` or `take_failed`."""
        return bool(self._ready or self._failed)

    def check(self, adapter: LoRARequest | None) -> None:
        """Raises `InvalidRequestError`."""
        if adapter is not None and self._loader is None:
            raise InvalidRequestError("this engine serves no adapters (--enable-lora)", "lora_request")

    def enter(self, samples: _Samples) -> bool:
        """Whether they may take their places at once; if not they come with `take_ready`, or `take_failed`."""
        adapter = samples[0].adapter
        if adapter is None:
            return True
        if adapter not in self._waiting and self._give(
            adapter, [samples], len(self._waiting) - len(self._slots.loading)
        ):
            return True
        for seq in samples:
            seq.status = Status.PREPARING
        self._wait(adapter, samples)
        self._go_on()
        return False

    def _wait(self, adapter: LoRARequest, samples: _Samples) -> None:
        for seq in samples:
            seq.slot = _WAITS
        line = self._waiting.setdefault(adapter, _Line())
        line.requests.append(samples)
        line.alive += len(samples)
        self._num_waiting += len(samples)

    def began(self, seq: Sequence) -> None:
        """A step takes it up for the first time."""
        if seq.adapter is not None:
            self._not_queued(seq)

    def _not_queued(self, seq: Sequence) -> None:
        assert seq.adapter is not None
        queued = self._queued.get(seq.adapter, {})
        if queued.pop(id(seq.siblings), None) is not None and not queued:
            del self._queued[seq.adapter]

    def take_those_that_give_way(self) -> list[_Samples]:
        """Requests that have begun nothing and go back to those that wait: of adapters that take no new ones, because
        others wait for slots, all beyond as many sequences as there are rows."""
        closed = max(len(self._waiting) - len(self._slots.loading), 0)
        found = []
        for adapter in list(self._slots.resident)[:closed] if self._queued else ():
            kept = 0
            for samples in list(self._queued.get(adapter, {}).values()):
                kept += len(samples)
                if kept > max(self._rows, len(samples)):
                    self._not_queued(samples[0])
                    for _ in samples:
                        self._slots.leave(adapter)
                    self._wait(adapter, samples)
                    found.append(samples)
        return found

    def leave(self, seq: Sequence) -> None:
        """It has ended."""
        if seq.adapter is None or seq.slot == -1:
            return
        if seq.slot == _WAITS:
            self._num_waiting -= 1
            line = self._waiting[seq.adapter]
            line.alive -= 1
            if not line.alive and seq.adapter not in self._slots.loading:
                del self._waiting[seq.adapter]
        else:
            self._leaving.append((self._steps.next_id, seq.adapter))
            if all(each.status is Status.FINISHED for each in seq.siblings):
                self._not_queued(seq)
        seq.slot = -1
        self.go_on()

    def loaded(self, adapter: LoRARequest) -> None:
        """It is in its slot, or could not be loaded."""
        self._end_loading(adapter)
        self._go_on()

    def go_on(self) -> None:
        """A step is complete, or somebody has ended."""
        while self._leaving and self._steps.are_complete(self._leaving[0][0]):
            self._slots.leave(self._leaving.popleft()[1])
        self._go_on()

    def take_ready(self) -> list[_Samples]:
        """Requests whose adapter has come; those sequences of them that have not ended."""
        ready, self._ready = self._ready, []
        return [alive for samples in ready if (alive := _preparing(samples))]

    def take_failed(self) -> list[tuple[Sequence, str]]:
        """One sequence of each request whose adapter cannot be loaded, and why."""
        failed, self._failed = self._failed, []
        return [(alive[0], problem) for samples, problem in failed if (alive := _preparing(samples))]

    def _go_on(self) -> None:
        """Whoever waits, in order, as far as there are slots."""
        self.wants_rest = False
        for adapter in list(self._waiting):
            if adapter in self._slots.loading:
                continue
            if adapter in self._slots.resident:
                self._ready += self._served(adapter)
            elif not self._load(adapter):
                return

    def _served(self, adapter: LoRARequest) -> list[_Samples]:
        """Those that wait for it, which is there, have its slot; where others wait, too, as many as there are rows."""
        requests, most = self._taken_out(adapter), len(self._waiting) and self._rows
        taken, count = list[_Samples](), 0
        for samples in requests:
            count += len(samples)
            if most and count > max(most, len(samples)):
                self._wait(adapter, samples)
            else:
                taken.append(samples)
        if taken:
            self._give(adapter, taken)
        return taken

    def _taken_out(self, adapter: LoRARequest) -> list[_Samples]:
        """They wait no more, those that have not ended."""
        line = self._waiting.pop(adapter, None)
        if line is None:
            return []
        self._num_waiting -= line.alive
        requests = [alive for samples in line.requests if (alive := _preparing(samples))]
        for seq in (seq for samples in requests for seq in samples):
            seq.slot = -1
        return requests

    def _give(self, adapter: LoRARequest, requests: list[_Samples], waiting: int = 0) -> bool:
        sequences = [seq for samples in requests for seq in samples]
        slot = self._slots.take(adapter, len(sequences), waiting)
        if slot is None:
            return False
        for seq in sequences:
            seq.slot = slot
        queued = self._queued.setdefault(adapter, {})
        queued |= {id(samples[0].siblings): samples[0].siblings for samples in requests}
        return True

    def _load(self, adapter: LoRARequest) -> bool:
        """False: all slots are in use, or are not to be filled now."""
        assert self._loader is not None
        if self._loader.needs_rest and self._steps:
            self.wants_rest = True
            return False
        slot = self._slots.begin(adapter)
        if slot is None:
            return False
        self._begun(next(seq for samples in self._waiting[adapter].requests for seq in _preparing(samples)).request_id)
        if self._loader.load(adapter, slot):
            self._end_loading(adapter)
        return True

    def _end_loading(self, adapter: LoRARequest) -> None:
        assert self._loader is not None
        problem = self._loader.problem(adapter)
        if problem is not None:
            self._slots.failed(adapter)
            self._failed += [(samples, problem) for samples in self._taken_out(adapter)]
            return
        self._slots.loaded(adapter)
        self._ready += self._served(adapter)


def _preparing(samples: _Samples) -> _Samples:
    return [seq for seq in samples if seq.status is Status.PREPARING]
