"""What telling the other ranks of a step costs: from `submit` in the driver until a worker has decoded the plan.

The processes and sockets are real, the ranks compute nothing: the driver is busy for `--compute-ms` a step, and workers
sleep meanwhile, so that they have to be woken. The plan is a steady decode's: rows of one token each, and now and then
a block.

Workers are started by this process (mp), by agents that it reaches over TCP (agents), or by a Ray that is started for
it (ray, which is to be installed).

Prints JSON as the last line; microseconds. Usage: ``python tools/bench_ranks.py [--ranks 2] [--rows 64] [--by mp]``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

sys.path.append(str(Path(__file__).parents[1] / "tests" / "executor"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "core"))

from agent_processes import AgentProcesses  # type: ignore[import-not-found]  # of the tests
from core_fakes import tiny_config  # type: ignore[import-not-found]  # of the tests
from fake_ranks import FAKE_GROUP, Light, group_config  # type: ignore[import-not-found]  # of the tests

from engine.config import EngineConfig
from engine.executor.multiproc import MultiprocExecutor
from engine.executor.ranks import LocalRanks, Parts, Ranks
from engine.executor.remote_ranks import RemoteRanks
from engine.step import Rows, ScheduledRow, StepPlan, StepResult, Write, Writes

_TIME = struct.Struct("<q")


class Noting(Light):
    """Writes when it was given each step, which is right after it was decoded."""

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        now = time.monotonic_ns()
        if self.rank:
            path = Path(self.config.compile.cache_dir, f"times-{self.rank}")
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(fd, _TIME.pack(now))
            os.close(fd)
        super().submit(plan, done)

    def step(self, plan: StepPlan) -> None:
        ends = time.perf_counter() + (0.0 if self.rank else self.config.cache.memory_fraction)
        while time.perf_counter() < ends:
            pass

    def note(self, what: str) -> None:
        """Nothing."""


def plan_of(step: int, rows: int) -> StepPlan:
    """Each row fills a block of 16 tokens at a step of its own."""
    scheduled = [ScheduledRow(row, 500 + step, 1, 1) for row in range(rows)]
    appends = [
        Write(0, row, (500 + step) // 16, [row * 64 + step % 64]) for row in range(rows) if (row + step) % 16 == 0
    ]
    return StepPlan(step_id=step, rows=Rows.of(scheduled), block_appends=Writes.of(appends))


def ranks_by(name: str) -> Callable[[EngineConfig, Parts], Ranks]:
    if name == "mp":
        return LocalRanks
    if name == "ray":
        import ray

        from engine.executor.ray_places import ray_ranks

        ray.init(num_cpus=16, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
        return ray_ranks
    return lambda config, parts: RemoteRanks(config, parts, AgentProcesses(here=True))


def measure(ranks: int, rows: int, steps: int, compute_s: float, by: str) -> dict[str, float | str]:
    with tempfile.TemporaryDirectory() as folder:
        config = group_config(tiny_config(async_scheduling=False), ranks, Path(folder))
        cache = msgspec.structs.replace(config.cache, memory_fraction=compute_s)  # read by `Noting.step` only
        config = msgspec.structs.replace(config, cache=cache)
        executor = MultiprocExecutor(config, Parts("bench_ranks:Noting", *FAKE_GROUP), ranks_by(by))
        began: list[int] = []
        submitted: list[int] = []
        try:
            executor.load()
            executor.warm_up()
            for step in range(steps):
                plan = plan_of(step, rows)
                began.append(time.monotonic_ns())
                executor.submit(plan, _nothing)
                submitted.append(time.monotonic_ns())
                result: StepResult = executor.collect()
                assert result.step_id == step
                plan_of(step, rows)  # what planning takes, and more
        finally:
            executor.close()
        decoded = []
        for rank in range(1, ranks):
            times = [when for (when,) in _TIME.iter_unpack(Path(folder, f"times-{rank}").read_bytes())]
            assert len(times) == steps
            decoded.append([(when - start) / 1e3 for when, start in zip(times, began, strict=True)][steps // 10 :])
    last = [max(each) for each in zip(*decoded, strict=True)]
    held = [(end - start) / 1e3 for start, end in zip(began, submitted, strict=True)][steps // 10 :]
    return {
        "by": by,
        "ranks": ranks,
        "rows": rows,
        "frame_bytes": len(msgspec.msgpack.encode(plan_of(0, rows), enc_hook=lambda a: a.tobytes())),
        "submit_to_decoded_median_us": round(statistics.median(last), 1),
        "submit_to_decoded_p90_us": round(statistics.quantiles(last, n=10)[8], 1),
        "submit_held_median_us": round(statistics.median(held), 1),
    }


def _nothing() -> None:
    """The step is collected anyway."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--compute-ms", type=float, default=3.0)
    parser.add_argument("--by", choices=["mp", "agents", "ray"], default="mp")
    asked = parser.parse_args()
    sys.modules.setdefault("bench_ranks", sys.modules["__main__"])
    print(json.dumps(measure(asked.ranks, asked.rows, asked.steps, asked.compute_ms / 1e3, asked.by)))


if __name__ == "__main__":
    main()
