"""Who has waited for too long: each by its own limit, whoever came before."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from core_fakes import request

from engine.core import overdue
from engine.core.overdue import Overdue


class Scheduler:
    def __init__(self) -> None:
        self.begun: set[str] = set()
        self.given_up: list[str] = []

    def has_begun(self, name: str) -> bool:
        return name in self.begun or name in self.given_up

    def give_up(self, name: str) -> list[str]:
        self.given_up.append(name)
        return [name]


@pytest.mark.parametrize("fewest", [0, 1024])
def test_each_is_given_up_when_its_own_time_is_over(fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what another core had, each has waited for another time."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(overdue, "_FEWEST", fewest)
    scheduler: Any = Scheduler()
    late = Overdue(scheduler)
    for name, wait_s in (("long", 600.0), ("short", 5.0), ("ever", None), ("begun", 1.0), ("middle", 50.0)):
        late.add(msgspec.structs.replace(request(name), wait_s=wait_s))
    scheduler.begun.add("begun")
    seen = {}
    for now[0] in (100.0, 104.9, 105.0, 149.0, 150.0, 699.9, 700.0, 1e6):
        seen[now[0]] = late.end()
    assert {at: told for at, told in seen.items() if told} == {105.0: ["short"], 150.0: ["middle"], 700.0: ["long"]}
