"""torch's compute threads do work of ours: every part once, side by side, and nothing is lost that goes wrong."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from engine.executor.team import Team, team_of


def in_a_thread(work: Callable[[], None]) -> None:
    """Its compute threads are of its own."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_part_is_done_once_by_however_many_threads(threads: int, size: int) -> None:
    def work() -> None:
        torch.set_num_threads(threads)
        team = Team(size)
        done: Counter[int] = Counter()
        for _ in range(100):
            team.run(lambda part: done.update([part]))
        assert done == dict.fromkeys(range(size), 100)

    in_a_thread(work)


def test_parts_are_done_side_by_side() -> None:
    def work() -> None:
        torch.set_num_threads(2)
        both = threading.Barrier(2)
        Team(2).run(lambda _: bool(both.wait(20)) and None)

    in_a_thread(work)


def test_what_a_part_raises_comes_when_all_have_ended() -> None:
    def work() -> None:
        torch.set_num_threads(2)
        team, seen = Team(2), []

        def body(part: int) -> None:
            if part == 0:
                raise KeyError("first")
            seen.append(part)

        with pytest.raises(KeyError, match="first"):
            team.run(body)
        assert seen == [1]
        team.run(seen.append)
        assert sorted(seen) == [0, 1, 1]

    in_a_thread(work)


def test_ctrl_c_comes_before_what_else_went_wrong() -> None:
    def work() -> None:
        torch.set_num_threads(2)

        def body(part: int) -> None:
            raise (ValueError, KeyboardInterrupt)[part]

        with pytest.raises(KeyboardInterrupt):
            Team(2).run(body)

    in_a_thread(work)


def test_a_part_that_no_thread_came_to_is_done_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a signal's handler raises in a thread on its way to it."""
    team, done = Team(3), list[int]()
    monkeypatch.setattr(team, "_parallel_for", lambda begin, end, grain, parts, _: parts(1, 2, None))
    team.run(done.append)
    assert done == [1, 0, 2]


def test_no_team_of_one_and_none_where_torch_lends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert team_of(1) is None
    assert isinstance(team_of(2), Team)
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert team_of(2) is None
