"""A safetensors file of hundreds of small tensors, read at once: the library checks its header; a read, and a tensor's
memory, for each of them takes more than twice as long."""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open

FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LENGTH = 8
_KNOWN = 16
_PIECE, _PAGE = 1 << 20, 1 << 12
_WEIGHTS = np.arange(_PAGE // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1)


class Layout(NamedTuple):
    """What a header says, in the order of the numbers, which fill the file."""

    digest: bytes
    """of the header, and of how long the file is: equal ones mean the same"""
    names: list[str]
    shapes: list[list[int]]
    dtypes: list[torch.dtype]
    nbytes: list[int]

    @property
    def dtype(self) -> torch.dtype | None:
        """None: tensors are of several, or there are none."""
        return self.dtypes[0] if len(set(self.dtypes)) == 1 else None


class StoredTensors(NamedTuple):
    layout: Layout
    tensors: dict[str, torch.Tensor]
    digest: Callable[[], bytes]
    """of header and numbers; to be asked for before anything else is read"""


def read_shapes(path: Path, most: int) -> StoredTensors:
    """Tensors that have shapes and types, and no numbers, which are only added up. Raises what `TensorFile.read`
    does."""
    with _opened(path, most) as file, _unchanged(file) as size:
        found, sums = _layout(file, OrderedDict()), list[bytes]()
        left = sum(found.nbytes)
        file.seek(size - left)
        room = torch.empty(min(left, _PIECE), dtype=torch.uint8)
        while left:
            piece = room[:left]
            _fill(file, piece)
            sums.append(_sums(piece))
            left -= len(piece)
    each = zip(found.names, found.shapes, found.dtypes, strict=True)
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape, dtype in each}
    return StoredTensors(found, tensors, lambda: _of_all(found, sums))


class TensorFile:
    """Reads one after the other. `memory`, uint8, is what the tensors of the last one share; it is used again for the
    next one, unless it is much too large, so whoever keeps them takes it away: the system clears what it gives anew,
    which takes longer than to read."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self._known: OrderedDict[bytes, Layout] = OrderedDict()

    def read(self, path: Path, most: int) -> StoredTensors:
        """Of at most so many bytes. Raises `SafetensorError`, OSError, ValueError, TypeError, and KeyError, which names
        a type, of what is stored otherwise than as floats."""
        with _opened(path, most) as file, _unchanged(file) as size:
            layout = _layout(file, self._known)
            numbers = self._room(sum(layout.nbytes))
            file.seek(size - len(numbers))
            _fill(file, numbers)
        tensors = dict(zip(layout.names, _apart(numbers, layout), strict=True))
        return StoredTensors(layout, tensors, lambda: _of_all(layout, [_sums(numbers)]))

    def _room(self, size: int) -> torch.Tensor:
        if self.memory is None or not size <= len(self.memory) <= 2 * size:
            self.memory = torch.empty(size, dtype=torch.uint8)
        return self.memory[:size]


@contextmanager
def _opened(path: Path, most: int) -> Iterator[FileIO]:
    """Nobody waits for who might write to it."""
    with FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a file")
        if found.st_size > most:
            raise ValueError(f"it has {found.st_size} bytes, more than {most}, which the largest ranks have at most")
        yield file


@contextmanager
def _unchanged(file: FileIO) -> Iterator[int]:
    """Its size. Raises ValueError where somebody has written to it meanwhile."""
    before = os.fstat(file.fileno())
    yield before.st_size
    now = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
        raise ValueError("it was changed while it was read")


def _layout(file: FileIO, known: OrderedDict[bytes, Layout]) -> Layout:
    """Of a header that is `known` as it was found then: files of one training have the same."""
    digest = _digest(file)
    layout = known.pop(digest, None)
    if layout is None:
        layout = _parsed(file, digest)
        if _digest(file) != digest:
            raise ValueError("it was changed while it was read")
    known[digest] = layout
    if len(known) > _KNOWN:
        known.popitem(last=False)
    return layout


def _digest(file: FileIO) -> bytes:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(os.pread(file.fileno(), _LENGTH, 0), "little")
    header = os.pread(file.fileno(), length if length < size else 0, _LENGTH)  # else the library refuses it
    return hashlib.sha256(b"%d %d " % (size, len(header)) + header).digest()


def _parsed(file: FileIO, digest: bytes) -> Layout:
    path = f"/proc/self/fd/{file.fileno()}"
    with safe_open(path, framework="pt", backend="pread") as opened:  # mapped, it could end under its readers
        slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
        shapes = [each.get_shape() for each in slices.values()]
        dtypes = [FLOATING[each.get_dtype()] for each in slices.values()]
    nbytes = [dtype.itemsize * math.prod(shape) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return Layout(digest, list(slices), shapes, dtypes, nbytes)


def _fill(file: FileIO, numbers: torch.Tensor) -> None:
    into = numbers.numpy().data
    while into:
        if not (count := file.readinto(into)):
            raise ValueError("it was cut while it was read")
        into = into[count:]


def _sums(numbers: torch.Tensor) -> bytes:
    """Of each page, eight bytes at a time, each weighted by its place: a hash takes as long as all else that loading
    does."""
    found = numbers.numpy()
    whole = len(found) // _PAGE * _PAGE
    pages = found[:whole].view(np.uint64).reshape(-1, _PAGE // 8)
    return bytes(np.einsum("pw,w->p", pages, _WEIGHTS).tobytes() + found[whole:].tobytes())


def _of_all(layout: Layout, sums: list[bytes]) -> bytes:
    return hashlib.sha256(layout.digest + b"".join(sums)).digest()


def _apart(numbers: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Each tensor, in the same memory where it may be."""
    found, at, dtype = list[torch.Tensor](), 0, layout.dtype
    whole = numbers if dtype is None else numbers.view(dtype)
    for shape, own, size in zip(layout.shapes, layout.dtypes, layout.nbytes, strict=True):
        if dtype is not None:
            found.append(whole.as_strided(shape, _strides(shape), at // dtype.itemsize))
        else:
            piece = whole[at : at + size]
            aligned = piece.clone() if at % own.itemsize else piece  # the format has no alignment
            found.append(aligned.view(own).view(shape))
        at += size
    return found


def _strides(shape: list[int]) -> list[int]:
    return [math.prod(shape[place:]) for place in range(1, len(shape) + 1)]
