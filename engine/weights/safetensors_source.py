"""Hugging Face directories: safetensors files, sharded or not, memory-mapped and read one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import WeightsError
from engine.weights.checkpoint_files import INDEX, checkpoint_files, indexed_files
from engine.weights.stored_matrices import Header, Headers

_FLOATING = frozenset({"F64", "F32", "F16", "BF16"})
_INTEGERS = frozenset({"I64", "I32", "U8"})


class SafetensorsSource:
    """Opens every file at once (memory maps, no data is read). Raises WeightsError for missing or damaged files."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._stack = ExitStack()
        self._file_of: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._handles: dict[str, Any] = {}
        try:
            promised = indexed_files(self._directory)
            for file in checkpoint_files(self._directory, promised):
                self._open(file)
            for name, file in (promised or {}).items():
                if self._file_of.get(name) != file:
                    raise WeightsError(f"{self._directory / file}: tensor {name} is missing, though {INDEX} names it")
        except BaseException:
            self._stack.close()
            raise

    def _open(self, file: str) -> None:
        path = self._directory / file
        try:
            handle = self._stack.enter_context(safe_open(str(path), framework="pt"))
            self._handles[file] = handle
            for name in handle.keys():  # noqa: SIM118 - not a dict
                if name in self._file_of:
                    raise WeightsError(f"{path}: tensor {name} is also in {self._file_of[name]}")
                self._file_of[name] = file
                self._shapes[name] = tuple(handle.get_slice(name).get_shape())
        except FileNotFoundError as error:
            raise WeightsError(f"{path}: missing, though {INDEX} names it") from error
        except (SafetensorError, OSError, ValueError) as error:  # ValueError: a name that is none, as one with NUL
            raise WeightsError(f"{path}: damaged or cut short ({error}); download the file again") from error

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def file_of(self, name: str) -> str:
        return str(self._directory / self._file_of[name])

    def read_into(self, name: str, destination: torch.Tensor, expert: int | None = None) -> None:
        destination.copy_(self.mapped(name, expert))

    def mapped(self, name: str, expert: int | None = None) -> torch.Tensor:
        """Raises WeightsError where it is of no floating dtype."""
        handle = self._handles[self._file_of[name]]
        stored = handle.get_slice(name).get_dtype()
        if stored not in _FLOATING:
            readable = ", ".join(sorted(_FLOATING))
            raise WeightsError(f"{self.file_of(name)}: tensor {name} is stored as {stored}; {readable} are read")
        return self.tensor(name, expert)

    def headers(self) -> Headers:
        """Shapes and types of all tensors."""
        return {
            name: Header(shape, self._handles[self._file_of[name]].get_slice(name).get_dtype(), self.file_of(name))
            for name, shape in self._shapes.items()
        }

    def tensor(self, name: str, index: int | None = None) -> torch.Tensor:
        """As it is stored, on the host; `index`: of the tensors that it stacks, the only one that is read."""
        handle = self._handles[self._file_of[name]]
        found: torch.Tensor = handle.get_tensor(name) if index is None else handle.get_slice(name)[index]
        return found

    def integers(self, name: str) -> torch.Tensor:
        """int64, on the host. Raises WeightsError where other things are stored."""
        handle = self._handles[self._file_of[name]]
        stored = handle.get_slice(name).get_dtype()
        if stored not in _INTEGERS:
            raise WeightsError(f"{self.file_of(name)}: tensor {name} is stored as {stored}, not as whole numbers")
        return self.tensor(name).to(torch.int64)

    def encoded(self, name: str, expert: int | None = None) -> None:
        """Element by element, always."""

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, *error: object) -> None:
        self._handles.clear()
        self._stack.close()
