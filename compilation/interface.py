"""What `compilation` gives to a runner. It knows nothing of engines, models or attention: an nn.Module, op names,
functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class CompileSettings:
    mode: Literal["none", "pieces"]
    cache_dir: Path
    debug_asserts: bool = False
    """keep Inductor's size asserts (tests)"""


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


@dataclass(frozen=True)
class CompiledModel:
    """`run(*inputs)` computes what `module(*inputs)` would, with bound functions in the place of the split ops."""

    run: Callable[..., torch.Tensor]
    report: CompileReport


BoundOps = Mapping[str, Callable[..., Any]]
"""op name ("namespace::name") → function called in its place, with the op's own arguments"""
