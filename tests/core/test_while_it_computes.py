"""An executor that computes in `collect`, as on CPUs: who comes, and who leaves, does not wait for the step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from core_fakes import TOKEN, ComputesInCollect, FakeExecutor, Gate, request, tiny_config

from engine.core.client import ProcessClient
from engine.core.loop import CoreLoop
from engine.core.start import build_core
from engine.core.wire import AbortRequests, ResetPrefixCache, SequenceDelta, Shutdown, StepOutputs, each_delta
from engine.errors import CoreDiedError
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


def test_who_is_told_when_the_loop_goes_idle_is_not_forgotten() -> None:
    with serving(_held()) as served:
        served.loop.inbox.put(request("a", 2))
        assert served.executor.began.wait(60)
        assert served.loop.take_now(request("x", 0), lambda outputs: False)
        served.executor.go.set()
        while not {"a", "x"} <= _ends(served.published).keys():
            assert served.thread.is_alive()


def test_what_fails_in_the_thread_that_receives_ends_the_loop_with_its_cause() -> None:
    executor = _held()
    loop, _ = build_core(executor.config, executor)
    loop.inbox.put(request("a", 3))
    raised: list[BaseException] = []

    def run() -> None:
        try:
            loop.run(lambda outputs: None)
        except KeyError as error:
            raised.append(error)

    def fail(outputs: StepOutputs) -> bool:
        raise KeyError("told nobody")

    thread = threading.Thread(target=run)
    thread.start()
    assert executor.began.wait(60)
    assert loop.take_now(request("x", 0), fail)
    executor.go.set()
    thread.join()
    executor.close()
    assert "told nobody" in str(raised)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_step_that_ends_while_somebody_is_refused_is_collected(async_scheduling: bool) -> None:
    """By an executor with a thread of its own: what wakes the loop is taken once."""
    executor = FakeExecutor(tiny_config(async_scheduling=async_scheduling))
    loop, _ = build_core(executor.config, executor)
    loop.inbox.put(request("a", 3))
    ends: dict[str, str | None] = {}
    while "a" not in ends:
        outputs = loop.turn()
        ends |= {} if outputs is None else _ends([outputs])
        while len(loop._done) < loop._in_flight:
            time.sleep(0.001)
        if "x" in ends:
            del ends["x"]  # whoever comes then, too
        elif loop._in_flight:
            loop.inbox.put(request("x", 0))
    executor.close()


def test_a_core_that_hangs_is_found_though_it_refuses() -> None:
    client = ProcessClient(tiny_config(async_scheduling=False), executor="core_fakes:HeldByAFile", hang_timeout_s=2.0)
    client.start()
    try:
        client.send(request("a", 4))
        Gate(client.pid).wait_until_computing()
        sent, stop = [0], threading.Event()

        def ask() -> None:
            while not stop.wait(0.2):
                sent[0] += 1
                with suppress(CoreDiedError):
                    client.send(request(f"x{sent[0]}", 0))

        asker = threading.Thread(target=ask)
        asker.start()
        with pytest.raises(CoreDiedError, match="hung"):
            while True:
                client.recv()
        stop.set()
        asker.join()
        assert sent[0] > 3
    finally:
        client.close()
        Gate(client.pid).remove()


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
