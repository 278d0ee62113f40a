"""What the loader asks of a checkpoint: shapes first, so that a wrong one is refused unread; then tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.cpu_kernels.formats import Format


@dataclass(frozen=True)
class EncodedRows:
    """A matrix in blocks that a packed format holds as they are: `pack_blocks` re-orders their bytes."""

    format: Format
    rows: torch.Tensor
    """uint8 [n, bytes of a row]"""
    order: torch.Tensor | None = None
    """int32 [k]: which input each column is for; None: they are in order"""


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a matrix, under their name in the checkpoint."""

    name: str
    rows: int
    expert: int | None = None
    """which of the matrices that the tensor stacks; None: it is one"""


class WeightSource(Protocol):
    """Tensors under Hugging Face names, read one at a time. Closed by leaving the `with` statement."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of the checkpoint that takes part in the model, with its shape in torch's order."""
        ...

    def file_of(self, name: str) -> str:
        """Where the tensor lies, for messages."""
        ...

    def read_into(self, name: str, destination: torch.Tensor, expert: int | None = None) -> None:
        """Write the tensor, or one of those that it stacks, converted to the destination's dtype and device. Shapes
        agree; destination is contiguous.

        Raises WeightsError when the stored type cannot be read.
        """
        ...

    def mapped(self, name: str, expert: int | None = None) -> torch.Tensor | None:
        """The tensor, or one of those that it stacks, as it lies in its file, of which only what is copied is read; it
        may be of another floating dtype. None: it is decoded or arranged when it is read."""
        ...

    def encoded(self, name: str, expert: int | None = None) -> EncodedRows | None:
        """A matrix, or one of those that the tensor stacks, as it runs packed without a change of its values, rows in
        the order that `read_into` gives (of outputs, where that is transposed). None: it is stored element by element,
        or in a way that no kernel multiplies."""
        ...

    def __enter__(self) -> WeightSource: ...

    def __exit__(self, *error: object) -> None: ...
