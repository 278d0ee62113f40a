"""Threads that help: all work is done, nobody stays in a run that has ended, and nobody waits for who has not come."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attention_backends.crew import _crew, helpers_of_this_thread

Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Functions(ctypes.Structure):
    """`pageloom::Crew`"""

    _fields_ = (
        ("run", ctypes.CFUNCTYPE(None, ctypes.c_int64, Body, ctypes.c_void_p)),
        ("step_aside", ctypes.CFUNCTYPE(ctypes.c_bool)),
    )


@dataclass
class Crew:
    functions: Functions

    def run(self, threads: int, body: Callable[[], None]) -> None:
        failed: list[BaseException] = []

        def guarded(_: object) -> None:
            try:
                body()
            except BaseException as error:
                failed.append(error)

        self.functions.run(threads, Body(guarded), None)
        for error in failed:
            raise error

    def step_aside(self) -> bool:
        return bool(self.functions.step_aside())


@pytest.fixture(scope="module")
def crew(kernel_cache: Path) -> Crew:
    return Crew(Functions.from_address(_crew(kernel_cache).crew()))


def elsewhere(work: Callable[[], Any]) -> Any:
    """In a thread of its own, which has helpers of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "a run does not end"
    return found[0]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_all_work_is_done_and_nobody_is_left_in_a_run(crew: Crew, threads: int) -> None:
    inside: list[int] = []
    most = 0

    def one_run(number: int) -> None:
        units, done = iter(range(7)), []

        def body() -> None:
            nonlocal most
            assert running == number
            inside.append(number)
            most = max(most, len(inside))
            for unit in units:  # each is given out once, whoever asks
                done.append(unit)  # noqa: PERF402  # threads take turns
            inside.remove(number)

        crew.run(threads, body)
        assert sorted(done) == list(range(7))
        assert inside == []

    def all_runs() -> bool:
        nonlocal running
        for running in range(2000):
            one_run(running)
        return True

    running = 0
    assert elsewhere(all_runs)
    assert most <= threads


def test_who_comes_helps(crew: Crew) -> None:
    """The caller waits for a helper, so there is one; both are in the same run."""

    def work() -> set[int]:
        came: set[int] = set()
        both = threading.Barrier(2, timeout=50)

        def body() -> None:
            came.add(threading.get_native_id())
            both.wait()

        crew.run(2, body)
        return came | {-threading.get_native_id()}

    came = elsewhere(work)
    assert len(came) == 3
    assert sum(-thread in came for thread in came) == 2


def test_who_steps_aside_learns_that_the_run_has_ended(crew: Crew) -> None:
    def work() -> tuple[bool, bool]:
        caller, entered, answers = threading.get_native_id(), threading.Event(), []

        def body() -> None:
            if threading.get_native_id() == caller:
                answers.append(crew.step_aside())
                assert entered.wait(50)
                return
            entered.set()
            while crew.step_aside():
                pass
            answers.append(False)

        crew.run(2, body)
        deadline = time.monotonic() + 50
        while len(answers) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        return answers[0], answers[1]

    assert elsewhere(work) == (True, False)


def test_a_run_within_a_run_has_nobody_else(crew: Crew) -> None:
    def work() -> list[int]:
        inner: list[int] = []

        def body() -> None:
            crew.run(4, lambda: inner.append(threading.get_native_id()))
            inner.append(0)

        crew.run(1, body)
        crew.run(3, body)
        return inner

    inner = elsewhere(work)
    assert len([thread for thread in inner if thread]) == inner.count(0)


def test_each_thread_has_helpers_of_its_own_and_they_go_with_it(kernel_cache: Path) -> None:
    def hire() -> list[int]:
        helpers = helpers_of_this_thread(2, kernel_cache)
        assert helpers_of_this_thread(1, kernel_cache) == helpers[:1]
        return helpers

    first, second = elsewhere(hire), elsewhere(hire)
    assert len({*first, *second}) == 4
    deadline = time.monotonic() + 30
    while set(map(str, (*first, *second))) & set(os.listdir("/proc/self/task")):
        assert time.monotonic() < deadline, "helpers stay without the thread that they helped"
        time.sleep(0.01)


def test_a_number_of_helpers_that_cannot_be_is_refused(kernel_cache: Path) -> None:
    for count in (-1, 1024):
        with pytest.raises(RuntimeError, match=f"helpers: {count} is not in"):
            helpers_of_this_thread(count, kernel_cache)
