"""Collectives of ranks that have a device each, through torch's process groups: NCCL on GPUs.

NCCL carries parts, and adds nothing: it would add in an order of its own, and round at each addition. Few rows go whole
to every rank, many are divided: each rank adds up its share, and shares are gathered (a reduce-scatter and an
all-gather, as a ring has them). So the bits are those of every other transport (`engine.parallel.group`).

Ranks find each other through a file without a name that they inherit: no port, and nothing that stays.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore, Store
from torch._ops import OpOverload

from engine.limits import MAX_RANKS
from engine.parallel.kernels import sum_for

WHOLE_BYTES = 64 << 10
"""of a part: up to which it goes whole to every rank, so that there is one exchange"""
TIMEOUT = timedelta(minutes=30)
"""of an exchange: who dies is seen by those that watch processes, long before"""


class Work(Protocol):
    def wait(self) -> bool:
        """On a GPU the current stream waits, and the caller does not."""
        ...


class Exchange(Protocol):
    """What of torch's process groups is used here."""

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor) -> Work: ...

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> Work: ...

    def abort(self) -> None: ...


MakeExchange = Callable[[Store, int, int], Exchange]
"""(where ranks find each other, rank, size)"""


def allocate(size: int, slot_bytes: int) -> int:
    """What ranks find each other by, as a descriptor that the caller closes and workers inherit. Raises ValueError."""
    if not 1 <= size <= MAX_RANKS or slot_bytes < 1:
        raise ValueError(f"a group has 1 to {MAX_RANKS} ranks and slots of bytes, not {size} ranks, {slot_bytes} bytes")
    return os.memfd_create("pageloom-ranks", os.MFD_CLOEXEC)


def nccl_group(fd: int, name: str, rank: int, size: int, cache_dir: Path) -> DeviceGroup:
    """For `engine.executor.joining.MakeGroup`."""
    return DeviceGroup(fd, name, rank, size, _nccl)


def _nccl(store: Store, rank: int, size: int) -> Exchange:
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return cast(Exchange, distributed.ProcessGroupNCCL(store, rank, size, options))


class DeviceGroup:
    """A rank of a group (see `Group`). One thread calls its collectives at a time; others may `abort`. Raises
    RuntimeError where ranks do not find each other."""

    def __init__(self, fd: int, name: str, rank: int, size: int, make: MakeExchange) -> None:
        self.rank, self.size = rank, size
        self.all_reduce: OpOverload = torch.ops.pageloom_ranks.all_reduce.default
        """its residual is contiguous, too"""
        self.all_gather: OpOverload = torch.ops.pageloom_ranks.all_gather.default
        """its x is of any dtype"""
        self._fd = os.dup(fd)  # the store opens it again and again
        self._exchange: Exchange | None = make(FileStore(f"/proc/self/fd/{self._fd}", size), rank, size)
        self._reason: str | None = None
        self._connected = False
        self._alone = threading.local()
        self.name = _GROUPS.add(name, self)

    def abort(self, reason: str) -> None:
        """See `Group.abort`; other ranks are told by those that watch them, or wait until theirs has gone."""
        if self._reason is None:
            self._reason = reason
            if (exchange := self._exchange) is not None:
                exchange.abort()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """See `Group.alone`."""
        self._alone.now = True
        try:
            yield
        finally:
            self._alone.now = False

    def close(self) -> None:
        if _GROUPS.remove(self.name, self):
            self.abort("the group is closed")
            self._exchange = (
                None  # the store writes into its file when it ends, so the descriptor must be this one still
            )
            os.close(self._fd)

    def reduce(self, x: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """See `AllReduce`."""
        if not self._meets(x.device) or not x.numel():
            return x.new_zeros(x.shape, dtype=dtype)
        flat, rest = x.reshape(-1), None if residual is None else residual.reshape(-1)
        add = sum_for(x.device)
        if x.nbytes <= WHOLE_BYTES:
            return add(self._gathered(flat), rest, dtype).view(x.shape)
        share = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, share * self.size - flat.numel()))
        parts = self._dealt(padded)
        whole = self._gathered(add(parts.view(self.size, share), None, dtype)).reshape(1, -1)[:, : flat.numel()]
        return add(whole.contiguous(), rest, dtype).view(x.shape)

    def gather(self, x: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
        """See `AllGather`."""
        rows, widest = x.size(0), max(columns)
        if not self._meets(x.device) or not rows:
            return x.new_zeros((rows, sum(columns)))
        padded = torch.nn.functional.pad(x, (0, widest - x.size(1)))
        parts = self._gathered(padded.reshape(-1)).view(self.size, rows, widest)
        return torch.cat([part[:, :count] for part, count in zip(parts, columns, strict=True)], dim=1)

    def _gathered(self, flat: torch.Tensor) -> torch.Tensor:
        """[elements] of every rank → [ranks, elements]."""
        parts = flat.new_empty(self.size * flat.numel())
        self._open._allgather_base(parts, flat.contiguous()).wait()
        return parts.view(self.size, flat.numel())

    def _dealt(self, flat: torch.Tensor) -> torch.Tensor:
        """[ranks * share] → the share of this rank, of each."""
        parts = torch.empty_like(flat)
        self._open.alltoall_base(parts, flat, [], []).wait()
        return parts

    @property
    def _open(self) -> Exchange:
        if self._exchange is None:
            raise RuntimeError(self._reason)
        return self._exchange

    def _meets(self, device: torch.device) -> bool:
        """False: it is alone now. The first time, ranks connect, which they could not while a graph is captured."""
        if getattr(self._alone, "now", False):
            return False
        if self._reason is not None:
            raise RuntimeError(self._reason)
        if not self._connected:
            self._connected = True
            first = torch.zeros(self.size, device=device)
            self._dealt(first)
            self._gathered(first)
        return True


class _Groups:
    """A process's groups by their names: operators are given a name, so that ranks share what is compiled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, DeviceGroup] = {}

    def add(self, name: str, group: DeviceGroup) -> str:
        """Under which it is found: with a number where there is one of that name."""
        with self._lock:
            names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
            free = next(each for each in names if each not in self._by_name)
            self._by_name[free] = group
        return free

    def remove(self, name: str, group: DeviceGroup) -> bool:
        with self._lock:
            return self._by_name.get(name) is group and self._by_name.pop(name) is group

    def of(self, name: str) -> DeviceGroup:
        """Raises RuntimeError."""
        group = self._by_name.get(name)
        if group is None:
            raise RuntimeError(f"there is no group {name!r} in this process, or it was closed")
        return group


_GROUPS = _Groups()


@torch.library.custom_op("pageloom_ranks::all_reduce", mutates_args=())
def _all_reduce(x: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype, group: str) -> torch.Tensor:
    return _GROUPS.of(group).reduce(x, residual, dtype)


@_all_reduce.register_fake
def _(x: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype, group: str) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("pageloom_ranks::all_gather", mutates_args=())
def _all_gather(x: torch.Tensor, columns: Sequence[int], group: str) -> torch.Tensor:
    return _GROUPS.of(group).gather(x, columns)


@_all_gather.register_fake
def _(x: torch.Tensor, columns: Sequence[int], group: str) -> torch.Tensor:
    return x.new_empty((x.size(0), sum(columns)))
