"""Staged writes: how the host changes device tables without waiting for the device, and without a race.

The host collects the writes of a step; `apply` packs them into one host buffer, copies it over and lets one kernel per
table apply them, in stream order before the step's other kernels. The buffers form a ring. A buffer is handed out again
only after the event recorded behind its last use has completed, so a copy in flight can never read what a later step
writes; with one buffer more than steps in flight that wait never happens in practice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from engine.runner.kernels import InputKernels

STEPS_IN_FLIGHT = 2
"""the core submits step N + 1 while step N computes"""

_ALIGN_WORDS = 4
_TABLE_DTYPES: dict[torch.dtype, tuple[np.dtype[np.generic], int]] = {
    torch.int32: (np.dtype(np.int32), 1),
    torch.int64: (np.dtype(np.int64), 2),
    torch.float32: (np.dtype(np.float32), 1),
}
"""table dtype → its NumPy dtype, and its size in 4-byte words"""

Values = Sequence[int] | Sequence[float] | np.ndarray
"""what one write puts into consecutive columns"""


class Event(Protocol):
    """The part of `torch.cuda.Event` that the ring needs."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class ImmediateEvent:
    """For devices whose work is done when the call returns."""

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        return


def _new_event(device: torch.device) -> Event:
    if device.type != "cuda":
        return ImmediateEvent()
    event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's class has no annotations
    return event


class BufferRing:
    """Host buffers of 4-byte words, each lent out between `acquire` and `commit`.

    Every buffer has one event, recorded at `commit` on the current stream behind the work that reads the buffer;
    `acquire` waits for it before it lends the buffer again. A buffer that is too small is replaced, after the same
    wait.
    """

    def __init__(
        self,
        device: torch.device,
        words: int,
        depth: int | None = None,
        make_event: Callable[[torch.device], Event] = _new_event,
    ) -> None:
        self._pinned = device.type == "cuda"
        depth = depth or (STEPS_IN_FLIGHT + 1 if self._pinned else 1)
        self._buffers = [self._allocate(words) for _ in range(depth)]
        self._events = [make_event(device) for _ in range(depth)]
        self._in_use = [False] * depth
        self._next = 0
        self._lent = False

    def acquire(self, words: int = 0) -> torch.Tensor:
        """The next buffer, int32, at least `words` long; nothing on the device reads it any more."""
        if self._lent:
            raise RuntimeError("a staging buffer was acquired before the last one was committed")
        if self._in_use[self._next]:
            self._events[self._next].synchronize()
            self._in_use[self._next] = False
        if self._buffers[self._next].numel() < words:
            self._buffers[self._next] = self._allocate(1 << (words - 1).bit_length())
        self._lent = True
        return self._buffers[self._next]

    def commit(self) -> None:
        """All work that reads the acquired buffer is queued: it may be refilled once that is done."""
        if not self._lent:
            raise RuntimeError("a staging buffer was committed that nobody acquired")
        self._events[self._next].record()
        self._in_use[self._next] = True
        self._next = (self._next + 1) % len(self._buffers)
        self._lent = False

    def _allocate(self, words: int) -> torch.Tensor:
        return torch.empty(max(words, 1), dtype=torch.int32, pin_memory=self._pinned)


class StagedWrites:
    """Collects `(table, row, start column, values)` on the host; `apply` makes them true on the device.

    `tables` are contiguous 2-D tensors on one device, int32, int64 or float32. Where writes of one `apply` overlap, the
    later one wins.
    """

    def __init__(
        self,
        tables: Sequence[torch.Tensor],
        kernels: InputKernels,
        device: torch.device,
        ring: BufferRing | None = None,
    ) -> None:
        for index, table in enumerate(tables):
            if table.dim() != 2 or not table.is_contiguous() or table.dtype not in _TABLE_DTYPES:
                raise ValueError(
                    f"table {index} must be a contiguous 2-D tensor of int32, int64 or float32, "
                    f"got {tuple(table.shape)} {table.dtype}"
                )
        self._tables = list(tables)
        self._shapes = [(int(t.shape[0]), int(t.shape[1])) for t in tables]
        self._kernels = kernels
        self._device = device
        self._ring = ring or BufferRing(device, words=4096)
        self._device_buffer = torch.empty(0, dtype=torch.int32, device=device)
        self._pending: dict[int, list[tuple[int, Values]]] = {}

    def write(self, table: int, row: int, start: int, values: Values) -> None:
        """Stage `tables[table][row, start : start + len(values)] = values`. `values` must not change until `apply`."""
        rows, columns = self._shapes[table]
        if not (0 <= row < rows and start >= 0 and start + len(values) <= columns):
            raise ValueError(
                f"a write to row {row}, columns {start} to {start + len(values)} is outside table {table} "
                f"of {rows} rows and {columns} columns"
            )
        if len(values):
            self._pending.setdefault(table, []).append((row * columns + start, values))

    def apply(self) -> None:
        """Queue everything staged since the last call."""
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        sections = self._layout(pending)
        words = sections[-1][3]
        host = self._ring.acquire(words)
        packed = host.numpy()
        for table, header_at, values_at, _ in sections:
            self._pack(packed, table, pending[table], header_at, values_at)
        device = self._on_device(host, words)
        for table, header_at, _, end in sections:
            self._launch(table, packed, device, header_at, len(pending[table]), end)
        self._ring.commit()

    def _layout(self, pending: dict[int, list[tuple[int, Values]]]) -> list[tuple[int, int, int, int]]:
        """(table, header word, values word, end word) of each table's section; all aligned to 16 bytes."""
        sections = []
        at = 0
        for table, writes in pending.items():
            values_at = _aligned(at + 6 * len(writes))
            end = _aligned(values_at + sum(len(v) for _, v in writes) * _TABLE_DTYPES[self._tables[table].dtype][1])
            sections.append((table, at, values_at, end))
            at = end
        return sections

    def _pack(
        self, packed: np.ndarray, table: int, writes: list[tuple[int, Values]], header_at: int, values_at: int
    ) -> None:
        dtype, item_words = _TABLE_DTYPES[self._tables[table].dtype]
        header = packed[header_at : header_at + 6 * len(writes)].view(np.int64)
        usable = packed.size - packed.size % 2
        values = packed[:usable].view(dtype)
        src = values_at // item_words
        triples: list[int] = []
        for dst, data in writes:
            length = len(data)
            values[src : src + length] = data
            triples += (dst, src, length)
            src += length
        header[:] = triples

    def _on_device(self, host: torch.Tensor, words: int) -> torch.Tensor:
        if self._device.type == "cpu":
            return host
        # One device buffer serves every step: copies and kernels of the stream run in order.
        if self._device_buffer.numel() < words:
            self._device_buffer = torch.empty(1 << (words - 1).bit_length(), dtype=torch.int32, device=self._device)
        self._device_buffer[:words].copy_(host[:words], non_blocking=True)
        return self._device_buffer

    def _launch(
        self, table: int, packed: np.ndarray, device: torch.Tensor, header_at: int, count: int, end: int
    ) -> None:
        target = self._tables[table]
        header = packed[header_at : header_at + 6 * count].view(np.int64).reshape(count, 3)
        writes = device[header_at : header_at + 6 * count].view(torch.int64).view(count, 3)
        values = device[:end].view(target.dtype)
        lengths = header[:, 2]
        if count == 1 or not _overlap(header):
            self._kernels.apply_staged_writes(target, writes, values, int(lengths.max()))
            return
        for index in range(count):
            self._kernels.apply_staged_writes(target, writes[index : index + 1], values, int(lengths[index]))


def _aligned(words: int) -> int:
    return -(-words // _ALIGN_WORDS) * _ALIGN_WORDS


def _overlap(header: np.ndarray) -> bool:
    order = np.argsort(header[:, 0])
    starts = header[order, 0]
    return bool((starts[:-1] + header[order[:-1], 2] > starts[1:]).any())
