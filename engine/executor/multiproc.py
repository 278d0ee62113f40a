"""Several ranks: the driver's own in this process, each other one in a process of its own, on this host or another.

Whatever the local executor is told, all workers are told first, so that nobody waits for the slower message; what comes
back is rank 0's. Ranks are parts of every matrix, or stages, or both; rank 0 computes the last stage, or its first
part, and earlier stages are told what a step has sampled. A group that lost a rank is of no use: its collectives are
aborted, and every later call says why.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from engine.adapters.interface import AdapterLoader, RanksAdapters
from engine.adapters.request import LoRARequest
from engine.config import EngineConfig
from engine.errors import RANK_GRACE_S, EngineError, RankLostError
from engine.executor.frames import (
    Allocate,
    Allocated,
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
from engine.executor.group_adapters import GroupAdapters
from engine.executor.interface import (
    CompileState,
    Executor,
    HoldsAdapters,
    HoldsPages,
    MakesProfiles,
    MayComputeInCollect,
)
from engine.executor.joining import named
from engine.executor.rank import MakeExecutor
from engine.executor.rank_reports import group_load_report, group_warm_up_report
from engine.executor.ranks import LocalRanks, Parts, Ranks, parts_for
from engine.executor.team import Team
from engine.executor.worker_watch import WorkerWatch
from engine.kv_transfer.memory import KVMemory, Pages
from engine.kv_transfer.rank_caches import shared_caches
from engine.machine import main_memory
from engine.observability.logs import child_mark
from engine.reports import LoadReport, WarmUpReport
from engine.step import StepMasks, StepPlan, StepResult, encode_step

if TYPE_CHECKING:
    import numpy as np

    from engine.parallel.group import OwnGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")


class MultiprocExecutor:
    """See `engine.executor.interface.Executor`.

    `make_ranks` says where the other ranks run, and `load` starts them. An error of a worker while it starts is raised
    as its own kind, with its own text. When a worker dies, is stopped or fails in a step, whoever waits for it is told
    within a second (of another host that is lost, within five): `collect` and all later calls raise `EngineError` with
    the cause. Who waits for nothing is told by the call of `watch_compilation`.
    """

    def __init__(
        self,
        config: EngineConfig,
        parts: Parts | None = None,
        make_ranks: Callable[[EngineConfig, Parts], Ranks] = LocalRanks,
    ) -> None:
        """`parts`: None for those that the device has."""
        self._config = config
        self._size = config.parallel.ranks
        self._sampling = range(1, config.parallel.tensor)
        """workers that compute the last stage, or all of it, with rank 0"""
        self._ahead = range(config.parallel.tensor, self._size)
        """those that compute an earlier one"""
        self._parts, self._make_ranks = parts or parts_for(config), make_ranks
        self._workers: WorkerWatch | None = None
        self._ranks: Ranks | None = None
        self._group: OwnGroup | None = None
        self._cause: str | None = None
        """of a worker's failure, from the thread that watches"""
        self._rank_0: Executor | None = None
        self._others: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        """caches of the other ranks, on the device and in the host tier, where they are in this process' memory"""
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
            ranks = self._ranks = self._make_ranks(self._config, self._parts)
            group = self._start_group(ranks)
            make_executor = cast(MakeExecutor, named(self._parts.executor))
            self._rank_0 = make_executor(ranks.config_of(0), group, None)
            mine, answers = self._all_do(Load(), self._local.load)
            reports = [mine, *(answer.report for answer in answers if isinstance(answer, Loaded))]
            return group_load_report(self._config.device.kind, reports, memory, ranks.hosts())
        except BaseException:
            self.close()
            raise

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        command = Allocate(num_blocks, num_host_blocks)
        _, answers = self._all_do(command, lambda: self._local.allocate(num_blocks, num_host_blocks))
        assert self._ranks is not None
        told = [answer.block_bytes for answer in answers if isinstance(answer, Allocated)]
        self._others = [
            shared_caches(descriptor, block_bytes, num_blocks, num_host_blocks)
            for descriptor, block_bytes in zip(self._ranks.caches, told, strict=False)
        ]

    def warm_up(self) -> WarmUpReport:
        if self._config.compile.mode == "pieces":
            # Of experts: which of them a token goes to can hang on a rounding, and pieces round otherwise.
            logger.info("pieces compile before ranks serve: minutes where none are kept yet (--compile none: without)")
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
        workers = self._serving()
        if self._sampling:
            workers.send(Frame(Kind.MASKS, 0, encode_step(masks)).encode(), self._sampling)
        self._local.sample(masks)

    def collect(self) -> StepResult:
        workers = self._serving()
        if not self._uncollected:
            return self._local.collect()  # which says so
        try:
            result = self._local.collect()
        except Exception as error:
            if (failure := _cause(error, workers)) is not None:
                raise failure from error
            raise
        finally:
            self._uncollected -= 1
            workers.owe_less()
        if (failure := workers.failure) is not None:  # a device whose exchange was stopped goes on with what it has
            raise failure
        if self._ahead and result.token_ids:
            told = StepResult(step_id=result.step_id, token_ids=result.token_ids, counts=result.counts)
            workers.send(Frame(Kind.TOKENS, 0, encode_step(told)).encode(), self._ahead)
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

    def kv_memory(self) -> KVMemory:
        """See `HoldsPages`: a page has the parts of all ranks."""
        assert isinstance(self._local, HoldsPages)
        mine = self._local.kv_memory()
        device, host = (
            Pages([*own.parts, *(part for theirs in self._others for part in theirs[tier])])
            for tier, own in enumerate((mine.device, mine.host))
        )
        return KVMemory(device, host, mine.layout)

    @property
    def computes_in_collect(self) -> bool:
        """See `MayComputeInCollect`: rank 0 does."""
        return isinstance(self._local, MayComputeInCollect) and self._local.computes_in_collect

    @property
    def is_profiling(self) -> bool:
        """See `MakesProfiles`: rank 0's steps are recorded."""
        return isinstance(self._local, MakesProfiles) and self._local.is_profiling

    def start_profile(
        self, path: str, steps: int, core_seconds: Callable[[], dict[str, float]], done: Callable[[], None]
    ) -> None:
        assert isinstance(self._local, MakesProfiles)
        self._local.start_profile(path, steps, core_seconds, done)

    def end_profile(self, done: Callable[[], None]) -> None:
        assert isinstance(self._local, MakesProfiles)
        self._local.end_profile(done)

    def adapters(self, notify: Callable[[LoRARequest], None] | None) -> AdapterLoader:
        """See `HoldsAdapters`."""
        assert isinstance(self._local, HoldsAdapters)
        make = cast("Callable[[Callable[[LoRARequest], None] | None], RanksAdapters]", self._local.adapters)
        return GroupAdapters(self._serving(), make, notify)

    def close(self) -> None:
        """Steps in flight end with an error, the workers by themselves or by force; nothing is left."""
        if self._closed:
            return
        self._closed = True
        if self._workers is not None:
            self._workers.ask_to_leave()
        if self._group is not None:
            self._abort(
                "the executor is closed", is_lost=False
            )  # nobody waits in a collective for somebody who has left
        if self._rank_0 is not None:
            self._rank_0.close()
        if self._workers is not None:
            self._workers.close()
        if self._group is not None:
            self._group.close()
        if self._ranks is not None:
            self._ranks.close()

    @property
    def _local(self) -> Executor:
        """Rank 0's."""
        if self._rank_0 is None:
            raise EngineError("the executor has no model: call load() first")
        return self._rank_0

    def _start_group(self, ranks: Ranks) -> OwnGroup:
        starts = [self._start(rank) for rank in range(1, self._size)]
        self._workers = WorkerWatch(range(1, self._size), lambda: ranks.start(starts), self._worker_failed)
        self._group = ranks.join()
        if self._cause is not None:  # it came before there was a group
            self._abort(self._cause, is_lost=True)
        return self._group

    def _abort(self, reason: str, is_lost: bool) -> None:
        if self._group is not None:
            self._group.abort(reason)
        if self._ranks is not None:
            self._ranks.abort(reason, is_lost)

    def _start(self, rank: int) -> WorkerStart:
        return WorkerStart(
            config=self._config,
            rank=rank,
            driver_pid=os.getpid(),
            socket_fd=-1,
            make_group=self._parts.make_group,
            make_socket_group=self._parts.make_socket_group,
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
            if (failure := _cause(error, workers)) is not None:
                raise failure from error
            raise
        finally:
            workers.owe_less()
        return mine, workers.answers()

    def _worker_failed(self, cause: str) -> None:
        """From the thread that watches."""
        self._cause = cause
        self._abort(cause, is_lost=True)
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


def _cause(error: Exception, workers: WorkerWatch) -> EngineError | None:
    """The failure of a worker behind an error of this rank, which may come a moment later."""
    deadline = time.monotonic() + (RANK_GRACE_S if isinstance(error, RankLostError) else 0)
    while (failure := workers.failure) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return failure


def _nothing() -> None:
    """Nobody watches."""
