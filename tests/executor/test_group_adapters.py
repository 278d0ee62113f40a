"""When an adapter is loaded in all ranks, in whatever order they say so; and what of it one of them cannot load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.adapters.request import LoRARequest
from engine.executor.frames import Frame, FrameBuffer, LoadAdapter, LoadedAdapter, decode_command
from engine.executor.group_adapters import GroupAdapters

ONE, OTHER = (LoRARequest(name, number, f"/{name}") for number, name in enumerate(("one", "other"), 1))


class Workers:
    """In the place of a `WorkerWatch`, of two ranks."""

    pids = (10, 11)

    def __init__(self) -> None:
        self.heard_of_adapter: Callable[[int, LoadedAdapter], None] | None = None
        self.sent: list[LoadAdapter] = []
        self.owed = 0
        self.told: list[LoadedAdapter] = []

    def send(self, frame: bytes) -> None:
        buffer = FrameBuffer()
        buffer.feed(frame)
        found = buffer.next()
        assert isinstance(found, Frame)
        command = decode_command(found)
        assert isinstance(command, LoadAdapter)
        self.sent.append(command)

    def owe(self) -> None:
        self.owed += 1

    def owe_less(self) -> None:
        self.owed -= 1

    def answers(self) -> list[LoadedAdapter]:
        return self.told


class Local:
    """Rank 0's loader; `done`: before `load` returns."""

    num_slots = 3
    needs_rest = False

    def __init__(self, done: bool) -> None:
        self.done, self.problems = done, dict[LoRARequest, str]()
        self.read, self.forgotten = "", list[LoRARequest]()

    def load(self, adapter: LoRARequest, slot: int) -> bool:
        return self.done

    def problem(self, adapter: LoRARequest) -> str | None:
        return self.problems.pop(adapter, None)

    def digest(self, adapter: LoRARequest) -> str:
        return self.read

    def forget(self, adapter: LoRARequest) -> None:
        self.forgotten.append(adapter)


def made(
    done: bool, notified: list[LoRARequest]
) -> tuple[GroupAdapters, Workers, Local, Callable[[LoRARequest], None]]:
    workers, local, told = Workers(), Local(done), list[Any]()

    def make_local(notify: Any) -> Local:
        told.append(notify)
        return local

    group = GroupAdapters(workers, make_local, notified.append)  # type: ignore[arg-type]
    return group, workers, local, told[0]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_an_adapter_is_there_when_the_last_rank_says_so(order: tuple[int, ...]) -> None:
    notified: list[LoRARequest] = []
    group, workers, _, told_here = made(False, notified)
    assert group.num_slots == 3
    assert not group.load(ONE, 2) and not group.load(OTHER, 0)
    assert workers.sent == [LoadAdapter(ONE, 2), LoadAdapter(OTHER, 0)] and workers.owed == 2
    assert workers.heard_of_adapter is not None
    for index, rank in enumerate(order):
        assert notified == []
        if rank:
            workers.heard_of_adapter(rank, LoadedAdapter(ONE, None))
            if index < 2:
                workers.heard_of_adapter(rank, LoadedAdapter(OTHER, f"gone on {rank}"))
        else:
            told_here(ONE)
    assert notified == [ONE]
    assert group.problem(ONE) is None and workers.owed == 1


def test_what_one_rank_cannot_load_is_not_there_and_can_be_tried_again() -> None:
    notified: list[LoRARequest] = []
    group, workers, local, _ = made(True, notified)
    assert workers.heard_of_adapter is not None
    for attempt in range(2):
        assert not group.load(ONE, 1)
        workers.heard_of_adapter(1, LoadedAdapter(ONE, None))
        workers.heard_of_adapter(2, LoadedAdapter(ONE, None if attempt else "no such file"))
        assert notified.pop() == ONE and not notified
        assert group.problem(ONE) == (None if attempt else "rank 2: no such file")
        assert [sent.anew for sent in workers.sent] == [False, True][: attempt + 1]
    assert local.forgotten == [ONE], "rank 0 had read it, and does so again"
    local.problems[OTHER] = "own"
    assert not group.load(OTHER, 1)
    for rank in (1, 2):
        workers.heard_of_adapter(rank, LoadedAdapter(OTHER, "theirs"))
    assert group.problem(OTHER) == "own"


def test_ranks_that_have_read_different_files_have_nothing() -> None:
    notified: list[LoRARequest] = []
    group, workers, local, _ = made(True, notified)
    assert workers.heard_of_adapter is not None
    for attempt, digests in enumerate(("aab", "aaa")):
        assert not group.load(ONE, 1)
        local.read = digests[0]
        for rank in (1, 2):
            workers.heard_of_adapter(rank, LoadedAdapter(ONE, None, digests[rank]))
        problem = group.problem(ONE)
        assert problem is None if attempt else "different files" in str(problem)
    assert [sent.anew for sent in workers.sent] == [False, True]


def test_without_anybody_to_notify_loading_waits_for_all() -> None:
    workers, local = Workers(), Local(True)
    group = GroupAdapters(workers, lambda notify: local, None)  # type: ignore[arg-type, return-value]
    for told, problem in (((None, None), None), ((None, "late"), "rank 2: late")):
        workers.told = [LoadedAdapter(ONE, each) for each in told]
        assert group.load(ONE, 0)
        assert group.problem(ONE) == problem
    assert workers.heard_of_adapter is None and workers.owed == 0
