"""What `compilation` gives to a runner. It knows nothing of engines, models or attention: an nn.Module, op names,
functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from compilation.errors import CompileError
from compilation.split import Fused, Step
from compilation.trace import Traced

PieceFunction = Callable[[list[Any]], Sequence[Any]]
"""Boxed call `[size, *inputs] -> outputs`; may clear the list to free inputs early."""

BoundFunction = Callable[..., Any]
"""called in the place of a split op, with the op's own arguments"""

WrapPiece = Callable[[PieceFunction], PieceFunction]
WrapCall = Callable[[BoundFunction], BoundFunction]
WrapFused = Callable[[Fused], PieceFunction]


class Rewire(Protocol):
    def __call__(
        self, wrap_piece: WrapPiece, wrap_call: WrapCall, wrap_fused: WrapFused = ...
    ) -> Callable[..., torch.Tensor]:
        """The same flat program with every distinct piece and every bound function wrapped once, and something else in
        the place of fused steps; wrappers are called in the program's order, and values are dropped at the same places
        as in `run`."""
        ...


@dataclass(frozen=True)
class CompileSettings:
    mode: Literal["none", "pieces"]
    cache_dir: Path
    debug_asserts: bool = False
    """keep Inductor's size asserts (tests)"""
    largest_size: int | None = None
    """the most tokens that a call will bring: code for a bounded number is better; None: any number"""
    invariant: bool = False
    """a token's bits depend neither on how many there are nor on what was timed when a piece was compiled"""


@dataclass(frozen=True)
class CompileReport:
    num_pieces: int
    """token-wise pieces in the flat program, repeats counted"""
    distinct_pieces: int
    compiled: int
    """distinct pieces compiled now"""
    loaded: int
    """distinct pieces taken from the persistent cache"""
    seconds: float


def _no_pieces(
    wrap_piece: WrapPiece, wrap_call: WrapCall, wrap_fused: WrapFused | None = None
) -> Callable[..., torch.Tensor]:
    raise CompileError("a model that is not compiled has no pieces to capture; compile it in pieces")


@dataclass(frozen=True)
class CompiledModel:
    """`run(*inputs)` computes what `module(*inputs)` would, with bound functions in the place of the split ops.

    `rewire` makes a second program beside it, for who must see or record each step; CompileError under mode "none".
    """

    run: Callable[..., torch.Tensor]
    report: CompileReport
    rewire: Rewire = _no_pieces


FuseSteps = Callable[[Traced, Sequence[Step]], Sequence[Step]]
"""May put `Fused` steps where there were several, each computing exactly what those did."""

BoundOps = Mapping[str, BoundFunction]
"""op name ("namespace::name") → function called in its place"""
