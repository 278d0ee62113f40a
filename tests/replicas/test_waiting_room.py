"""Those that wait for a core, while none serves."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from fleet_life import Life, added
from replica_fakes import LittleCore

from engine.core.begun import Begun, BegunLog
from engine.core.wire import AddRequest
from engine.errors import CoreDiedError, QueueFullError
from engine.replicas.deliveries import Deliveries
from engine.replicas.waiting_room import WaitingRoom
from engine.request import Tenant
from engine.speculation_config import SpeculationConfig


def room(most: int, is_fair: bool) -> tuple[WaitingRoom, Deliveries]:
    deliveries = Deliveries(SpeculationConfig())
    return WaitingRoom(most, is_fair, deliveries), deliveries


def enter(waiting: WaitingRoom, name: str, tenant: str, n: int = 1, wait_s: float | None = None) -> None:
    waiting.enter(msgspec.structs.replace(added(name, [1, 2], 9, n), tenant=Tenant(tenant, 1.0), wait_s=wait_s))


def flood(waiting: WaitingRoom, tenant: str) -> int:
    for number in range(1000):
        try:
            enter(waiting, f"{tenant}{number}", tenant)
        except QueueFullError:
            return number
    raise AssertionError("there is no bound")


@pytest.mark.parametrize("is_fair", [False, True])
def test_a_flood_leaves_places_to_others_where_the_policy_is_fair(is_fair: bool) -> None:
    waiting, _ = room(80, is_fair)
    waiting.retry_after_s = 7.5
    taken = flood(waiting, "flood")
    assert taken == (70 if is_fair else 80)
    if is_fair:
        with pytest.raises(QueueFullError, match="of this client wait for a replica already") as caught:
            enter(waiting, "one more", "flood")
        assert caught.value.retry_after_s == 7.5
        for number in range(9):
            enter(waiting, f"other{number}", f"other{number}")
        enter(waiting, "last", "other0")
    with pytest.raises(QueueFullError, match="80 sequences wait for a replica, of 80") as caught:
        enter(waiting, "nobody", "nobody")
    assert caught.value.retry_after_s == 7.5 and waiting.num_sequences == 80


def test_one_request_alone_may_take_all_places() -> None:
    waiting, deliveries = room(8, is_fair=True)
    enter(waiting, "many", "a", n=8)
    with pytest.raises(QueueFullError):
        enter(waiting, "more", "b")
    for name in deliveries.left("many"):
        deliveries.end(name)
    enter(waiting, "again", "a", n=8)
    assert waiting.take() == ["again"] and not waiting


def test_nobody_waits_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    waiting, _ = room(8, is_fair=False)
    for name, wait_s in (("short", 5.0), ("long", 50.0), ("ever", None)):
        enter(waiting, name, "a", wait_s=wait_s)
    now[0] = 54.9
    assert waiting.take_overdue() == []
    now[0] = 55.0
    assert waiting.take_overdue() == ["short"] and waiting.num_sequences == 2
    now[0] = 1e6
    assert waiting.take_overdue() == ["long"] and waiting.take() == ["ever"]


def test_who_had_his_turn_or_waited_for_sleepers_may_wait_as_long_as_whoever_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A search, or a long prompt, of which nothing is told yet, whose core dies: it was refused by the next one."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    life = Life(1, followed=True)
    life.fleet.replicas[1].client.dead = True
    life.fleet.lost(life.fleet.replicas[1], CoreDiedError("killed"))
    [holder] = life.fleet.replicas
    for name in ("computed", "waits"):
        life.fleet.send(msgspec.structs.replace(added(name, [1], 9), wait_s=5.0, deadline_s=50.0))
    BegunLog(str(tmp_path)).add("computed")
    monkeypatch.setattr(LittleCore, "begun", lambda self: Begun(str(tmp_path)))
    now[0] = 104.0
    life.fleet.lost(holder, CoreDiedError("killed"), another_comes=True)
    life.come()
    [holder] = life.fleet.replicas
    sent = [message for message in holder.client.messages if isinstance(message, AddRequest)]
    assert {(each.request_id, each.wait_s, each.deadline_s) for each in sent} == {
        ("computed", 5.0, 46.0),
        ("waits", 1.0, 46.0),
    }
    life.fleet.rest(True)
    holder.leaving = True
    life.fleet.let_go()
    now[0] = 120.0
    life.fleet.end_overdue()
    life.fleet.rest(False)
    life.fleet.end_overdue()
    life.come()
    sent = [each for each in life.fleet.replicas[0].client.messages if isinstance(each, AddRequest)]
    assert {(each.request_id, each.wait_s, each.deadline_s) for each in sent} == {
        ("computed", 5.0, 30.0),
        ("waits", 1.0, 30.0),
    }
    assert not life.ended


def test_who_waits_for_a_trial_is_not_refused_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial before, of one that hangs cores, takes minutes."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    life = Life(1, followed=True)

    def die() -> None:
        for replica in life.fleet.replicas:
            life.fleet.lost(replica, CoreDiedError("it hangs"), another_comes=True)
        life.come()

    die()
    for name in ("first", "second"):
        life.fleet.send(msgspec.structs.replace(added(name, [1], 9), wait_s=600.0))
    waits = []
    for _ in range(3):
        now[0] += 310.0
        die()
        messages = life.fleet.replicas[0].client.messages
        waits.append({each.request_id: each.wait_s for each in messages if isinstance(each, AddRequest)})
    assert waits == [{"first": 600.0, "second": 600.0}, {"first": 600.0}, {"second": 600.0}]
