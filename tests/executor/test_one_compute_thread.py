"""Steps one by one, as on a CPU, inline and in a thread: which thread computes, and on which CPUs."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch

from attention_backends.toolchain import default_cache_dir
from engine.config import EngineConfig
from engine.core.start import DEFAULT_EXECUTOR, load_executor
from engine.errors import ConfigError, EngineError
from engine.executor.affinity import Places, bind_thread
from engine.executor.cores import cores_of
from engine.executor.default import make_executor
from engine.executor.in_process import InProcessExecutor
from engine.executor.inline import InlineExecutor
from engine.observability.step_profile import PartTimes
from engine.reports import LoadReport, WarmUpReport
from engine.step import Rows, ScheduledRow, StepPlan, StepResult

ALLOWED = sorted(os.sched_getaffinity(0))


def places_of(threads: int) -> Places:
    return Places(threads, default_cache_dir())


class _Done:
    at_hand = True

    def __init__(self, step_id: int) -> None:
        self._step_id = step_id

    def wait(self) -> StepResult:
        return StepResult(step_id=self._step_id, token_ids=[7])


class _Watched:
    """Notes which thread calls what."""

    def __init__(self) -> None:
        self.threads: dict[str, str] = {}
        self.executed: list[int] = []
        self.fail_at: int | None = None
        self.cores: set[int] = set()

    @property
    def report(self) -> LoadReport:
        self.cores = os.sched_getaffinity(0)
        self.threads["load"] = threading.current_thread().name
        return LoadReport(
            weight_bytes=0,
            activation_bytes=0,
            workspace_bytes=0,
            block_bytes=1,
            device_bytes_total=1,
            device_bytes_free=1,
            attention_backend="none",
        )

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.threads["allocate"] = threading.current_thread().name

    def warm_up(self) -> WarmUpReport:
        self.threads["warm_up"] = threading.current_thread().name
        return WarmUpReport()

    def compile_job(self) -> None:
        return None

    def execute(self, plan: StepPlan, masks: object = None) -> _Done:
        self.threads["execute"] = threading.current_thread().name
        self.cores &= os.sched_getaffinity(0)
        if plan.step_id == self.fail_at:
            raise ValueError("a broken step")
        self.executed.append(plan.step_id)
        return _Done(plan.step_id)

    def idle_work(self) -> bool:
        return False

    part_times = PartTimes()

    def compiles_after_ready(self) -> int:
        return 0


def _plan(step_id: int) -> StepPlan:
    return StepPlan(step_id=step_id, rows=Rows.of([ScheduledRow(row=0, computed=0, query_len=1, samples=True)]))


@pytest.fixture
def runner() -> _Watched:
    return _Watched()


def _config(**device: object) -> EngineConfig:
    from core_fakes import tiny_config

    config = tiny_config(async_scheduling=False)
    return msgspec.structs.replace(config, device=msgspec.structs.replace(config.device, **device))


@pytest.fixture(params=[InlineExecutor, InProcessExecutor])
def kind(request: pytest.FixtureRequest) -> type[InProcessExecutor]:
    return request.param


def _executor(kind: type[InProcessExecutor], runner: _Watched, **device: object) -> InProcessExecutor:
    executor = kind(_config(**device), lambda _: runner)
    executor.load()
    executor.allocate(8)
    executor.warm_up()
    return executor


def test_one_thread_loads_warms_up_and_steps(kind: type[InProcessExecutor], runner: _Watched) -> None:
    executor, told = _executor(kind, runner), []
    for step in (0, 1):
        executor.submit(_plan(step), lambda step=step: told.append(step))
    assert [executor.collect().step_id for _ in range(2)] == [0, 1]
    assert told == [0, 1]
    expected = threading.current_thread().name if kind is InlineExecutor else "runner"
    assert runner.threads == dict.fromkeys(("load", "allocate", "warm_up", "execute"), expected)
    executor.close()


def test_after_a_failed_step_later_ones_are_not_run(kind: type[InProcessExecutor], runner: _Watched) -> None:
    executor = _executor(kind, runner)
    runner.fail_at = 1
    for step in range(3):
        executor.submit(_plan(step), lambda: None)
    executor.collect()
    with pytest.raises(ValueError, match="a broken step"):
        executor.collect()
    with pytest.raises(EngineError, match="step 2 was not run, because step 1 failed"):
        executor.collect()
    assert runner.executed == [0]
    executor.close()


def test_collecting_more_than_was_submitted_is_an_error(kind: type[InProcessExecutor], runner: _Watched) -> None:
    executor = _executor(kind, runner)
    with pytest.raises(EngineError, match="collect without a submitted step"):
        executor.collect()
    executor.close()
    with pytest.raises(EngineError, match="closed"):
        executor.submit(_plan(0), lambda: None)


def test_what_was_compiled_behind_waits_for_the_inline_step_that_runs(runner: _Watched) -> None:
    executor, entered, leave = _executor(InlineExecutor, runner), threading.Event(), threading.Event()
    order: list[str] = []

    def swap() -> None:
        order.append("swapped")

    def execute(plan: StepPlan, masks: object = None) -> _Done:
        entered.set()
        assert leave.wait(10)
        order.append("step")
        return _Done(plan.step_id)

    runner.execute = execute  # type: ignore[method-assign]  # this step is held up
    executor.submit(_plan(0), lambda: None)
    stepping = threading.Thread(target=executor.collect)
    stepping.start()
    assert entered.wait(10)
    swapping = threading.Thread(target=executor._between_steps, args=(swap,))
    swapping.start()
    swapping.join(0.05)
    assert swapping.is_alive() and order == []
    leave.set()
    stepping.join(10)
    swapping.join(10)
    assert order == ["step", "swapped"]
    executor.close()


def test_inline_steps_in_another_thread_work_and_are_warned_of(
    runner: _Watched, caplog: pytest.LogCaptureFixture
) -> None:
    executor = _executor(InlineExecutor, runner)
    executor.submit(_plan(0), lambda: None)
    other = threading.Thread(target=executor.collect, name="other")
    other.start()
    other.join(10)
    assert runner.threads["execute"] == "other"
    assert "loaded in another thread" in caplog.text
    executor.close()


def test_the_default_executor_is_inline_on_a_cpu_unless_steps_are_planned_ahead() -> None:
    config = _config()
    ahead = msgspec.structs.replace(config, scheduler=msgspec.structs.replace(config.scheduler, steps_in_flight=2))
    for given, expected in ((config, InlineExecutor), (ahead, InProcessExecutor)):
        executor = make_executor(given)
        assert type(executor) is expected
        executor.close()
    named = load_executor(DEFAULT_EXECUTOR, config)
    assert type(named) is InlineExecutor
    named.close()


def test_a_thread_that_cannot_be_prepared_fails_the_load(kind: type[InProcessExecutor], runner: _Watched) -> None:
    executor = kind(_config(threads=-1), lambda _: runner)
    with pytest.raises(RuntimeError, match="set_num_threads expects a positive"):
        executor.load()
    executor.close()


def test_compute_threads_are_bound_to_the_cores_that_are_named(kind: type[InProcessExecutor], runner: _Watched) -> None:
    def run() -> None:
        executor = _executor(kind, runner, cores=(ALLOWED[-1],))
        executor.submit(_plan(0), lambda: None)
        executor.collect()
        executor.close()
        after.append(os.sched_getaffinity(0))

    before, after = os.sched_getaffinity(0), []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert runner.cores == {ALLOWED[-1]}
    assert os.sched_getaffinity(0) == before, "only the threads that compute are bound"
    assert after == [before], "and they for as long as there is an executor"


def test_a_core_that_does_not_exist_is_refused_when_the_model_loads(
    kind: type[InProcessExecutor], runner: _Watched
) -> None:
    executor = kind(_config(cores=(100_000,)), lambda _: runner)
    with pytest.raises(ConfigError, match="cores: cannot bind to CPUs"):
        executor.load()
    executor.close()
    with pytest.raises(ConfigError, match="cores"):
        bind_thread([ALLOWED[0], 100_000])


@pytest.mark.skipif(len(cores_of(ALLOWED)) < 2, reason="one core")
def test_each_compute_thread_has_a_core_of_its_own_while_it_computes() -> None:
    """And whoever starts in between may run everywhere."""
    cores = cores_of(ALLOWED)
    seen: list[set[int]] = []

    def run() -> None:
        torch.set_num_threads(len(cores))
        places = places_of(len(cores))
        with places:
            seen.append(os.sched_getaffinity(0))
        seen.append(os.sched_getaffinity(0))
        threads = {int(name) for name in os.listdir("/proc/self/task")}
        bound = [os.sched_getaffinity(thread) for thread in threads]
        seen.extend(core for core in cores[1:] if core in bound)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert seen == [cores[0], set(ALLOWED), *cores[1:]]


@pytest.mark.skipif(len(cores_of(ALLOWED)) < 2, reason="one core")
@pytest.mark.parametrize("error", [PermissionError, OSError(errno.EINVAL, "not in the cpuset")])
def test_no_step_fails_where_threads_may_not_be_bound(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError] | OSError
) -> None:
    def refuse(*_: object) -> None:
        raise error

    def run() -> None:
        torch.set_num_threads(len(cores_of(ALLOWED)))
        before = places_of(len(cores_of(ALLOWED)))
        monkeypatch.setattr(os, "sched_setaffinity", refuse)
        for places in (before, places_of(len(cores_of(ALLOWED)))):
            with places:
                done.append(os.sched_getaffinity(0))
        monkeypatch.undo()
        before.close()

    done: list[set[int]] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert done == [set(ALLOWED)] * 2


@pytest.mark.skipif(len(cores_of(ALLOWED)) < 2, reason="one core")
def test_what_a_caller_says_of_its_own_thread_stays() -> None:
    def run() -> None:
        torch.set_num_threads(len(cores_of(ALLOWED)))
        places = places_of(len(cores_of(ALLOWED)))
        last = cores_of(ALLOWED)[-1]
        os.sched_setaffinity(0, last)
        with places:
            seen.append(os.sched_getaffinity(0))
        seen.append(os.sched_getaffinity(0))
        assert last == cores_of(ALLOWED)[-1]

    seen: list[set[int]] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert seen == [cores_of(ALLOWED)[-1]] * 2


def test_fewer_threads_than_cores_are_left_to_the_system() -> None:
    before = os.sched_getaffinity(0)
    with places_of(len(cores_of(ALLOWED)) + 1), places_of(1):
        assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(len(cores_of(ALLOWED)) < 2, reason="one core")
def test_torchs_own_threads_do_not_spin_where_others_compute() -> None:
    """GNU's OpenMP: 7 ms of a core after each parallel region otherwise."""
    schedstat = Path("/proc/self/task")
    if not (schedstat / str(threading.get_native_id()) / "schedstat").exists():
        pytest.skip("this system does not say what a thread has computed")

    def computed() -> dict[str, float]:
        found = {}
        for thread in os.listdir(schedstat):
            with suppress(OSError):
                found[thread] = int((schedstat / thread / "schedstat").read_text().split()[0]) / 1e6
        return found

    def run() -> None:
        torch.set_num_threads(len(cores_of(ALLOWED)))
        places = places_of(len(cores_of(ALLOWED)))
        x = torch.zeros(2000, 2000)
        x.sin_()
        here = str(threading.get_native_id())
        for _ in range(5):  # others of this process may compute in between
            before = computed()
            x[:200].sin_()
            time.sleep(0.05)
            after = computed()
            spun.append(max(after[thread] - before[thread] for thread in before if thread != here and thread in after))
        places.close()

    spun: list[float] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert min(spun) < 5
