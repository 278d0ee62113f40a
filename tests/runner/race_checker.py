"""Vector clocks over the streams of a step: who touched which memory, and whether that was ordered.

The device is a CPU, so everything has the right value anyway; what is checked is the order that a real device would be
free to change. Each stream and the host is an agent with a clock (Fidge 1988; Mattern 1989): a launch orders the
stream behind the host, an event's `wait` the waiting stream behind the recording one, `synchronize` the host. Two
accesses to one storage, of which one writes, must be ordered. Every torch operation is seen by a dispatch mode;
NumPy's work is declared by `RecordingKernels` and the patches of `watching`.

The caching allocator is modelled too: memory that another stream than its own has used may only be freed once that use
is ordered before whatever its own stream does next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.runner import model_runner, results
from engine.runner.kernels import InputBuffers, StepSizes
from engine.runner.kernels.host import HostKernels
from engine.runner.results import SampledStep
from engine.runner.staging import BufferRing
from engine.step import StepResult

HOST, MAIN, INPUTS, RESULTS = AGENTS = ("host", "main", "inputs", "results")
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class RaceError(AssertionError):
    """Two accesses that a device may execute in either order."""


class Memory:
    """What has been done to one storage."""

    def __init__(self, storage: torch.UntypedStorage, owner: str, name: str) -> None:
        self.alive = StorageWeakRef(storage)
        self.owner = owner
        self.name = name
        self.written: tuple[str, int] | None = None
        self.read: dict[str, int] = {}
        self.last_use: dict[str, int] = {}


class Timeline:
    def __init__(self) -> None:
        self.clocks = {agent: dict.fromkeys(AGENTS, 0) for agent in AGENTS}
        self.current = MAIN
        self.memory: dict[int, Memory] = {}
        self.shared: set[int] = set()
        """memory that more than its owner has used"""
        self.accesses = 0

    def join(self, agent: str, seen: dict[str, int]) -> None:
        clock = self.clocks[agent]
        for other, time in seen.items():
            clock[other] = max(clock[other], time)

    def access(self, agent: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], name: str) -> None:
        """One operation of `agent`."""
        self.check_freed()
        if agent != HOST:
            self.join(agent, self.clocks[HOST])
        clock = self.clocks[agent]
        clock[agent] += 1
        self.accesses += 1
        for tensor in reads:
            self._touch(agent, tensor, name, write=False)
        for tensor in writes:
            self._touch(agent, tensor, name, write=True)

    def adopt(self, tensor: torch.Tensor, owner: str, name: str) -> Memory:
        storage = tensor.untyped_storage()
        memory = self.memory.get(storage._cdata)
        if memory is None or memory.alive.expired():
            memory = self.memory[storage._cdata] = Memory(storage, owner, name)
        return memory

    def check_freed(self) -> None:
        for key in [key for key in self.shared if self.memory[key].alive.expired()]:
            memory = self.memory.pop(key)
            self.shared.remove(key)
            if memory.owner == HOST:
                continue  # the pinned allocator has events of its own
            for agent, time in memory.last_use.items():
                if agent != memory.owner and time > max(self.clocks[a][agent] for a in (HOST, memory.owner)):
                    raise RaceError(f"{memory.name} of stream {memory.owner} is freed while {agent} may use it")

    def _touch(self, agent: str, tensor: torch.Tensor, name: str, write: bool) -> None:
        memory = self.adopt(tensor, agent, name)
        seen = self.clocks[agent]
        before = [memory.written] if memory.written else []
        if write:
            before += list(memory.read.items())
        for other, time in before:
            if time > seen[other]:
                raise RaceError(f"{name} by {agent} is not ordered behind {other}'s use of memory from {memory.name}")
        memory.last_use[agent] = seen[agent]
        if agent != memory.owner:
            self.shared.add(tensor.untyped_storage()._cdata)
        if write:
            memory.written, memory.read = (agent, seen[agent]), {}
        else:
            memory.read[agent] = seen[agent]


class RecordingEvent:
    def __init__(self, streams: RecordingStreams, number: int) -> None:
        self._streams = streams
        self._number = number
        self._seen: dict[str, int] = {}

    def record(self) -> None:
        timeline = self._streams.timeline
        timeline.join(timeline.current, timeline.clocks[HOST])
        self._seen = dict(timeline.clocks[timeline.current])

    def wait(self) -> None:
        timeline = self._streams.timeline
        if (self._number, timeline.current) != self._streams.missing_wait:
            timeline.join(timeline.current, self._seen)

    def synchronize(self) -> None:
        if not self._streams.host_never_waits:
            self._streams.timeline.join(HOST, self._seen)


class RecordingStreams:
    """`missing_wait`: (event in order of making, stream) whose waits are left out, to see that it matters."""

    queued = True

    def __init__(self, missing_wait: tuple[int, str] | None = None, host_never_waits: bool = False) -> None:
        self.timeline = Timeline()
        self.missing_wait = missing_wait
        self.host_never_waits = host_never_waits
        self.inputs: contextlib.AbstractContextManager[object] = _On(self.timeline, INPUTS)
        self.results: contextlib.AbstractContextManager[object] = _On(self.timeline, RESULTS)
        self._events = 0

    def event(self) -> RecordingEvent:
        self._events += 1
        return RecordingEvent(self, self._events - 1)

    def host_buffer(self, words: int) -> torch.Tensor:
        buffer = torch.empty(words, dtype=torch.int32)
        self.timeline.adopt(buffer, HOST, "staging buffer")
        return buffer


class _On:
    def __init__(self, timeline: Timeline, stream: str) -> None:
        self._timeline = timeline
        self._stream = stream

    def __enter__(self) -> None:
        assert self._timeline.current == MAIN
        self._timeline.current = self._stream

    def __exit__(self, *_: object) -> None:
        self._timeline.current = MAIN


class _EveryOperation(TorchDispatchMode):
    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        aliases = [r.alias_info for r in schema.returns]
        if any(a is not None and not a.is_write for a in aliases):
            return result  # a view touches nothing
        written: list[torch.Tensor] = []
        read: list[torch.Tensor] = []
        for index, argument in enumerate(schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).extend(found)
        name = func._schema.name.removeprefix("aten::")
        if name not in ALLOCATIONS:
            written += [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self._timeline.access(self._timeline.current, read, written, name)
        else:
            self._timeline.adopt(result, self._timeline.current, name)
        return result


class RecordingKernels:
    """The input kernels work through NumPy, which no dispatch mode sees."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._kernels = HostKernels()

    def _saw(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], name: str) -> None:
        self._timeline.access(self._timeline.current, reads, writes, name)

    def apply_staged_writes(
        self, table: torch.Tensor, writes: torch.Tensor, values: torch.Tensor, max_length: int
    ) -> None:
        self._saw([writes, values], [table], "apply_staged_writes")
        self._kernels.apply_staged_writes(table, writes, values, max_length)

    def prepare_inputs(
        self,
        step: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        block_tables: torch.Tensor,
        out: InputBuffers,
        sizes: StepSizes,
        block_size: int,
    ) -> None:
        filled = [value for name, value in vars(out).items() if name != "block_tables"]
        self._saw([step, tokens, lengths, block_tables], filled, "prepare_inputs")
        self._kernels.prepare_inputs(step, tokens, lengths, block_tables, out, sizes, block_size)

    def gather_block_tables(
        self, block_tables: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, sizes: StepSizes, num_columns: int
    ) -> None:
        self._saw([block_tables, rows], [out], "gather_block_tables")
        self._kernels.gather_block_tables(block_tables, rows, out, sizes, num_columns)

    def post_update(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        known: torch.Tensor | None = None,
    ) -> None:
        self._saw([rows, positions, token_ids, *([] if known is None else [known])], [tokens, lengths], "post_update")
        self._kernels.post_update(tokens, lengths, rows, positions, token_ids, known)


@contextlib.contextmanager
def watching(streams: RecordingStreams) -> Iterator[Timeline]:
    """Everything done inside is seen. Runners must be made inside, with `streams`."""
    timeline = streams.timeline
    acquire: Callable[[BufferRing, int], torch.Tensor] = BufferRing.acquire
    to_result = results._to_result

    def recorded_acquire(ring: BufferRing, words: int = 0) -> torch.Tensor:
        buffer = acquire(ring, words)
        timeline.access(HOST, [], [buffer], "host fills")
        return buffer

    def recorded_to_result(step: SampledStep) -> StepResult:
        scores = [scored for _, scored in step.prompt]
        read: list[torch.Tensor] = []
        if step.sampled is not None:
            read += [step.sampled.token_ids, step.sampled.faults]
            scores += [step.sampled.logprobs] if step.sampled.logprobs is not None else []
        for scored in scores:
            read += [scored.token_ids, scored.logprobs, scored.ranks]
        timeline.access(HOST, read, [], "host reads results")
        return to_result(step)

    with pytest.MonkeyPatch.context() as patch, _EveryOperation(timeline):
        patch.setattr(BufferRing, "acquire", recorded_acquire)
        patch.setattr(results, "_to_result", recorded_to_result)
        patch.setattr(model_runner, "select_kernels", lambda device: RecordingKernels(timeline))
        yield timeline
