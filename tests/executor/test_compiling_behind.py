"""An engine serves while pieces compile: they are put in between steps, fail without it, and end when it ends."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from core_fakes import FakeExecutor, tiny_config
from test_in_process import FakeRunner, loaded, nothing, plan
from test_in_process_serves_a_model import config  # noqa: F401 (a fixture)

from attention_backends.op import ATTENTION_OP
from compilation.behind import CompileJob, Swap, check_stop
from compilation.errors import CompileError
from compilation.interface import CompiledModel, CompileReport
from compilation.priority import LOW
from engine.config import EngineConfig
from engine.core.start import build_core
from engine.core.wire import Shutdown
from engine.executor.in_process import InProcessExecutor
from engine.executor.interface import CompileState
from engine.reports import WarmUpReport
from engine.runner import model_runner
from engine.step import NewRow, RowParams, Rows, ScheduledRow, StepPlan, Write, Writes

WAIT_S = 30.0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


class CompilingRunner(FakeRunner):
    """Compiles until `compiled` is set; `job` may do something else."""

    def __init__(self, job: CompileJob | None = None, step: Callable[[StepPlan], None] = lambda plan: None) -> None:
        super().__init__(step)
        self.compiled = threading.Event()
        self.swapped_in: int | None = None
        self.swapped_after: list[int] = []
        self.busy = False
        self._job = job or self._compile

    def compile_job(self) -> CompileJob:
        return self._job

    def _compile(self, stop: threading.Event) -> Swap:
        assert self.compiled.wait(WAIT_S)
        return self._swap

    def _swap(self) -> None:
        assert not self.busy, "in the middle of a step"
        self.swapped_in = threading.get_ident()
        self.swapped_after = list(self.order)

    def execute(self, plan: StepPlan, masks: object = None) -> Any:
        self.busy = True
        try:
            return super().execute(plan, masks)
        finally:
            self.busy = False


@pytest.fixture
def started() -> Iterator[Callable[[CompilingRunner], InProcessExecutor]]:
    executors = []

    def start(runner: CompilingRunner) -> InProcessExecutor:
        executor = loaded(runner)
        executors.append(executor)
        executor.warm_up()
        return executor

    yield start
    for executor in executors:
        executor.close()


@pytest.mark.timeout(120)
def test_steps_run_while_pieces_compile_and_the_swap_lies_between_two(
    started: Callable[[CompilingRunner], InProcessExecutor],
) -> None:
    runner = CompilingRunner(step=lambda plan: time.sleep(0.002))
    executor = started(runner)
    states: list[CompileState] = []
    executor.watch_compilation(lambda: states.append(executor.compile_state()))
    for step_id in range(40):
        if step_id == 20:
            assert executor.compile_state() == "running" and not states and runner.swapped_in is None
            runner.compiled.set()
        executor.submit(plan(step_id), nothing)
        assert executor.collect().token_ids == [step_id]
    until(lambda: executor.compile_state() == "done")
    assert runner.swapped_in in runner.threads, "the thread that runs the steps puts the pieces in"
    assert runner.swapped_after == list(range(len(runner.swapped_after))) and len(runner.swapped_after) >= 20
    assert states == ["done"]


@pytest.mark.timeout(120)
def test_an_idle_engine_gets_its_pieces_too(started: Callable[[CompilingRunner], InProcessExecutor]) -> None:
    runner = CompilingRunner()
    started(runner)
    runner.compiled.set()
    until(lambda: runner.swapped_in is not None)


@pytest.mark.timeout(120)
def test_a_failed_compilation_is_told_and_serving_goes_on(
    started: Callable[[CompilingRunner], InProcessExecutor], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(stop: threading.Event) -> Swap:
        raise CompileError("the compiler melted")

    with caplog.at_level(logging.WARNING):
        executor = started(CompilingRunner(fail))
        until(lambda: executor.compile_state() == "failed")
    assert "the compiler melted" in caplog.text and "eagerly" in caplog.text
    executor.submit(plan(1), nothing)
    assert executor.collect().token_ids == [1]


def test_pieces_that_failed_before_serving_are_told_too() -> None:
    class RunnerWithoutPieces(FakeRunner):
        def warm_up(self) -> WarmUpReport:
            super().warm_up()
            return WarmUpReport(compile_failed=True)

    executor = loaded(RunnerWithoutPieces())
    try:
        executor.warm_up()
        assert executor.compile_state() == "failed"
    finally:
        executor.close()


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="a thread's priority and its children are Linux'")
def test_compilers_run_at_a_low_priority_and_end_with_the_engine(
    started: Callable[[CompilingRunner], InProcessExecutor],
) -> None:
    children: list[subprocess.Popen[bytes]] = []
    mine = subprocess.Popen(["sleep", "60"])
    parts: list[str] = []

    def compile_with_children(stop: threading.Event) -> Swap:
        for part in ("first", "second"):
            check_stop(stop)
            parts.append(part)
            children.append(subprocess.Popen(["sh", "-c", "sleep 61 & wait"]))
            if children[-1].wait() != 0:
                raise CompileError("a compiler was killed")
        return nothing

    try:
        executor = started(CompilingRunner(compile_with_children))
        until(lambda: bool(children) and bool(psutil.Process(children[0].pid).children()))
        family = [psutil.Process(children[0].pid), *psutil.Process(children[0].pid).children()]
        assert [os.getpriority(os.PRIO_PROCESS, one.pid) for one in family] == [LOW] * 2
        executor.close()
        until(lambda: all(not one.is_running() or one.status() == psutil.STATUS_ZOMBIE for one in family))
        assert parts == ["first"] and mine.poll() is None, "nobody else's child is touched"
        assert executor.compile_state() == "running", "what was stopped is not delivered"
    finally:
        mine.kill()
        mine.wait()


@pytest.mark.timeout(120)
def test_a_process_may_exit_while_it_compiles() -> None:
    code = (
        "import sys, threading, time\n"
        "from engine.executor.behind import CompilationBehind\n"
        "def job(stop):\n"
        "    while True: sum(range(1000))\n"
        "CompilationBehind(job, lambda: None, lambda result: None)\n"
        "print('leaving')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


class CompilingExecutor(FakeExecutor):
    state: CompileState = "running"
    watcher: Callable[[], None]

    def compile_state(self) -> CompileState:
        return self.state

    def watch_compilation(self, changed: Callable[[], None]) -> None:
        self.watcher = changed


@pytest.mark.timeout(120)
def test_an_idle_core_tells_that_its_pieces_are_in_place() -> None:
    executor = CompilingExecutor(tiny_config())
    try:
        loop, ready = build_core(tiny_config(), executor)
        assert ready.compiling
        published: list[bool] = []
        thread = threading.Thread(target=loop.run, args=(lambda outputs: published.append(outputs.stats.compiling),))
        thread.start()
        executor.state = "done"
        executor.watcher()
        until(lambda: published == [False])
        loop.inbox.put(Shutdown())
        thread.join(WAIT_S)
    finally:
        executor.close()


@pytest.mark.timeout(120)
def test_tokens_are_the_same_before_and_after_the_swap(
    config: EngineConfig,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow compiler whose pieces are the model itself: what may differ is only which program runs."""
    go, runs = threading.Event(), []

    def slow_compiler(module: Any, examples: Any, split_ops: Any, bind: Any, *more: Any) -> CompiledModel:
        assert go.wait(WAIT_S)
        module.set_attention(bind[ATTENTION_OP])

        def run(*inputs: torch.Tensor) -> torch.Tensor:
            runs.append(inputs[0].shape[0])
            return module(*inputs)

        return CompiledModel(run=run, report=CompileReport(3, 3, 3, 0, 0.0))

    monkeypatch.setattr(model_runner, "compile_model", slow_compiler)
    compiling = msgspec.structs.replace(config, compile=msgspec.structs.replace(config.compile, mode="pieces"))
    executor = InProcessExecutor(compiling)
    try:
        executor.load()
        executor.allocate(8)
        executor.warm_up()
        outcomes = [generated(executor, 0)]
        assert executor.compile_state() == "running" and not runs

        def swap() -> None:
            go.set()
            until(lambda: executor.compile_state() == "done")

        outcomes += [generated(executor, 1, swap), generated(executor, 0)]
        assert len(runs) == 4 + 9 and executor.compiles_after_ready() == 0
    finally:
        go.set()
        executor.close()
    assert outcomes[0] == outcomes[1] == outcomes[2] and len(outcomes[0]) == 9


def generated(executor: InProcessExecutor, row: int, in_the_middle: Callable[[], None] = nothing) -> list[int]:
    new = NewRow(row=row, token_ids=[5, 6, 7, 8, 9], prompt_len=5, params=RowParams(seed=3, temperature=0.0))
    first = StepPlan(
        step_id=0,
        added=[new],
        block_appends=Writes.of([Write(0, row, 0, [4])]),
        rows=Rows.of([ScheduledRow(row=row, computed=0, query_len=5, samples=True)]),
    )
    decodes = [
        StepPlan(step_id=n, rows=Rows.of([ScheduledRow(row=row, computed=4 + n, query_len=1, samples=True)]))
        for n in range(1, 9)
    ]
    tokens: list[int] = []
    for step in (first, *decodes):
        if step.step_id == 5:
            in_the_middle()
        executor.submit(step, nothing)
        tokens += executor.collect().token_ids
    executor.submit(StepPlan(step_id=9, released=[row]), nothing)
    executor.collect()
    return tokens


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_real_pieces_give_the_eager_tokens_and_are_compiled_once(config: EngineConfig, tmp_path: Path) -> None:  # noqa: F811
    compiling = msgspec.structs.replace(
        config,
        compile=msgspec.structs.replace(config.compile, mode="pieces"),
        device=msgspec.structs.replace(config.device, threads=1),
    )
    tokens = []
    for _ in ("cold", "cached"):
        executor = InProcessExecutor(compiling)
        try:
            executor.load()
            executor.allocate(8)
            executor.warm_up()
            tokens.append(generated(executor, 0))
            deadline = time.monotonic() + 300
            while executor.compile_state() == "running":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert executor.compile_state() == "done"
            tokens.append(generated(executor, 0))
            assert executor.compiles_after_ready() == 0
        finally:
            executor.close()
    assert tokens[0] == tokens[1] == tokens[2] == tokens[3]
