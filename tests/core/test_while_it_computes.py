"""An executor that computes in `collect`, as on CPUs: who comes, and who leaves, does not wait for the step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from core_fakes import TOKEN, ComputesInCollect, Gate, request, tiny_config

from engine.core.client import ProcessClient
from engine.core.loop import CoreLoop
from engine.core.start import build_core
from engine.core.wire import AbortRequests, ResetPrefixCache, SequenceDelta, Shutdown, StepOutputs, each_delta
from engine.step import StepPlan

pytestmark = pytest.mark.timeout(120)


class Served:
    """A loop in a thread of its own; who calls is the thread that receives."""

    def __init__(self, executor: ComputesInCollect) -> None:
        self.executor = executor
        self.loop, _ = build_core(executor.config, executor)
        self.told: list[StepOutputs] = []
        self.published: list[StepOutputs] = []
        self.thread = threading.Thread(target=self.loop.run, args=(self.published.append,))

    def tell(self, outputs: StepOutputs) -> bool:
        self.told.append(outputs)
        return True


@contextmanager
def serving(executor: ComputesInCollect) -> Iterator[Served]:
    served = Served(executor)
    served.thread.start()
    try:
        yield served
    finally:
        executor.go.set()
        served.loop.inbox.put(Shutdown())
        served.thread.join()
        executor.close()


def _held() -> ComputesInCollect:
    return ComputesInCollect(tiny_config(async_scheduling=False))


def _deltas(outputs: list[StepOutputs]) -> list[SequenceDelta]:
    return [delta for each in outputs for delta in each_delta(each.deltas)]


def _ends(outputs: list[StepOutputs]) -> dict[str, str | None]:
    return {each.request_id: each.error_kind for each in _deltas(outputs) if each.finish_reason is not None}


def test_while_a_step_computes_who_comes_is_refused_or_queued_and_who_leaves_is_let_go() -> None:
    with serving(_held()) as served:
        loop, executor = served.loop, served.executor
        loop.inbox.put(request("a", 3))
        loop.inbox.put(request("b", 3))
        assert executor.began.wait(60)
        assert loop.take_now(request("a"), served.tell)
        assert _ends(served.told) == {"a": "invalid"}
        assert loop.take_now(request("c", 2), served.tell)
        assert loop.take_now(AbortRequests(request_ids=["b"]), served.tell)
        assert not loop.take_now(ResetPrefixCache(), served.tell), "it is for the loop, with all that comes behind it"
        assert loop.taken == 5
        executor.go.set()
        while "c" not in _ends(served.published):
            assert served.thread.is_alive()
    tokens = [token for each in _deltas(served.published) if each.request_id == "c" for token in each.token_ids]
    assert tokens == [TOKEN] * 2
    assert loop._scheduler.stats().running == loop._scheduler.stats().waiting == 0
    assert "b" not in _ends(served.published)


def test_what_cannot_be_told_then_is_told_by_the_loop_in_order() -> None:
    with serving(_held()) as served:
        served.loop.inbox.put(request("a", 3))
        assert served.executor.began.wait(60)
        assert served.loop.take_now(request("x", 0), lambda outputs: False)
        assert served.loop.take_now(request("y", 0), served.tell)
        served.executor.go.set()
        while "a" not in _ends(served.published):
            assert served.thread.is_alive()
    assert not served.told, "it is behind one that was not told"
    assert list(_ends(served.published)) == ["x", "y", "a"]


def test_while_no_step_computes_messages_wait_for_the_loop() -> None:
    with serving(_held()) as served:
        assert not served.loop.take_now(request("a"), served.tell)


class Disturbed(ComputesInCollect):
    """While a step is planned, somebody comes that is refused."""

    loop: CoreLoop

    def __init__(self) -> None:
        super().__init__(tiny_config(async_scheduling=False))
        self.go.set()

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        super().submit(plan, done)
        self.loop.inbox.put(request(f"bad {plan.step_id}", 0))


def test_what_came_while_a_step_was_planned_is_answered_before_it_computes() -> None:
    executor = Disturbed()
    executor.loop, _ = build_core(executor.config, executor)
    loop, told = executor.loop, list[tuple[int, str]]()
    loop.inbox.put(request("a", 4))
    while [name for _, name in told].count("a") < 4:
        outputs = loop.turn()
        if outputs is not None:
            collected = sum(what == "collect" for what, _ in executor.log)
            told += [(collected, each.request_id) for each in each_delta(outputs.deltas)]
            loop.inbox.put(request("and another", 0))
        assert len(told) < 1000, "whoever else comes, steps go on"
    executor.close()
    for step in range(4):
        assert (step, f"bad {step}") in told, "steps that were computed before it was told"


def test_a_core_process_refuses_while_a_long_step_computes() -> None:
    client = ProcessClient(tiny_config(async_scheduling=False, max_waiting=4), executor="core_fakes:HeldByAFile")
    client.start()
    try:
        client.send(request("a", 4))
        Gate(client.pid).wait_until_computing()
        client.send(request("b", 0))
        while "b" not in (ended := _ends([client.recv()])):
            pass
        assert ended == {"b": "invalid"}
        client.send(AbortRequests(request_ids=["a"]))
        client.send(request("c", 2))
        client.send(request("d", 0))
        while "d" not in _ends([client.recv()]):
            pass
        Gate(client.pid).open()
        while "c" not in (ended := _ends([client.recv()])):
            assert "a" not in ended
    finally:
        client.close()
        Gate(client.pid).remove()
