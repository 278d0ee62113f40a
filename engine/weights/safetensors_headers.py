"""What the safetensors files of a directory hold, without torch and without their weights: for plans."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.errors import WeightsError
from engine.weights.checkpoint_files import checkpoint_files, indexed_files
from engine.weights.stored_matrices import Header

_MOST_INTEGERS = 1024


class CheckpointHeaders:
    """Of the files that the loader reads. Raises WeightsError for files that cannot be read."""

    def __init__(self, directory: str) -> None:
        self.headers: dict[str, Header] = {}
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        where = Path(directory)
        for each in checkpoint_files(where, indexed_files(where)):
            file = str(where / each)
            try:
                handle = self._handles[file] = self._stack.enter_context(safe_open(file, framework="np"))
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    part = handle.get_slice(name)
                    self.headers[name] = Header(tuple(part.get_shape()), part.get_dtype(), file)
            except FileNotFoundError as error:
                self._stack.close()
                raise WeightsError(f"{file}: is missing; download it") from error
            except (SafetensorError, OSError, ValueError) as error:
                self._stack.close()
                raise WeightsError(f"{file}: damaged or cut short ({error}); download the file again") from error

    def integers(self, name: str) -> Sequence[int]:
        """A small tensor of whole numbers. Raises WeightsError where it is large."""
        header = self.headers[name]
        if len(header.shape) != 1 or header.shape[0] > _MOST_INTEGERS:
            raise WeightsError(f"{header.file}: tensor {name} has shape {header.shape}, expected a few numbers")
        return [int(number) for number in self._handles[header.file].get_tensor(name)]

    def __enter__(self) -> CheckpointHeaders:
        return self

    def __exit__(self, *error: object) -> None:
        self._handles.clear()
        self._stack.close()
