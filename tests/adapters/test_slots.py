"""Slots for adapters: whoever is used stays, whoever waits comes, and only where nobody uses it one gives way."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.adapters.request import LoRARequest
from engine.adapters.slots import Slots

COUNT = 3
ADAPTERS = [LoRARequest(f"a{number}", number, "somewhere") for number in range(1, 8)]


class SlotsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(COUNT)
        self.users: dict[LoRARequest, int] = {}
        self.held: dict[LoRARequest, int] = {}
        """slots as the device has them"""
        self.taken: list[LoRARequest] = []
        """the last one last"""

    @rule(adapter=st.sampled_from(ADAPTERS), users=st.integers(1, 3), waiting=st.integers(0, 2))
    def take(self, adapter: LoRARequest, users: int, waiting: int) -> None:
        slot = self.slots.take(adapter, users, waiting)
        if slot is None:
            ready = [each for each in self.held if each not in self.slots.loading]
            oldest = sorted(ready, key=self.taken.index)[:waiting]
            assert adapter not in ready or adapter in oldest
            return
        assert slot == self.held[adapter] and adapter not in self.slots.loading
        self.users[adapter] = self.users.get(adapter, 0) + users
        self._touch(adapter)

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        adapter = data.draw(st.sampled_from(sorted(self.users, key=lambda each: each.lora_int_id)))
        self.slots.leave(adapter)
        self.users[adapter] -= 1
        if not self.users[adapter]:
            del self.users[adapter]

    @rule(data=st.data(), fails=st.booleans(), later=st.booleans())
    def load(self, data: st.DataObject, fails: bool, later: bool) -> None:
        absent = [adapter for adapter in ADAPTERS if adapter not in self.held]
        adapter = data.draw(st.sampled_from(absent))
        slot = self.slots.begin(adapter)
        unused = [each for each in self.held if each not in self.users and each not in self.slots.loading]
        if slot is None:
            assert len(self.held) == COUNT and not unused
            return
        gone = [each for each, place in self.held.items() if place == slot]
        if gone:
            assert len(self.held) == COUNT, "there was a free one"
            assert gone == [min(unused, key=self.taken.index)], "not the least recently taken one"
            del self.held[gone[0]]
        self.held[adapter] = slot
        if not later:
            self._end(adapter, fails)

    @precondition(lambda self: self.slots.loading)
    @rule(fails=st.booleans())
    def loaded(self, fails: bool) -> None:
        self._end(next(iter(self.slots.loading)), fails)

    def _end(self, adapter: LoRARequest, fails: bool) -> None:
        if fails:
            self.slots.failed(adapter)
            del self.held[adapter]
            return
        self.slots.loaded(adapter)
        self._touch(adapter)

    def _touch(self, adapter: LoRARequest) -> None:
        self.taken = [each for each in self.taken if each != adapter] + [adapter]

    @invariant()
    def each_has_a_slot_of_its_own(self) -> None:
        assert {**self.slots.resident, **self.slots.loading} == self.held
        assert len(set(self.held.values())) == len(self.held) <= COUNT
        assert dict(self.slots.users) == self.users and set(self.users) <= set(self.slots.resident)


TestSlots = SlotsMachine.TestCase
