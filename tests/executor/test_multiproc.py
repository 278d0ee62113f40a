"""Real worker processes under fake ranks: order, reports, errors by kind, every way to die, and what is left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from core_fakes import tiny_config
from fake_ranks import FAKE_GROUP, group_config, told
from thread_cpu import assert_idle

from engine.errors import ConfigError, EngineError, WeightsError
from engine.executor.multiproc import MultiprocExecutor
from engine.executor.ranks import Parts
from engine.step import StepMasks, StepPlan, StepResult

pytestmark = pytest.mark.timeout(180)
HANG_S = 60.0
"""no test waits for longer, and none says how quick anything has to be"""


def nothing() -> None:
    """What is called when a step is done."""


def plan(step_id: int, **more: list[int]) -> StepPlan:
    return StepPlan(step_id=step_id, **more)  # type: ignore[arg-type]


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


@contextmanager
def group(kind: str, where: Path, ranks: int = 2, parts: tuple[str, str] = FAKE_GROUP) -> Iterator[MultiprocExecutor]:
    """An executor that has not loaded; afterwards nothing of it is left: processes, threads, descriptors."""
    descriptors = open_descriptors()
    config = group_config(tiny_config(async_scheduling=False), ranks, where)
    executor = MultiprocExecutor(config, Parts(f"fake_ranks:{kind}", *parts))
    try:
        yield executor
    finally:
        executor.close()
        executor.close()
        started = executor._workers.pids if executor._workers else []
        assert not any(psutil.pid_exists(pid) for pid in started), "neither orphans nor zombies"
        assert not any(thread.name.startswith(("workers", "rank-")) for thread in threading.enumerate())
        assert open_descriptors() == descriptors


def open_descriptors() -> Counter[str]:
    """Of the kinds that a group needs, how many there are."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the listing itself
            found[os.readlink(f"/proc/self/fd/{name}").split(":[")[0]] += 1
    return Counter(
        {kind: count for kind, count in found.items() if kind.startswith(("anon_inode", "socket", "/memfd"))}
    )


def pids(where: Path, rank: int) -> list[int]:
    return [int(line.split()[1]) for line in told(where, rank) if line.startswith("pid")]


@contextmanager
def serving(kind: str, where: Path, ranks: int = 2) -> Iterator[MultiprocExecutor]:
    with group(kind, where, ranks) as executor:
        executor.load()
        executor.allocate(7, 5)
        executor.warm_up()
        yield executor


def step(executor: MultiprocExecutor, step_id: int) -> list[int]:
    executor.submit(plan(step_id), nothing)
    return executor.collect().token_ids


def refuses_for_ever(executor: MultiprocExecutor, match: str) -> None:
    calls = (lambda: executor.submit(plan(9), nothing), executor.collect, executor.warm_up)
    for call in calls:
        with pytest.raises(EngineError, match=match):
            call()


def test_every_rank_does_all_of_it_in_order_and_what_comes_is_rank_0s(tmp_path: Path) -> None:
    masks = StepMasks(1, np.ones((3, 100_000), dtype=np.int32))  # more than a socket holds
    with group("Light", tmp_path, ranks=3) as executor:
        loaded = executor.load()
        assert (loaded.weight_bytes, loaded.block_bytes) == (10 + 11 + 12, 40 + 41 + 42)
        executor.allocate(7, 5)
        warm = executor.warm_up()
        assert (warm.distinct_pieces, warm.compiled, warm.compile_failed) == (3, 0 + 1 + 2, True)
        assert executor.compile_state() == "failed"
        for step_id in (0, 1):
            executor.submit(plan(step_id, masked=[0] * step_id), nothing)
        executor.sample(masks)
        assert [executor.collect() for _ in range(2)] == [StepResult(step_id=i, token_ids=[0]) for i in (0, 1)]
        assert step(executor, 5) == [0], "another scheduler's plans may begin anywhere"
        until(lambda: "step 5" in told(tmp_path, 1) and "step 5" in told(tmp_path, 2))
    steps = ["step 0", "masks 1 300000", "step 1", "step 5"]
    for rank in range(3):
        assert told(tmp_path, rank)[1:] == ["load", "allocate 7 5", "warm_up", *steps, *(["close"] if not rank else [])]


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        ("OthersNotFitting", ConfigError, r"^the model needs 9 GiB\nlower --max-model-len$"),
        ("OthersWithoutWeights", WeightsError, r"^model.safetensors: layer 3 is missing$"),
        ("OthersLoadingBadly", EngineError, r"rank 1 \(process \d+\) failed\n(.*\n)+KeyError: 'no such shard'$"),
        ("Rank0NotFitting", ConfigError, "^rank 0 has no room$"),
    ],
)
def test_a_rank_that_cannot_load_fails_the_start_with_its_own_error(
    kind: str, error: type[Exception], match: str, tmp_path: Path
) -> None:
    with group(kind, tmp_path) as executor:
        with pytest.raises(error, match=match) as caught:
            executor.load()
        assert type(caught.value) is error
        with pytest.raises(EngineError, match="closed"):
            executor.load()


def test_what_a_worker_cannot_import_or_make_fails_the_start(tmp_path: Path) -> None:
    no_group = ("fake_ranks:allocate", "fake_ranks:no_group")
    refused = pytest.raises(EngineError, match=r"^the memory of the group is not of this size$")
    with group("Light", tmp_path, parts=no_group) as executor, refused:
        executor.load()
    with group("Light", tmp_path) as executor, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [path for path in sys.path if not path.endswith("executor")])
        with pytest.raises(EngineError, match=r"ModuleNotFoundError: No module named 'fake_ranks'$"):
            executor.load()
    with group("Light", tmp_path) as executor, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [])
        with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) died: exited with status 1: .*Error"):
            executor.load()


def test_a_worker_that_is_killed_while_it_loads_is_told_of(tmp_path: Path) -> None:
    with group("LoadingForEver", tmp_path) as executor:

        def kill() -> None:
            until(lambda: "loading" in told(tmp_path, 1))
            os.kill(pids(tmp_path, 1)[0], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) died: killed by signal 9 \(SIGKILL\)"):
            executor.load()
        killer.join()


def test_a_worker_that_is_stopped_while_it_loads_is_told_of(tmp_path: Path) -> None:
    with group("LoadingForEver", tmp_path) as executor:

        def stop() -> None:
            until(lambda: "loading" in told(tmp_path, 1))
            os.kill(pids(tmp_path, 1)[0], signal.SIGSTOP)

        stopper = threading.Thread(target=stop)
        stopper.start()
        with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) was stopped by a signal"):
            executor.load()
        stopper.join()


def test_a_worker_that_is_killed_while_idle_fails_the_next_call(tmp_path: Path) -> None:
    with serving("Light", tmp_path) as executor:
        assert step(executor, 0) == [0]
        [pid] = pids(tmp_path, 1)
        told_of = threading.Event()
        executor.watch_compilation(told_of.set)
        told_of.clear()
        os.kill(pid, signal.SIGKILL)
        assert told_of.wait(HANG_S)
        until(lambda: not psutil.pid_exists(pid))
        until(lambda: executor._cause)
        with pytest.raises(EngineError, match=r"rank 1 .* died"):
            executor.compile_state()
        refuses_for_ever(executor, r"rank 1 .* died: killed by signal 9 \(SIGKILL\)")


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGKILL, "died: killed by signal 9"), (signal.SIGSTOP, "was stopped by")]
)
def test_a_worker_that_is_lost_in_a_step_ends_the_wait_for_it(
    number: signal.Signals, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.executor.worker_watch.CLOSE_S", 0.3)  # rank 1 hangs, too
    with serving("OthersHanging", tmp_path, ranks=3) as executor:
        for step_id in range(3):
            step(executor, step_id)
        executor.submit(plan(3), nothing)
        until(lambda: "hanging" in told(tmp_path, 2))
        [pid] = pids(tmp_path, 2)
        os.kill(pid, number)
        with pytest.raises(EngineError, match=rf"rank 2 \(process {pid}\) {cause}"):
            executor.collect()
        refuses_for_ever(executor, cause)
        until(lambda: not psutil.pid_exists(pid))


def test_a_worker_that_is_stopped_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    with serving("Light", tmp_path) as executor:
        [pid] = pids(tmp_path, 1)
        os.kill(pid, signal.SIGSTOP)
        goes_on = threading.Timer(0.1, os.kill, (pid, signal.SIGCONT))
        goes_on.start()
        assert step(executor, 0) == [0]
        goes_on.join()


def test_the_last_words_of_a_worker_that_left_are_the_cause(tmp_path: Path) -> None:
    with serving("OthersLeaving", tmp_path) as executor:
        for step_id in range(3):
            step(executor, step_id)
        with pytest.raises(EngineError, match=r"rank 1 .* died: exited with status 7: glibc: something bad$") as caught:
            step(executor, 3)
        assert isinstance(caught.value.__cause__, RuntimeError), "of the collective that rank 0 was in"


def test_a_step_that_fails_in_one_rank_fails_in_the_driver_with_its_cause(tmp_path: Path) -> None:
    with serving("OthersFailing", tmp_path, ranks=3) as executor:
        for step_id in range(3):
            step(executor, step_id)
        cause = r"rank 2 \(process \d+\) failed\n(.*\n)+ZeroDivisionError: an expert without tokens$"
        with pytest.raises(EngineError, match=cause):
            step(executor, 3)
        refuses_for_ever(executor, cause)


def test_a_step_that_fails_in_rank_0_raises_its_own_error_and_close_frees_the_others(tmp_path: Path) -> None:
    with serving("Rank0Failing", tmp_path) as executor:
        for step_id in range(3):
            step(executor, step_id)
        with pytest.raises(ZeroDivisionError, match="the driver's own"):
            step(executor, 3)


def test_a_step_that_comes_out_of_order_is_refused(tmp_path: Path) -> None:
    with serving("Light", tmp_path) as executor:
        step(executor, 0)
        executor._submitted += 1
        with pytest.raises(EngineError, match="the driver's step 2 came in the place of its step 1"):
            step(executor, 1)


def test_close_ends_workers_that_wait_and_kills_those_that_do_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving("Light", tmp_path) as executor:
        executor.submit(plan(0), nothing)  # rank 1 waits for rank 0 for ever
    monkeypatch.setattr("engine.executor.worker_watch.CLOSE_S", 0.3)
    hanging = tmp_path / "hanging"
    hanging.mkdir()
    with serving("OthersHanging", hanging) as executor:
        for step_id in range(3):
            step(executor, step_id)
        executor.submit(plan(3), nothing)
        until(lambda: "hanging" in told(hanging, 1))
    for call in (executor.load, executor.collect, lambda: executor.submit(plan(0), nothing)):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_an_executor_that_never_loaded_closes_and_refuses_steps(tmp_path: Path) -> None:
    with group("Light", tmp_path) as executor, pytest.raises(EngineError, match="call load"):
        executor.submit(plan(0), nothing)


def test_an_idle_group_uses_no_processor_time(tmp_path: Path) -> None:
    with serving("Light", tmp_path) as executor:
        step(executor, 0)
        time.sleep(0.5)
        assert_idle(pids(tmp_path, 1)[0])
        [watching] = [thread for thread in threading.enumerate() if thread.name == "workers"]
        assert watching.native_id is not None
        assert_idle(os.getpid(), [watching.native_id])


@pytest.mark.parametrize("kind", ["LoadingForEver", "Light", "OthersHanging"])
def test_workers_end_with_a_driver_that_is_killed_wherever_they_are(kind: str, tmp_path: Path) -> None:
    config = msgspec.json.encode(group_config(tiny_config(async_scheduling=False), 3, tmp_path)).decode()
    call = f"import sys; sys.path[:] = {sys.path!r}; from fake_ranks import drive; drive({kind!r}, {config!r})"
    there = {"LoadingForEver": "loading", "Light": "step 3", "OthersHanging": "hanging"}[kind]
    driver = subprocess.Popen([sys.executable, "-c", call], start_new_session=True)
    try:
        until(lambda: all(there in told(tmp_path, rank) for rank in (1, 2)))
        workers = [pid for rank in (1, 2) for pid in pids(tmp_path, rank)]
        assert all(psutil.pid_exists(pid) for pid in workers)
    finally:
        driver.kill()  # it alone
        driver.wait()
    until(lambda: not any(psutil.pid_exists(pid) for pid in workers))


def kill_a_worker(executor: MultiprocExecutor) -> None:
    until(lambda: executor._workers)
    assert executor._workers is not None
    os.kill(executor._workers.pids[0], signal.SIGKILL)


def test_whenever_a_worker_is_killed_nobody_hangs_and_nothing_is_left(tmp_path: Path) -> None:
    random.seed(5)
    for trial in range(20):
        where = tmp_path / str(trial)
        where.mkdir()
        with group("Light", where) as executor:
            killer = threading.Timer(random.uniform(0.0, 0.7), kill_a_worker, [executor])
            killer.start()
            with pytest.raises(EngineError, match=r"rank 1 .* died: killed by signal 9"):
                executor.load()
                executor.warm_up()
                for step_id in range(10**6):
                    step(executor, step_id)
            killer.join()
