"""A device that captures, on a CPU: nothing is computed while capturing, replays write the captured addresses, and
every byte that the pool could have given away by then is overwritten with NaN.

Memory comes from one arena by liveness: a block is free when the last tensor that owns it dies, and the lowest fitting
address is given out again. A graph is a list of events in the order of capture: run a function on aliases of the
addresses it was captured with, poison what was freed, write results to the addresses that they were given. At its start
a graph poisons all memory that was free when it was captured: a device might have used any of it as scratch.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

Span = tuple[int, int]


class Pool:
    """First fit over one arena; `peak` is the highest address ever given out, `live` what is owned now, in bytes."""

    def __init__(self, size: int) -> None:
        self.memory = np.full(size, 0xFF, dtype=np.uint8)
        self.base = self.memory.ctypes.data
        self.free: list[Span] = [(0, size)]
        self.live = self.peak = 0
        self.on_release: Callable[[Span], None] = lambda span: None

    def allocate(self, nbytes: int) -> Tensor:
        """uint8 [nbytes]; the block is released when the tensor's storage dies."""
        size = -(-max(nbytes, 1) // 64) * 64
        start, end = next(span for span in self.free if span[1] - span[0] >= size)
        self.free.remove((start, end))
        if start + size < end:
            self.free.append((start + size, end))
        self.free.sort()
        self.live += size
        self.peak = max(self.peak, start + size)
        owner = self.memory[start : start + nbytes]
        weakref.finalize(owner, self._release, (start, start + size)).atexit = False
        return torch.from_numpy(owner)

    def poison(self, span: Span) -> None:
        self.memory[span[0] : span[1]] = 0xFF  # NaN in every floating type

    def _release(self, span: Span) -> None:
        self.live -= span[1] - span[0]
        merged: list[Span] = []
        for start, end in sorted([*self.free, span]):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self.free = merged
        self.on_release(span)


def on_storage(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=like.dtype)
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def raw_bytes(address: int, nbytes: int) -> Tensor:
    """uint8 [nbytes] at an address, owned by nobody."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


class Address:
    """A tensor without its memory: makes the same tensor later, without having owned anything meanwhile."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.place = (storage.data_ptr(), storage.nbytes())
        self.dtype = tensor.dtype
        self.layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())

    def tensor(self) -> Tensor:
        address, nbytes = self.place
        memory = raw_bytes(address, nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
        return torch.empty(0, dtype=self.dtype).set_(memory.untyped_storage(), *self.layout)


class FakeGraph:
    def __init__(self, capturer: FakeCapturer) -> None:
        self.capturer = capturer
        self.events: list[Callable[[], None]] = []

    def replay(self) -> None:
        assert self.capturer.recording is None, "a replay inside a capture"
        self.capturer.replays += 1
        for event in self.events:
            event()

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record one call; returns its results at the addresses that replays will write."""
        owned: dict[int, torch.UntypedStorage] = {}
        copies: dict[int, Tensor] = {}

        def copy(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            key = value.untyped_storage()._cdata
            if key not in copies:
                copies[key] = as_bytes(value.untyped_storage()).clone()
                owned[copies[key].untyped_storage()._cdata] = value.untyped_storage()
            return on_storage(copies[key].untyped_storage(), value)

        addresses = tree_map(lambda leaf: Address(leaf) if isinstance(leaf, Tensor) else leaf, (list(args), kwargs))
        trial_args, trial_kwargs = tree_map(copy, (list(args), kwargs))
        outputs = function(*trial_args, **trial_kwargs)  # on copies: capturing writes nothing
        tensors = [value for value in _flat(outputs) if isinstance(value, Tensor)]
        kept = {id(value): owned.get(value.untyped_storage()._cdata) for value in tensors}
        owned.clear()
        results: list[list[Any]] = []
        self.events.append(lambda: results.append(_run(function, addresses)))
        for value, trial in zip(args, trial_args, strict=True):
            if isinstance(value, list) and not trial:
                value.clear()  # a boxed function drops its inputs, and the pool may take their memory for the results
        places: dict[int, Tensor] = {}
        targets: list[tuple[int, int, int]] = []

        def place(value: object, index: int) -> object:
            if not isinstance(value, Tensor):
                return value
            storage = kept[id(value)]
            if storage is None:
                key = value.untyped_storage()._cdata
                if key not in places:
                    places[key] = self.capturer.pool.allocate(value.untyped_storage().nbytes())
                    targets.append((index, places[key].data_ptr(), value.untyped_storage().nbytes()))
                storage = places[key].untyped_storage()
            return on_storage(storage, value)

        indices = iter(range(1 << 30))
        placed = tree_map(lambda value: place(value, next(indices)), outputs)
        self.events.append(lambda: _write(results.pop(), targets))
        return placed


def _flat(value: object) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def _run(function: Callable[..., Any], addresses: Any) -> list[Any]:
    args, kwargs = tree_map(lambda leaf: leaf.tensor() if isinstance(leaf, Address) else leaf, addresses)
    return _flat(function(*args, **kwargs))


def _write(results: Sequence[Any], targets: Sequence[tuple[int, int, int]]) -> None:
    for index, address, nbytes in targets:
        source = as_bytes(results[index].untyped_storage())
        assert source.numel() == nbytes
        raw_bytes(address, nbytes).copy_(source) if nbytes else None


class _EveryOperation(TorchDispatchMode):
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.graph.call(func, args, kwargs or {})


class FakeCapturer:
    """Granularity: `operations` records every ATen operation (of programs made of Python); otherwise a captured call is
    one event, because what a compiled piece does inside cannot be seen (its scratch is then all free memory).
    """

    def __init__(self, operations: bool, pool_bytes: int = 1 << 18) -> None:
        self.operations = operations
        self.pool = Pool(pool_bytes)
        self.recording: FakeGraph | None = None
        self.captures = self.replays = self.warm_ups = self.sessions = 0
        self.inside = False
        self.pool.on_release = self._released

    @contextmanager
    def session(self) -> Iterator[None]:
        assert not self.inside
        self.inside = True
        self.sessions += 1
        try:
            yield
        finally:
            self.inside = False

    def warm_up(self, function: Callable[[], object]) -> None:
        assert self.inside and self.recording is None
        self.warm_ups += 1
        function()

    def capture(self, function: Callable[[], Any]) -> tuple[FakeGraph, Any]:
        assert self.inside and self.recording is None and isinstance(function, partial)
        graph = FakeGraph(self)
        self.captures += 1
        graph.events.append(partial(_poison_all, self.pool, tuple(self.pool.free)))
        self.recording = graph
        try:
            if self.operations:
                with _EveryOperation(graph):
                    result = function()
            else:
                result = graph.call(function.func, function.args, function.keywords)
        finally:
            self.recording = None
        return graph, result

    def memory_bytes(self) -> int:
        return self.pool.peak

    def _released(self, span: Span) -> None:
        if self.recording is not None:
            self.recording.events.append(partial(self.pool.poison, span))


def _poison_all(pool: Pool, spans: Sequence[Span]) -> None:
    for span in spans:
        pool.poison(span)
