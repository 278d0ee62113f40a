"""Ranks without a model, named by import string so that real worker processes run them, and a group of plain Python.

What happens in each rank is written to its file in the cache directory.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError, WeightsError
from engine.executor.interface import CompileState
from engine.parallel_config import ParallelConfig
from engine.reports import LoadReport, WarmUpReport
from engine.step import StepMasks, StepPlan, StepResult

if TYPE_CHECKING:
    from engine.executor.multiproc import MultiprocExecutor

_REASON = 1024
PAGE = 1 << 12
Masks = Callable[[], StepMasks] | None


def allocate(size: int, slot_bytes: int) -> int:
    fd = os.memfd_create("fake-group")
    os.ftruncate(fd, PAGE)
    return fd


class FakeGroup:
    """A reason to stop, and how often each rank has come to a meeting."""

    def __init__(self, fd: int, name: str, rank: int, size: int, cache_dir: Path) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.memory: mmap.mmap | None = mmap.mmap(fd, PAGE)
        self._meetings = 0

    def meet(self) -> None:
        """Waits for the others, as a collective does."""
        self._meetings += 1
        assert self.memory is not None
        struct.pack_into("Q", self.memory, _REASON + 8 * self.rank, self._meetings)
        while min(struct.unpack_from(f"{self.size}Q", self.memory, _REASON)) < self._meetings:
            if self.memory[0]:
                raise RuntimeError(self.memory[:_REASON].rstrip(b"\0").decode())
            time.sleep(0.001)

    def abort(self, reason: str) -> None:
        if self.memory is not None and not self.memory[0]:
            self.memory[:_REASON] = reason.encode()[:_REASON].ljust(_REASON, b"\0")

    def close(self) -> None:
        assert self.memory is not None, "closed once"
        self.memory.close()
        self.memory = None


def group_config(config: EngineConfig, ranks: int, cache_dir: Path) -> EngineConfig:
    return msgspec.structs.replace(
        config,
        parallel=ParallelConfig(tensor=ranks),
        compile=msgspec.structs.replace(config.compile, cache_dir=str(cache_dir)),
    )


def told(cache_dir: Path | str, rank: int) -> list[str]:
    path = Path(cache_dir, f"rank-{rank}")
    return path.read_text().splitlines() if path.exists() else []


def report(rank: int) -> LoadReport:
    return LoadReport(
        weight_bytes=10 + rank,
        activation_bytes=20 + rank,
        workspace_bytes=30 + rank,
        block_bytes=40 + rank,
        device_bytes_total=1000,
        device_bytes_free=900,
        attention_backend="fake",
    )


class Light:
    """An executor that computes in `collect`, as on a CPU, and needs no torch."""

    def __init__(self, config: EngineConfig, group: FakeGroup, receive_masks: Masks) -> None:
        self.config, self.group, self.rank = config, group, group.rank
        self._receive_masks = receive_masks
        self._plans: deque[StepPlan] = deque()
        self._masks: deque[StepMasks] = deque()
        self.note(f"pid {os.getpid()}")

    def note(self, what: str) -> None:
        with open(Path(self.config.compile.cache_dir, f"rank-{self.rank}"), "a") as notes:
            notes.write(what + "\n")

    def load(self) -> LoadReport:
        logging.getLogger(__name__).info("loading\nrank %d's part", self.rank)
        self.note("load")
        return report(self.rank)

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self.note(f"allocate {num_blocks} {num_host_blocks}")

    def warm_up(self) -> WarmUpReport:
        self.group.meet()
        self.note("warm_up")
        return WarmUpReport(distinct_pieces=3, compiled=self.rank, compile_failed=self.rank == 1)

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        self._plans.append(plan)
        done()

    def sample(self, masks: StepMasks) -> None:
        self._masks.append(masks)

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        self.step(plan)
        if plan.masked:
            masks = self._receive_masks() if self._receive_masks else self._masks.popleft()
            self.note(f"masks {masks.step_id} {masks.bits.sum()}")
        self.note(f"step {plan.step_id}")
        return StepResult(step_id=plan.step_id, token_ids=self.tokens(plan))

    def tokens(self, plan: StepPlan) -> list[int]:
        return [self.rank]

    def step(self, plan: StepPlan) -> None:
        self.group.meet()

    def compile_state(self) -> CompileState:
        return "done"

    def watch_compilation(self, changed: Callable[[], None]) -> None:
        changed()

    def compiles_after_ready(self) -> int:
        return 0

    def part_seconds(self) -> dict[str, float]:
        return {}

    def team(self) -> None:
        return None

    def close(self) -> None:
        self.note("close")


class OthersNotFitting(Light):
    def load(self) -> LoadReport:
        if self.rank:
            raise ConfigError("the model needs 9 GiB\nlower --max-model-len")
        return super().load()


class OthersWithoutWeights(Light):
    def load(self) -> LoadReport:
        if self.rank:
            raise WeightsError("model.safetensors: layer 3 is missing")
        return super().load()


class OthersLoadingBadly(Light):
    def load(self) -> LoadReport:
        if self.rank:
            raise KeyError("no such shard")
        return super().load()


class LoadingForEver(Light):
    def load(self) -> LoadReport:
        if self.rank:
            self.note("loading")
            time.sleep(3600)
        return super().load()


class Rank0NotFitting(Light):
    def load(self) -> LoadReport:
        if not self.rank:
            raise ConfigError("rank 0 has no room")
        return super().load()


class OthersLeaving(Light):
    """Without a word to the driver, in the step `3`."""

    def step(self, plan: StepPlan) -> None:
        if self.rank and plan.step_id == 3:
            sys.stderr.write("glibc: something bad\n")
            sys.stderr.flush()
            os._exit(7)
        super().step(plan)


class OthersFailing(Light):
    def step(self, plan: StepPlan) -> None:
        if self.rank == self.group.size - 1 and plan.step_id == 3:
            raise ZeroDivisionError("an expert without tokens")
        super().step(plan)


class Rank0Failing(Light):
    def step(self, plan: StepPlan) -> None:
        if not self.rank and plan.step_id == 3:
            raise ZeroDivisionError("the driver's own")
        super().step(plan)


class OthersHanging(Light):
    """In step 3, so that rank 0 waits for them; no signal but SIGKILL ends that."""

    def step(self, plan: StepPlan) -> None:
        if self.rank and plan.step_id == 3:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self.note("hanging")
            time.sleep(3600)
        super().step(plan)


class Sampling(Light):
    """One token for each position that samples, as a core expects."""

    def tokens(self, plan: StepPlan) -> list[int]:
        time.sleep(0.002)
        return [7 + self.rank] * int(plan.rows.samples.sum())


def no_group(fd: int, name: str, rank: int, size: int, cache_dir: Path) -> FakeGroup:
    if rank:
        raise EngineError("the memory of the group is not of this size")
    return FakeGroup(fd, name, rank, size, cache_dir)


def drive(kind: str, config: str) -> None:
    """In a process of its own: a driver that waits for ever, wherever `kind` lets it."""
    made = executor_of_ranks(msgspec.json.decode(config, type=EngineConfig), kind)
    made.load()
    made.warm_up()
    for step in range(4):
        made.submit(StepPlan(step_id=step), lambda: None)
        made.collect()
    time.sleep(3600)


FAKE_GROUP = ("fake_ranks:allocate", "fake_ranks:FakeGroup")


def executor_of_ranks(config: EngineConfig, kind: str) -> MultiprocExecutor:
    from engine.executor.multiproc import MultiprocExecutor
    from engine.executor.ranks import Parts

    return MultiprocExecutor(config, Parts(f"fake_ranks:{kind}", *FAKE_GROUP))


def sampling_ranks(config: EngineConfig) -> MultiprocExecutor:
    """For a core process."""
    return executor_of_ranks(config, "Sampling")


def ranks_without_room(config: EngineConfig) -> MultiprocExecutor:
    return executor_of_ranks(config, "OthersNotFitting")
