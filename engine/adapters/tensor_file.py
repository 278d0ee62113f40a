"""A safetensors file of hundreds of small tensors, read at once: the library checks its header; a read, and a tensor's
memory, for each of them takes more than twice as long."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import torch
from safetensors import safe_open

FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_shapes(path: Path, most: int) -> dict[str, torch.Tensor]:
    """Tensors that have shapes and types, and no numbers. Raises what `TensorFile.read` does."""
    with _opened(path, most) as file:
        return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in _header(file).items()}


class TensorFile:
    """`memory`, uint8, is what its tensors share: `spare`, if that is not much too large. The system clears what it
    gives anew, which takes longer than to read."""

    def __init__(self, spare: torch.Tensor | None = None) -> None:
        self.memory = spare

    def read(self, path: Path, most: int) -> dict[str, torch.Tensor]:
        """Of at most so many bytes. Raises `SafetensorError`, OSError, ValueError, TypeError, and KeyError, which names
        a type, of what is stored otherwise than as floats."""
        with _opened(path, most) as file:
            before = os.fstat(file.fileno())
            header = _header(file)
            sizes = [dtype.itemsize * math.prod(shape) for shape, dtype in header.values()]
            numbers = self._room(sum(sizes))
            file.seek(before.st_size - len(numbers))
            _fill(file, numbers)
            now = os.fstat(file.fileno())
            if (before.st_size, before.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
                raise ValueError("it was changed while it was read")
        tensors, at = {}, 0
        for (name, (shape, dtype)), size in zip(header.items(), sizes, strict=True):
            tensors[name] = _as(numbers[at : at + size], shape, dtype)
            at += size
        return tensors

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


def _header(file: FileIO) -> dict[str, tuple[list[int], torch.dtype]]:
    """In the order of their numbers, which fill the file."""
    path = f"/proc/self/fd/{file.fileno()}"
    with safe_open(path, framework="pt", backend="pread") as opened:  # mapped, it could end under its readers
        slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
        return {name: (each.get_shape(), FLOATING[each.get_dtype()]) for name, each in slices.items()}


def _fill(file: FileIO, numbers: torch.Tensor) -> None:
    into = numbers.numpy().data
    while into:
        if not (count := file.readinto(into)):
            raise ValueError("it was cut while it was read")
        into = into[count:]


def _as(piece: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    if piece.storage_offset() % dtype.itemsize:  # the format has no alignment
        piece = piece.clone()
    return piece.view(dtype).view(shape)
