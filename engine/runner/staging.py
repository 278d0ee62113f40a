"""Staged writes: how the host changes device tables without waiting for the device, and without a race.

The host collects the writes of a step; `send` packs them into one host buffer and starts its copy, while the step
before may still compute; `apply` lets one kernel per table make them true, once that step has left the tables. The host
buffers form a ring. A buffer is handed out again only after the event recorded behind its copy has completed, so a copy
in flight can never read what a later step writes; with one buffer more than steps in flight that wait never happens in
practice. The device's landing buffer needs no ring: its copy and its readers are all on the input stream, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.runner.kernels import InputKernels
from engine.runner.streams import Streams
from engine.step import Writes

_ALIGN_WORDS = 4
_TABLE_DTYPES: dict[torch.dtype, tuple[np.dtype[np.generic], int]] = {
    torch.int32: (np.dtype(np.int32), 1),
    torch.int64: (np.dtype(np.int64), 2),
    torch.float32: (np.dtype(np.float32), 1),
}
"""table dtype → its NumPy dtype, and its size in 4-byte words"""

Values = Sequence[int] | Sequence[float] | np.ndarray
"""what one write puts into consecutive columns"""
_Run = tuple[list[int], list[int], Values]
"""where each of some writes begins in its table, how long it is, and the values of one after the other"""


class BufferRing:
    """Host buffers of 4-byte words, each lent out between `acquire` and `commit`.

    Every buffer has one event, recorded at `commit` on the current stream behind the work that reads the buffer;
    `acquire` waits for it before it lends the buffer again. A buffer that is too small is replaced, after the same
    wait.
    """

    def __init__(self, streams: Streams, words: int, depth: int) -> None:
        """`depth`: buffers."""
        self._streams = streams
        self._buffers = [streams.host_buffer(max(words, 1)) for _ in range(depth)]
        self._events = [streams.event() for _ in range(depth)]
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
            self._buffers[self._next] = self._streams.host_buffer(1 << (words - 1).bit_length())
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


@dataclass(frozen=True)
class _Launch:
    """One kernel call of `apply`: where in the landing buffer its writes and values lie."""

    table: int
    header_at: int
    count: int
    end: int
    max_length: int


class StagedWrites:
    """Collects `(table, row, start column, values)` on the host; `apply` makes them true on the device.

    `tables` are contiguous 2-D tensors on one device, int32, int64 or float32. Where writes of one `apply` overlap, the
    later one wins.
    """

    def __init__(
        self,
        tables: Sequence[torch.Tensor],
        kernels: InputKernels,
        streams: Streams,
        ring: BufferRing,
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
        self._streams = streams
        self._ring = ring
        self._landing = torch.empty(0, dtype=torch.int32)
        self._pending: dict[int, list[_Run]] = {}
        self._launches: list[_Launch] = []

    def write(self, table: int, row: int, start: int, values: Values) -> None:
        """Stage `tables[table][row, start : start + len(values)] = values`. `values` must not change until `apply`."""
        rows, columns = self._shapes[table]
        if not (0 <= row < rows and start >= 0 and start + len(values) <= columns):
            raise ValueError(
                f"a write to row {row}, columns {start} to {start + len(values)} is outside table {table} "
                f"of {rows} rows and {columns} columns"
            )
        if len(values):
            self._pending.setdefault(table, []).append(([row * columns + start], [len(values)], values))

    def write_all(self, table: int, writes: Writes, group_rows: int) -> None:
        """`write` each; a group of writes has `group_rows` rows of the table."""
        rows, columns = self._shapes[table]
        group, row, start, length = writes.where.astype(np.int64)
        if row.min() < 0 or row.max() >= group_rows or group.min() < 0 or group.max() * group_rows >= rows:
            raise ValueError(
                f"writes to rows {row.min()} to {row.max()} of groups {group.min()} to {group.max()} are outside table "
                f"{table} of {rows} rows, {group_rows} to a group"
            )
        if start.min() < 0 or (start + length).max() > columns:
            raise ValueError(
                f"writes to columns {start.min()} to {(start + length).max()} are outside table {table} of {columns} "
                "columns"
            )
        run = (((group * group_rows + row) * columns + start).tolist(), length.tolist(), writes.values)
        self._pending.setdefault(table, []).append(run)

    def send(self) -> None:
        """Start the copy of everything staged since the last call. Call it on the input stream, then `apply`."""
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        sections = self._layout(pending)
        words = sections[-1][3]
        host = self._ring.acquire(words)
        packed = host.numpy()
        for table, header_at, values_at, end in sections:
            header = self._pack(packed, table, pending[table], header_at, values_at)
            if len(header) == 1 or not _overlap(header):
                self._launches.append(_Launch(table, header_at, len(header), end, int(header[:, 2].max())))
            else:
                self._launches += [
                    _Launch(table, header_at + 6 * index, 1, end, length)
                    for index, length in enumerate(header[:, 2].tolist())
                ]
        self._land(host, words)
        self._ring.commit()

    def apply(self) -> None:
        """Queue the kernels that write what was sent."""
        launches, self._launches = self._launches, []
        for launch in launches:
            target = self._tables[launch.table]
            writes = self._landing[launch.header_at : launch.header_at + 6 * launch.count].view(torch.int64)
            values = self._landing[: launch.end].view(target.dtype)
            self._kernels.apply_staged_writes(target, writes.view(launch.count, 3), values, launch.max_length)

    def _layout(self, pending: dict[int, list[_Run]]) -> list[tuple[int, int, int, int]]:
        """(table, header word, values word, end word) of each table's section; all aligned to 16 bytes."""
        sections = []
        at = 0
        for table, runs in pending.items():
            values_at = _aligned(at + 6 * sum(len(starts) for starts, _, _ in runs))
            count = sum(len(values) for _, _, values in runs)
            end = _aligned(values_at + count * _TABLE_DTYPES[self._tables[table].dtype][1])
            sections.append((table, at, values_at, end))
            at = end
        return sections

    def _pack(self, packed: np.ndarray, table: int, runs: list[_Run], header_at: int, values_at: int) -> np.ndarray:
        """Returns the section's header: int64 [writes, 3] of (destination, source, length)."""
        dtype, item_words = _TABLE_DTYPES[self._tables[table].dtype]
        usable = packed.size - packed.size % 2
        values = packed[:usable].view(dtype)
        first = at = values_at // item_words
        starts: list[int] = []
        lengths: list[int] = []
        for run_starts, run_lengths, data in runs:
            values[at : at + len(data)] = data
            at += len(data)
            starts += run_starts
            lengths += run_lengths
        header = packed[header_at : header_at + 6 * len(starts)].view(np.int64).reshape(-1, 3)
        header[:, 0], header[:, 2] = starts, lengths
        header[:, 1] = first + np.cumsum(header[:, 2]) - header[:, 2]
        return header

    def _land(self, host: torch.Tensor, words: int) -> None:
        if not self._streams.queued:
            self._landing = host
            return
        # One landing buffer serves every step: copies and kernels of the input stream run in order. It is allocated on
        # that stream, so the allocator hands an outgrown one to nobody who could be early.
        if self._landing.numel() < words:
            device = self._tables[0].device
            self._landing = torch.empty(1 << (words - 1).bit_length(), dtype=torch.int32, device=device)
        self._landing[:words].copy_(host[:words], non_blocking=True)


def _aligned(words: int) -> int:
    return -(-words // _ALIGN_WORDS) * _ALIGN_WORDS


def _overlap(header: np.ndarray) -> bool:
    order = np.argsort(header[:, 0])
    starts = header[order, 0]
    return bool((starts[:-1] + header[order[:-1], 2] > starts[1:]).any())
