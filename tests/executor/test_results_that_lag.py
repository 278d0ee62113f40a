"""A device that runs behind: steps are started at once, results come later, and only one thread waits for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
from core_fakes import MIB, TOKEN, request, tiny_config
from test_in_process import FakeRunner, break_down, config, nothing, plan
from thread_cpu import assert_idle

from engine.config import EngineConfig
from engine.core.loop import CoreLoop
from engine.core.start import build_core
from engine.core.wire import AbortRequests, Shutdown
from engine.errors import EngineError
from engine.executor.in_process import InProcessExecutor
from engine.reports import LoadReport, WarmUpReport
from engine.step import StepPlan, StepResult

pytestmark = pytest.mark.timeout(120)


class Arriving:
    """A result that the test lets arrive."""

    at_hand = False

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.arrived = threading.Event()
        self.error: Exception | None = None
        self.waited_in: str | None = None

    def wait(self) -> StepResult:
        self.waited_in = threading.current_thread().name
        assert self.arrived.wait(20)
        if self.error is not None:
            raise self.error
        return StepResult(step_id=self.plan.step_id, token_ids=[TOKEN] * int(self.plan.rows.samples.sum()))


class LaggingRunner(FakeRunner):
    """Launches a step and returns; `launched` has them in order."""

    report = LoadReport(
        weight_bytes=MIB,
        activation_bytes=MIB,
        workspace_bytes=MIB,
        block_bytes=1024,
        device_bytes_total=64 * MIB,
        device_bytes_free=64 * MIB,
        attention_backend="fake",
    )

    def __init__(self, step: Callable[[StepPlan], None] = lambda plan: None) -> None:
        super().__init__(step)
        self.launched: SimpleQueue[Arriving] = SimpleQueue()

    def warm_up(self) -> WarmUpReport:
        return WarmUpReport()

    def execute(self, plan: StepPlan, masks: object = None) -> Arriving:  # type: ignore[override]  # a result of another kind
        self.step(plan)
        self.order.append(plan.step_id)
        arriving = Arriving(plan)
        self.launched.put(arriving)
        return arriving


@pytest.fixture
def runner() -> LaggingRunner:
    return LaggingRunner()


@pytest.fixture
def executor(runner: LaggingRunner) -> Iterator[InProcessExecutor]:
    made = InProcessExecutor(config(), lambda _: runner)
    made.load()
    yield made
    while not runner.launched.empty():
        runner.launched.get().arrived.set()
    made.close()


def submit(executor: InProcessExecutor, *steps: int) -> SimpleQueue[int]:
    """Returns the queue in which finished steps appear."""
    done: SimpleQueue[int] = SimpleQueue()
    for step in steps:
        executor.submit(plan(step), lambda step=step: done.put(step))  # type: ignore[misc]  # bound now
    return done


def test_a_step_is_done_when_its_result_has_arrived_and_not_when_it_was_launched(
    executor: InProcessExecutor, runner: LaggingRunner
) -> None:
    done = submit(executor, 0, 1)
    first, second = runner.launched.get(timeout=20), runner.launched.get(timeout=20)
    time.sleep(0.02)
    assert done.empty(), "both are launched, none has arrived"
    second.arrived.set()
    time.sleep(0.02)
    assert done.empty(), "results come in order"
    first.arrived.set()
    assert [done.get(timeout=20), done.get(timeout=20)] == [0, 1]
    assert [executor.collect().step_id, executor.collect().step_id] == [0, 1]
    assert {first.waited_in, second.waited_in} == {"results"}


def test_a_lost_device_is_raised_by_the_step_it_was_lost_in_and_ends_all_later_ones(
    executor: InProcessExecutor, runner: LaggingRunner
) -> None:
    done = submit(executor, 0, 1)
    first, second = runner.launched.get(timeout=20), runner.launched.get(timeout=20)
    first.error = RuntimeError("an illegal memory access was encountered")
    first.arrived.set()
    second.arrived.set()
    assert [done.get(timeout=20), done.get(timeout=20)] == [0, 1]
    with pytest.raises(RuntimeError, match="illegal memory access"):
        executor.collect()
    assert executor.collect().step_id == 1, "it had been launched"
    done = submit(executor, 2)
    assert done.get(timeout=20) == 2 and runner.order == [0, 1]
    with pytest.raises(EngineError, match="step 2 was not run, because step 0 failed: an illegal"):
        executor.collect()


def test_a_launch_that_fails_waits_its_turn_behind_results_under_way(
    executor: InProcessExecutor, runner: LaggingRunner
) -> None:
    runner.step = break_down(1)
    done = submit(executor, 0, 1)
    first = runner.launched.get(timeout=20)
    time.sleep(0.02)
    assert done.empty()
    first.arrived.set()
    assert [done.get(timeout=20), done.get(timeout=20)] == [0, 1]
    assert executor.collect().step_id == 0
    with pytest.raises(ArithmeticError, match="tensor core melted"):
        executor.collect()


def test_waiting_for_a_device_uses_no_processor_time(executor: InProcessExecutor, runner: LaggingRunner) -> None:
    done = submit(executor, 0)
    arriving = runner.launched.get(timeout=20)
    waiting = {thread.native_id for thread in threading.enumerate() if thread.name in ("runner", "results")}
    assert_idle(os.getpid(), waiting)
    arriving.arrived.set()
    assert done.get(timeout=20) == 0 and executor.collect().step_id == 0


def test_close_lets_launched_steps_end_and_joins_both_threads(runner: LaggingRunner) -> None:
    executor = InProcessExecutor(config(), lambda _: runner)
    executor.load()
    done = submit(executor, 0, 1)
    launched = [runner.launched.get(timeout=20) for _ in range(2)]
    threading.Timer(0.05, lambda: [arriving.arrived.set() for arriving in launched]).start()
    executor.close()
    executor.close()
    assert [done.get_nowait(), done.get_nowait()] == [0, 1]
    assert not {thread.name for thread in threading.enumerate()} & {"runner", "results"}
    with pytest.raises(EngineError, match="closed"):
        executor.collect()


def test_a_result_that_is_at_hand_needs_no_second_thread() -> None:
    executor = InProcessExecutor(config(), lambda _: FakeRunner())
    executor.load()
    try:
        executor.submit(plan(0), nothing)
        executor.collect()
        assert "results" not in {thread.name for thread in threading.enumerate()}
    finally:
        executor.close()


def loop_over(runner: LaggingRunner) -> tuple[CoreLoop, InProcessExecutor]:
    def load(_: EngineConfig) -> LaggingRunner:
        return runner

    executor = InProcessExecutor(tiny_config(), load)
    return build_core(tiny_config(), executor)[0], executor


def test_the_loop_takes_an_abort_while_the_device_computes(runner: LaggingRunner) -> None:
    loop, executor = loop_over(runner)
    try:
        loop.inbox.put(request("a", max_tokens=1000))
        loop.inbox.put(request("b", max_tokens=1000))
        thread = threading.Thread(target=loop.run, args=(lambda outputs: None,), daemon=True)
        thread.start()
        under_way = [runner.launched.get(timeout=20), runner.launched.get(timeout=20)]
        before = loop.taken
        loop.inbox.put(AbortRequests(request_ids=["a"]))
        until = time.monotonic() + 30
        while loop.taken == before:
            assert time.monotonic() < until, "the loop waits for the device and takes no messages"
            time.sleep(0.002)
        assert not any(arriving.arrived.is_set() for arriving in under_way)
        loop.inbox.put(AbortRequests(request_ids=["b"]))
        loop.inbox.put(Shutdown())
        thread.join(10)
        assert not thread.is_alive()
    finally:
        for arriving in under_way:
            arriving.arrived.set()
        executor.close()


def test_the_loop_generates_all_tokens_one_step_ahead_of_a_lagging_device(runner: LaggingRunner) -> None:
    loop, executor = loop_over(runner)
    ahead, stop = [], threading.Event()

    def device() -> None:
        while not stop.is_set():
            arriving = runner.launched.get()
            if arriving is not None:
                time.sleep(0.002)
                ahead.append(runner.launched.qsize())
                arriving.arrived.set()

    thread = threading.Thread(target=device, daemon=True)
    thread.start()
    try:
        loop.inbox.put(request("a", max_tokens=20))
        tokens: list[int] = []
        while loop.has_work:
            outputs = loop.turn()
            tokens += [token for delta in outputs.deltas for token in delta.token_ids] if outputs else []
        assert tokens == [TOKEN] * 20
        assert max(ahead) == 1
    finally:
        stop.set()
        runner.launched.put(None)  # type: ignore[arg-type]  # wakes the device for the last time
        thread.join(10)
        executor.close()
