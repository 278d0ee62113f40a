"""What a process has of a group whose collectives are native code, whatever carries their numbers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from attention_backends.native_build import build_for_this_cpu
from engine.parallel.build import sources

_loading = threading.Lock()


class NativeGroup:
    """A rank of a group (see `Group`) that the library has opened. One thread calls its collectives at a time."""

    def __init__(self, ops: Any, number: int, name: str, rank: int, size: int) -> None:
        """`number`: how many of that name are open in this process with it."""
        self._ops = ops
        self._closing = threading.Lock()
        self._open = True
        self.name = name if number == 1 else f"{name}-{number}"
        self.rank, self.size = rank, size
        self.all_reduce: OpOverload = self._ops.all_reduce.default
        """its residual is contiguous, too"""
        self.all_gather: OpOverload = self._ops.all_gather.default
        """its x is of any dtype, its rows may lie apart"""
        self.all_to_all: OpOverload = self._ops.all_to_all.default
        """its x as of `all_gather`"""

    @property
    def native_exchange(self) -> tuple[int, ...]:
        """Addresses for callers in native code, as long as it is open: of the `NativeExchange` that gathers, of that
        which deals (`native_group.h`), and of the group."""
        return tuple(self._ops.native_exchange(self.name))

    def abort(self, reason: str) -> None:
        """See `Group.abort`. Nothing once this rank is closed."""
        with self._closing:
            if self._open:
                self._ops.stop_group(self.name, reason)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """See `Group.alone`."""
        self._ops.be_alone(True)
        try:
            yield
        finally:
            self._ops.be_alone(False)

    def close(self) -> None:
        """Give back what it holds. The other ranks are not told, and wait for this one if they call a collective."""
        with self._closing:
            if self._open:
                self._open = False
                self._ops.close_group(self.name)


def load_library(cache_dir: Path) -> Any:
    """The library's operators; it is built where it is not yet. Raises BuildError."""
    with _loading:
        return _load_once(cache_dir)


@functools.cache
def _load_once(cache_dir: Path) -> Any:
    library = build_for_this_cpu(sources(), cache_dir)
    ops = getattr(torch.ops, library.namespace)
    if not hasattr(ops, "all_reduce"):  # found in another cache before
        torch.ops.load_library(str(library.path))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        torch.library.register_fake(f"{library.namespace}::all_reduce", _fake_all_reduce)
        torch.library.register_fake(f"{library.namespace}::all_gather", _fake_all_gather)
    return ops


def _fake_all_reduce(x: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype, group: str) -> torch.Tensor:
    return x.new_empty((x.size(0), x.size(1)), dtype=dtype)


def _fake_all_gather(x: torch.Tensor, columns: Sequence[int], group: str) -> torch.Tensor:
    return x.new_empty((x.size(0), sum(columns)))
