from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from thread_cpu import assert_idle, mine, thread_ids

from compilation.behind import CompileJob
from engine.config import CacheConfig, CompileConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.errors import EngineError
from engine.executor.in_process import STEPS_BETWEEN_IDLE_WORK, InProcessExecutor
from engine.executor.interface import Executor
from engine.observability.step_profile import PartTimes
from engine.reports import LoadReport, WarmUpReport
from engine.step import StepPlan, StepResult

REPORT = LoadReport(
    weight_bytes=1,
    activation_bytes=2,
    workspace_bytes=3,
    block_bytes=4,
    device_bytes_total=5,
    device_bytes_free=6,
    attention_backend="fake",
)


def nothing() -> None:
    """What is called when a step is done."""


def config(threads: int = 1) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            path="x",
            tokenizer="x",
            served_name="x",
            dtype="float32",
            max_model_len=8,
            vocab_size=8,
            eos_token_ids=(),
            seed=0,
            load_format="dummy",
        ),
        cache=CacheConfig(
            dtype="float32", block_size=4, kv_cache_memory=None, memory_fraction=0.5, enable_prefix_caching=False
        ),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8, max_waiting=1),
        compile=CompileConfig(mode="none", graphs="none", cache_dir=str(Path("/nonexistent"))),
        device=DeviceConfig(kind="cpu", threads=threads),
        max_logprobs=0,
    )


class Done:
    at_hand = True

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id

    def wait(self) -> StepResult:
        return StepResult(step_id=self.step_id, token_ids=[self.step_id])


class FakeRunner:
    report = REPORT

    def __init__(self, step: Callable[[StepPlan], None] = lambda plan: None) -> None:
        self.step = step
        self.threads: set[int] = set()
        self.torch_threads = 0
        self.order: list[int] = []

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.threads.add(threading.get_ident())

    def warm_up(self) -> WarmUpReport:
        self.threads.add(threading.get_ident())
        self.torch_threads = torch.get_num_threads()
        return WarmUpReport(distinct_pieces=7)

    def execute(self, plan: StepPlan, masks: object = None) -> Done:
        self.threads.add(threading.get_ident())
        self.step(plan)
        self.order.append(plan.step_id)
        return Done(plan.step_id)

    def idle_work(self) -> bool:
        return False

    def compile_job(self) -> CompileJob | None:
        return None

    part_times = PartTimes()

    def compiles_after_ready(self) -> int:
        return 0


def loaded(runner: FakeRunner, threads: int = 1) -> InProcessExecutor:
    executor = InProcessExecutor(config(threads), lambda _: runner)
    assert executor.load() == REPORT
    return executor


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id=step_id)


def break_down(failing: int) -> Callable[[StepPlan], None]:
    def step(plan: StepPlan) -> None:
        if plan.step_id == failing:
            raise ArithmeticError("the tensor core melted")

    return step


def test_everything_runs_in_one_other_thread_in_order() -> None:
    before = torch.get_num_threads()
    runner = FakeRunner(lambda plan: time.sleep(0.002))
    executor: Executor = loaded(runner, threads=3)
    try:
        executor.allocate(3)
        assert executor.warm_up().distinct_pieces == 7
        for step in range(20):
            executor.submit(plan(step), nothing)
        assert [executor.collect().step_id for _ in range(20)] == list(range(20))
    finally:
        executor.close()
        torch.set_num_threads(before)
    assert runner.order == list(range(20))
    assert len(runner.threads) == 1 and threading.get_ident() not in runner.threads
    assert runner.torch_threads == 3


def test_submit_returns_while_the_step_before_still_computes() -> None:
    gate = threading.Event()
    executor = loaded(FakeRunner(lambda plan: gate.wait(20) and None))
    try:
        executor.submit(plan(0), nothing)
        executor.submit(plan(1), nothing)  # would hang if submit waited
        gate.set()
        assert [executor.collect().step_id for _ in range(2)] == [0, 1]
    finally:
        executor.close()


def test_a_failed_step_raises_at_its_own_collect_with_its_traceback() -> None:
    executor = loaded(FakeRunner(break_down(1)))
    try:
        for step in range(3):
            executor.submit(plan(step), nothing)
        assert executor.collect().step_id == 0
        with pytest.raises(ArithmeticError) as caught:
            executor.collect()
        assert "break_down" not in str(caught.value)
        assert "raise ArithmeticError" in "".join(traceback.format_exception(caught.value))
        with pytest.raises(EngineError, match="step 2 was not run, because step 1 failed: the tensor core"):
            executor.collect()
    finally:
        executor.close()


def test_a_failed_load_raises_in_the_callers_thread() -> None:
    def load(_: EngineConfig) -> FakeRunner:
        raise OSError("no such weights")

    executor = InProcessExecutor(config(), load)
    try:
        with pytest.raises(OSError, match="no such weights"):
            executor.load()
        with pytest.raises(EngineError, match="call load"):
            executor.allocate(1)
    finally:
        executor.close()


def test_close_joins_the_thread_drops_what_waits_and_may_be_repeated() -> None:
    entered = threading.Event()

    def step(plan: StepPlan) -> None:
        entered.set()
        time.sleep(0.05)

    runner = FakeRunner(step)
    executor = loaded(runner)
    for number in range(5):
        executor.submit(plan(number), nothing)
    entered.wait(20)
    executor.close()
    executor.close()
    assert runner.order == [0]
    assert not any(thread.name == "runner" for thread in threading.enumerate())
    for call in (lambda: executor.submit(plan(9), nothing), executor.collect, executor.load):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_collect_without_a_step_is_an_error_not_a_hang() -> None:
    executor = loaded(FakeRunner())
    try:
        with pytest.raises(EngineError, match="collect without a submitted step"):
            executor.collect()
    finally:
        executor.close()


def test_waiting_uses_no_processor_time() -> None:
    others, go = thread_ids(), threading.Event()
    executor = loaded(FakeRunner(lambda plan: go.wait(60)))
    collecting = threading.Thread(target=executor.collect)
    try:
        executor.submit(plan(0), nothing)
        collecting.start()
        assert_idle(os.getpid(), mine(others))
        go.set()
        collecting.join(30)
        assert not collecting.is_alive()
    finally:
        go.set()
        executor.close()


class CapturingRunner(FakeRunner):
    """Has `turns` turns of idle work to do; logs them between the steps as "idle"."""

    def __init__(self, turns: int, step: Callable[[StepPlan], None] = lambda plan: None) -> None:
        super().__init__(step)
        self.turns = turns
        self.log: list[str | int] = []
        self.idle = threading.Event()
        self.error: Exception | None = None

    def execute(self, plan: StepPlan, masks: object = None) -> Done:
        self.log.append(plan.step_id)
        return super().execute(plan, masks)

    def idle_work(self) -> bool:
        self.threads.add(threading.get_ident())
        if self.error is not None:
            self.idle.set()
            raise self.error
        if self.turns:
            self.turns -= 1
            self.log.append("idle")
        if not self.turns:
            self.idle.set()
        return self.turns > 0


def test_idle_work_is_done_when_nothing_is_in_flight_and_only_after_warm_up() -> None:
    runner = CapturingRunner(5)
    executor = loaded(runner)
    try:
        executor.allocate(1)
        assert runner.turns == 5
        executor.warm_up()
        assert runner.idle.wait(20) and runner.log == ["idle"] * 5
        executor.submit(plan(0), nothing)
        assert executor.collect().step_id == 0
        assert len(runner.threads) == 1
    finally:
        executor.close()


def test_under_steady_load_idle_work_gets_a_turn_every_few_steps() -> None:
    runner = CapturingRunner(10**6, lambda plan: time.sleep(0.001))
    executor = loaded(runner)
    steps = 5 * STEPS_BETWEEN_IDLE_WORK
    try:
        executor.submit(plan(0), nothing)
        executor._call(lambda: setattr(executor, "_idle_work_left", True))
        for step in range(1, steps):
            executor.submit(plan(step), nothing)  # one step ahead: there is always one in flight
            executor.collect()
    finally:
        executor.close()
    busy = runner.log[: runner.log.index(steps - 1) + 1]
    gaps = "".join("i" if entry == "idle" else "s" for entry in busy).split("i")
    assert max(map(len, gaps)) == STEPS_BETWEEN_IDLE_WORK
    assert all(gaps[1:]), "never two turns between two steps"
    assert [entry for entry in busy if entry != "idle"] == list(range(steps))


def test_idle_work_goes_on_when_the_last_step_was_collected() -> None:
    runner = CapturingRunner(3)
    executor = loaded(runner)
    try:
        executor.submit(plan(0), nothing)
        executor._call(lambda: setattr(executor, "_idle_work_left", True))
        time.sleep(0.05)
        assert runner.log == [0], "a step in flight is not idle"
        executor.collect()
        assert runner.idle.wait(20) and runner.log == [0, "idle", "idle", "idle"]
    finally:
        executor.close()


def test_failed_idle_work_is_reported_by_the_next_step() -> None:
    runner = CapturingRunner(3)
    runner.error = RuntimeError("illegal memory access")
    executor = loaded(runner)
    try:
        executor.warm_up()
        assert runner.idle.wait(20)
        executor.submit(plan(0), nothing)
        with pytest.raises(EngineError, match="step 0 was not run, because the work between steps failed: illegal"):
            executor.collect()
    finally:
        executor.close()


def test_close_does_not_wait_for_all_idle_work() -> None:
    runner = CapturingRunner(10**6)
    executor = loaded(runner)
    executor.warm_up()
    executor.close()
    assert runner.turns > 0
