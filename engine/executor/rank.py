"""What a worker does: the driver's commands in their order, on its own part of the model.

On a CPU steps are computed in the thread that reads the socket, as the driver's are; on a GPU a thread of its own
launches them, and this one takes the next plan meanwhile. Results are dropped: every rank draws the same tokens.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from engine.adapters.interface import RanksAdapters
from engine.adapters.request import LoRARequest
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.executor.driver_link import DriverLeftError, DriverLink
from engine.executor.frames import (
    Allocate,
    Allocated,
    Close,
    Frame,
    Kind,
    Load,
    LoadAdapter,
    Loaded,
    LoadedAdapter,
    WarmedUp,
    WarmUp,
    WorkerStart,
    decode_command,
)
from engine.executor.interface import Executor, HoldsAdapters, HoldsPages
from engine.executor.joining import join, named
from engine.step import StepMasks, StepResult, decode_masks, decode_plan, decode_result

if TYPE_CHECKING:
    from engine.parallel.group import Group  # a worker tells what fails before it imports torch

MakeExecutor = Callable[[EngineConfig, "Group", Callable[[], StepMasks] | None], Executor]
"""(configuration of the rank, its group, what waits for a step's masks; None: `sample` brings them in time)"""


class StageExecutor(Executor, Protocol):
    """Of a stage that is not the last one."""

    def learn(self, result: StepResult) -> None:
        """What a step has sampled that was computed here."""
        ...


class Rank:
    def __init__(self, start: WorkerStart, link: DriverLink) -> None:
        self._link = link
        config, self._pages_fd = start.config, start.config.cache.pages_fd
        make_executor = cast(MakeExecutor, named(start.executor))
        group = join(config, start.rank, start.ends, start)
        for memory in (start.ends.memory, start.ends.parts_memory):
            if memory >= 0:
                os.close(memory)
        self._local = make_executor(config, group, self._receive_masks)
        self._adapters: RanksAdapters | None = None
        """once one was loaded"""
        self._ahead: deque[Frame] = deque()
        """plans that came before the masks of an earlier one"""
        self._home = threading.get_ident()
        self._steps = self._collected = 0
        """taken, and of them those whose end was seen"""
        self._done: deque[None] = deque()
        """those to be collected"""
        self._done_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._poll.register(self._done_fd, select.POLLIN)

    def run(self) -> None:
        """Until `Close`. What a command or a step raises passes through."""
        while True:
            frame = self._next()
            if frame.kind is Kind.PLAN:
                self._submit(frame)
            elif frame.kind is Kind.MASKS:
                self._local.sample(decode_masks(frame.body))
            elif frame.kind is Kind.TOKENS:
                cast(StageExecutor, self._local).learn(decode_result(frame.body))
            elif not self._obey(frame):
                return

    def _next(self) -> Frame:
        """Collects what is done while it waits."""
        if self._ahead:
            return self._ahead.popleft()
        if self._steps == self._collected:
            return self._link.receive()
        while (frame := self._link.next()) is None:
            ready = dict(self._poll.poll())
            if self._done_fd in ready:
                os.eventfd_read(self._done_fd)
                self._collect()
            if self._link.fileno() in ready:
                self._link.read()
        return frame

    def _submit(self, frame: Frame) -> None:
        if frame.number != self._steps:
            raise EngineError(f"the driver's step {frame.number} came in the place of its step {self._steps}")
        self._steps += 1
        self._local.submit(decode_plan(frame.body), self._step_done)
        self._collect()

    def _step_done(self) -> None:
        """From any thread; at once where `collect` is what computes."""
        self._done.append(None)
        if threading.get_ident() != self._home:
            os.eventfd_write(self._done_fd, 1)

    def _collect(self) -> None:
        while self._done:
            self._done.popleft()
            self._local.collect()
            self._collected += 1

    def _receive_masks(self) -> StepMasks:
        """In the middle of a step: nothing else can come but an adapter to load, and the plans of later steps where
        several are in flight."""
        while (frame := self._link.receive()).kind is not Kind.MASKS:
            if frame.kind is Kind.PLAN:
                self._ahead.append(frame)
            elif frame.kind is not Kind.MESSAGE:
                raise EngineError(f"the step waits for its masks, and a frame of kind {frame.kind.name} came")
            elif not self._obey(frame):
                raise DriverLeftError
        return decode_masks(frame.body)

    def _obey(self, frame: Frame) -> bool:
        """False: leave."""
        command = decode_command(frame)
        match command:
            case Load():
                self._link.tell(Loaded(self._local.load()))
            case Allocate():
                self._local.allocate(command.num_blocks, command.num_host_blocks)
                self._link.tell(Allocated(self._block_bytes()))
            case WarmUp():
                self._warm_up()
            case LoadAdapter():
                self._load_adapter(command)
            case Close():
                return False
        return True

    def _load_adapter(self, command: LoadAdapter) -> None:
        if self._adapters is None:
            assert isinstance(self._local, HoldsAdapters)
            self._adapters = cast(RanksAdapters, self._local.adapters(self._tell_of_adapter))
        if command.anew:
            self._adapters.forget(command.adapter)
        if self._adapters.load(command.adapter, command.slot):
            self._tell_of_adapter(command.adapter)

    def _tell_of_adapter(self, adapter: LoRARequest) -> None:
        """From any thread."""
        assert self._adapters is not None
        with contextlib.suppress(OSError):  # the driver has gone
            problem, digest = self._adapters.problem(adapter), self._adapters.digest(adapter)
            self._link.tell(LoadedAdapter(adapter, problem, digest))

    def _block_bytes(self) -> list[int]:
        if self._pages_fd is None:
            return []
        assert isinstance(self._local, HoldsPages)
        return [part.shape[1] for part in self._local.kv_memory().device.parts]

    def _warm_up(self) -> None:
        report = self._local.warm_up()
        gc.collect()
        gc.freeze()  # what the start made stays
        self._link.tell(WarmedUp(report))
