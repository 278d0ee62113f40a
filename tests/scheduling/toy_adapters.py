"""A loader of adapters that takes turns of the loop, and knows what is in each slot of the device."""

from __future__ import annotations

from collections import deque

from engine.adapters.request import LoRARequest
from engine.step import StepPlan

BROKEN = 9
"""number of the adapter that cannot be loaded"""


def adapter(number: int) -> LoRARequest | None:
    """0: none."""
    return LoRARequest(f"adapter-{number}", number, "somewhere") if number else None


class ToyAdapters:
    def __init__(self, num_slots: int, delay: int, numbers: dict[int, int]) -> None:
        """`delay`: turns that loading takes; 0: it is done at once. `numbers`: of the device, by slot: whose it
        holds."""
        self.num_slots, self._delay, self.numbers = num_slots, delay, numbers
        self.needs_rest = False
        self.under_way: dict[LoRARequest, int] = {}
        self._slots: dict[int, int] = {}
        """by row, behind the plans so far"""
        self._in_use: deque[set[int]] = deque()
        """slots that each step in flight reads"""

    def begin(self, plan: StepPlan) -> None:
        self._slots.update({new.row: new.adapter_slot for new in plan.added})
        self._in_use.append({self._slots[row.row] for row in plan.rows.each()})

    def end(self) -> None:
        """The oldest step in flight is complete."""
        self._in_use.popleft()

    def load(self, adapter: LoRARequest, slot: int) -> bool:
        assert 0 <= slot < self.num_slots
        assert not any(slot in used for used in self._in_use), "a step in flight would read another adapter"
        self.numbers[slot] = adapter.lora_int_id
        if self._delay:
            self.under_way[adapter] = self._delay
        return not self._delay

    def problem(self, adapter: LoRARequest) -> str | None:
        return "it is broken" if adapter.lora_int_id == BROKEN else None

    def turn(self) -> list[LoRARequest]:
        """What has been loaded meanwhile."""
        self.under_way = {adapter: left - 1 for adapter, left in self.under_way.items()}
        done = [adapter for adapter, left in self.under_way.items() if left <= 0]
        for each in done:
            del self.under_way[each]
        return done
