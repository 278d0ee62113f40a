"""Several ranks on one host: the driver's own in this process, each other one in a process of its own.

Whatever the local executor is told, all workers are told first, so that nobody waits for the slower message; what comes
back is rank 0's. Ranks are parts of every matrix, or stages, of which rank 0 computes the last one: then the others are
told what a step has sampled. A group that lost a rank is of no use: its collectives are aborted, and every later call
says why.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.executor.cores import share_of_cores
from engine.executor.frames import (
    Allocate,
    Answer,
    Command,
    Frame,
    Kind,
    Load,
    Loaded,
    WarmedUp,
    WarmUp,
    WorkerStart,
    encode_message,
)
from engine.executor.interface import CompileState, Executor
from engine.executor.rank import MakeExecutor, MakeGroup, named, stage_group
from engine.executor.rank_reports import group_load_report, group_warm_up_report
from engine.executor.team import Team
from engine.executor.worker_watch import WorkerWatch
from engine.machine import main_memory
from engine.observability.logs import child_mark
from engine.parallel.stage_group import stage_of_rank
from engine.parallel.stage_link import StageLinks
from engine.reports import LoadReport, WarmUpReport
from engine.step import StepMasks, StepPlan, StepResult, encode_step

if TYPE_CHECKING:
    from engine.parallel.group import Group, OwnGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")

GROUP_NAME = "tensor"
"""the same in all ranks and at every start: compiled pieces call collectives by it (a process's second group has a
number behind it)"""
SLOT_BYTES = 1 << 20
"""of what a rank tells the others at once; more goes in parts"""


class Parts(msgspec.Struct, frozen=True):
    """What a group is made of, by name ("module:callable"), so that workers find it, too."""

    executor: str = "engine.executor.rank_executor:rank_executor"
    """`rank.MakeExecutor`: what each rank computes with"""
    allocate: str = "engine.parallel.shared_memory:allocate"
    """called with (ranks, slot bytes); the descriptor of what ranks share"""
    make_group: str = "engine.parallel.shared_memory:SharedGroup"
    """`rank.MakeGroup`"""


def parts_for(config: EngineConfig) -> Parts:
    """What carries the collectives of ranks that compute on such a device."""
    if config.device.kind == "cuda":
        group = "engine.parallel.device_group"
        return Parts(allocate=f"{group}:allocate", make_group=f"{group}:nccl_group")
    return Parts()


def rank_config(config: EngineConfig, rank: int) -> EngineConfig:
    """`config` as one rank needs it: its GPU, or its share of this host's cores."""
    device = config.device
    if device.kind == "cuda":
        device = msgspec.structs.replace(device, index=device.index + rank)
    else:
        cores = share_of_cores(rank, config.parallel.ranks, device.threads)
        device = msgspec.structs.replace(device, cores=cores)
    return msgspec.structs.replace(config, device=device)


class MultiprocExecutor:
    """See `engine.executor.interface.Executor`.

    `load` starts the workers. An error of a worker while it starts is raised as its own kind, with its own text. When a
    worker dies, is stopped or fails in a step, whoever waits for it is told within a second: `collect` and all later
    calls raise `EngineError` with the cause. Who waits for nothing is told by the call of `watch_compilation`.
    """

    def __init__(self, config: EngineConfig, parts: Parts | None = None) -> None:
        """`parts`: None for those that the device has."""
        self._config = config
        self._size = config.parallel.ranks
        self._is_staged = config.parallel.pipeline > 1
        self._parts = parts or parts_for(config)
        self._workers: WorkerWatch | None = None
        self._group: OwnGroup | None = None
        self._links: StageLinks | None = None
        self._cause: str | None = None
        """of a worker's failure, from the thread that watches"""
        self._rank_0: Executor | None = None
        self._submitted = self._uncollected = 0
        self._watcher: Callable[[], None] = _nothing
        self._compile_failed = False
        self._closed = False

    def load(self) -> LoadReport:
        self._refuse_when_closed()
        if self._workers is not None:
            raise EngineError("the executor has loaded its model already")
        try:
            memory = main_memory() if self._config.device.kind == "cpu" else None
            group = self._start_group()
            make_executor = cast(MakeExecutor, named(self._parts.executor))
            self._rank_0 = make_executor(rank_config(self._config, 0), self._placed(group), None)
            mine, answers = self._all_do(Load(), self._local.load)
            reports = [mine, *(answer.report for answer in answers if isinstance(answer, Loaded))]
            return group_load_report(self._config.device.kind, reports, memory)
        except BaseException:
            self.close()
            raise

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        self._all_do(Allocate(num_blocks, num_host_blocks), lambda: self._local.allocate(num_blocks, num_host_blocks))

    def warm_up(self) -> WarmUpReport:
        mine, answers = self._all_do(WarmUp(), self._local.warm_up)
        report = group_warm_up_report([mine, *(answer.report for answer in answers if isinstance(answer, WarmedUp))])
        self._compile_failed = report.compile_failed
        return report

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        workers = self._serving()
        workers.send(Frame(Kind.PLAN, self._submitted, encode_step(plan)).encode())
        workers.owe()
        self._submitted += 1
        self._uncollected += 1
        self._local.submit(plan, done)

    def sample(self, masks: StepMasks) -> None:
        if not self._is_staged:  # where only the last stage samples
            self._serving().send(Frame(Kind.MASKS, 0, encode_step(masks)).encode())
        self._local.sample(masks)

    def collect(self) -> StepResult:
        workers = self._serving()
        if not self._uncollected:
            return self._local.collect()  # which says so
        try:
            result = self._local.collect()
        except Exception as error:
            if (failure := workers.failure) is not None:
                raise failure from error
            raise
        finally:
            self._uncollected -= 1
            workers.owe_less()
        if (failure := workers.failure) is not None:  # a device whose exchange was stopped goes on with what it has
            raise failure
        if self._is_staged and result.token_ids:
            told = StepResult(step_id=result.step_id, token_ids=result.token_ids, counts=result.counts)
            workers.send(Frame(Kind.TOKENS, 0, encode_step(told)).encode())
        return result

    def compile_state(self) -> CompileState:
        """Ranks compile before they serve. Raises `EngineError` where a worker has gone, which an idle core learns in
        this way."""
        if self._workers is not None and (failure := self._workers.failure) is not None:
            raise failure
        return "failed" if self._compile_failed else "done"

    def watch_compilation(self, changed: Callable[[], None]) -> None:
        self._watcher = changed
        changed()

    def compiles_after_ready(self) -> int:
        return self._local.compiles_after_ready()

    def part_seconds(self) -> dict[str, float]:
        return self._local.part_seconds()

    def team(self) -> Team | None:
        return self._local.team()

    def close(self) -> None:
        """Steps in flight end with an error, the workers by themselves or by force; nothing is left."""
        if self._closed:
            return
        self._closed = True
        if self._workers is not None:
            self._workers.ask_to_leave()
        if self._group is not None:
            self._abort("the executor is closed")  # nobody waits in a collective for somebody who has left
        if self._rank_0 is not None:
            self._rank_0.close()
        if self._workers is not None:
            self._workers.close()
        if self._group is not None:
            self._group.close()
        if self._links is not None:
            self._links.close()

    @property
    def _local(self) -> Executor:
        """Rank 0's."""
        if self._rank_0 is None:
            raise EngineError("the executor has no model: call load() first")
        return self._rank_0

    def _start_group(self) -> OwnGroup:
        allocate = cast(Callable[[int, int], int], named(self._parts.allocate))
        make_group = cast(MakeGroup, named(self._parts.make_group))
        cache_dir = Path(self._config.compile.cache_dir)
        self._links = StageLinks(self._size) if self._is_staged else None
        group_fd = allocate(self._size, SLOT_BYTES)
        try:
            starts = [self._start(rank, group_fd) for rank in range(1, self._size)]
            self._workers = WorkerWatch(starts, self._worker_failed)
            self._group = make_group(group_fd, GROUP_NAME, 0, self._size, cache_dir)
        finally:
            os.close(group_fd)
        if self._cause is not None:  # it came before there was a group
            self._abort(self._cause)
        return self._group

    def _placed(self, group: Group) -> Group:
        return stage_group(group, *self._ends(0)) if self._is_staged else group

    def _ends(self, rank: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """Of the links to the stages before and behind."""
        if self._links is None:
            return None, None
        stage = stage_of_rank(rank, self._size).index
        return self._links.before(stage), self._links.after(stage)

    def _abort(self, reason: str) -> None:
        if self._group is not None:
            self._group.abort(reason)
        if self._links is not None:
            self._links.abort()

    def _start(self, rank: int, group_fd: int) -> WorkerStart:
        before, after = self._ends(rank)
        return WorkerStart(
            before=before,
            after=after,
            config=rank_config(self._config, rank),
            rank=rank,
            size=self._size,
            driver_pid=os.getpid(),
            socket_fd=-1,
            group_fd=group_fd,
            group_name=GROUP_NAME,
            make_group=self._parts.make_group,
            executor=self._parts.executor,
            log_level=logger.getEffectiveLevel(),
            log_mark=child_mark(),
        )

    def _all_do(self, command: Command, local: Callable[[], T]) -> tuple[T, list[Answer]]:
        """What rank 0 brings, and the answers of the others."""
        workers = self._serving()
        workers.send(encode_message(command))
        workers.owe()
        try:
            mine = local()
        except Exception as error:
            if (failure := workers.failure) is not None:
                raise failure from error
            raise
        finally:
            workers.owe_less()
        return mine, workers.answers()

    def _worker_failed(self, cause: str) -> None:
        """From the thread that watches."""
        self._cause = cause
        self._abort(cause)
        self._watcher()  # who asks for the state is told

    def _serving(self) -> WorkerWatch:
        self._refuse_when_closed()
        if self._workers is None:
            raise EngineError("the executor has no model: call load() first")
        if (failure := self._workers.failure) is not None:
            raise failure
        return self._workers

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise EngineError("the executor is closed")


def _nothing() -> None:
    """Nobody watches."""
