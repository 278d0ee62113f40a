"""The executors that serve, in all ranks, over real collectives in shared memory: inline, and with steps ahead."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from core_fakes import tiny_config
from fake_ranks import group_config
from test_multiproc import until

from engine.config import DeviceConfig, EngineConfig
from engine.errors import EngineError
from engine.executor.multiproc import MultiprocExecutor
from engine.executor.ranks import Parts
from engine.step import StepMasks, StepPlan

pytestmark = pytest.mark.timeout(300)


def config_of(ahead: bool, notes: Path, cache_dir: Path) -> EngineConfig:
    config = group_config(tiny_config(async_scheduling=ahead), 2, cache_dir)
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=str(notes)),
        device=DeviceConfig(kind="cpu", threads=1),
    )


@pytest.mark.parametrize("ahead", [False, True], ids=["inline", "ahead"])
def test_ranks_compute_the_same_steps_and_a_lost_one_ends_the_collective(
    ahead: bool, tmp_path: Path, native_cache: Path
) -> None:
    affinity = os.sched_getaffinity(0)
    executor = MultiprocExecutor(config_of(ahead, tmp_path, native_cache), Parts("reducing_ranks:reducing"))
    try:
        executor.load()
        executor.allocate(1)
        executor.warm_up()
        results = []
        for step in range(0, 40, 2):
            for step_id in (step, step + 1):
                executor.submit(StepPlan(step_id=step_id, masked=[0] * (step_id % 5 == 0)), lambda: None)
                if step_id % 5 == 0:
                    # More than a socket holds, while the other rank waits in the middle of its step.
                    executor.sample(StepMasks(step_id, np.ones((3, 100_000), dtype=np.int32)))
            results += [executor.collect(), executor.collect()]
        expected = [2 * step + 1 + 600_000 * (step % 5 == 0) for step in range(40)]
        assert [result.token_ids for result in results] == [[token] for token in expected]
        lines = [f"{step} {token}" for step, token in enumerate(expected)]
        until(lambda: len((tmp_path / "rank-1").read_text().splitlines()) == 40)
        assert (tmp_path / "rank-1").read_text().splitlines() == (tmp_path / "rank-0").read_text().splitlines() == lines

        assert executor._workers is not None
        [worker] = executor._workers.pids
        os.kill(worker, signal.SIGSTOP)
        killer = threading.Timer(0.1, os.kill, (worker, signal.SIGKILL))
        killer.start()
        executor.submit(StepPlan(step_id=40), lambda: None)
        with pytest.raises(EngineError, match=r"rank 1 .* died: killed by signal 9"):
            executor.collect()
        killer.join()
    finally:
        executor.close()
        os.sched_setaffinity(0, affinity)
    assert not psutil.pid_exists(worker)
