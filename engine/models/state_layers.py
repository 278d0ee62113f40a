"""What a layer that keeps a state is given in a step: where its sequences' tokens are, and their states as bytes."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from engine.cpu_kernels.states import StatePlace
from engine.models.state_kernels import StateKernels


class Segment(NamedTuple):
    """Tokens of one sequence, one after the other, behind which its state is kept, or which are its last ones."""

    sequence: int
    begin: int
    end: int
    """among the step's tokens"""
    write: int
    """among the step's writes; -1: it is not kept"""


class StateStep(NamedTuple):
    """Index arrays of one step, which all layers share."""

    fresh: torch.Tensor
    """bool [sequences, 1]: has no state yet"""
    read: torch.Tensor
    """int64 [sequences]: the first block of the bundle that each reads; 0 where it is fresh"""
    past: torch.Tensor
    """int64 [sequences, taps - 1]: where the inputs before a sequence's own go, of all inputs one after the other"""
    own: torch.Tensor
    """int64 [tokens]: where a token's goes"""
    written: torch.Tensor
    """int64 [writes]: first blocks of bundles"""
    last: torch.Tensor
    """int64 [writes, taps - 1]: of all inputs, those that they are to hold"""
    single: torch.Tensor
    """int64 [3, n]: of sequences of one token, which is kept: the sequence, the token and the write"""
    segments: list[Segment]
    """of all others"""
    sequences: torch.Tensor
    writes: torch.Tensor
    """the same for `NativeMix`"""
    kernels: StateKernels | None
    """of a GPU"""


class LayerStates(Protocol):
    """Of one layer, in one step."""

    step: StateStep
    place: StatePlace | None
    """None: nothing but `read` and `write`"""

    def read(self) -> torch.Tensor:
        """uint8 [sequences, bytes]; zeros where there is none yet."""
        ...

    def write(self, states: torch.Tensor) -> None:
        """uint8 [writes, bytes]."""
        ...


def convolved(
    given: torch.Tensor, state: torch.Tensor, step: StateStep, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over each channel's last `taps` inputs, its own the last: float32 [tokens, channels]; and the inputs that
    are to be kept: [writes, taps - 1, channels].

    given [tokens, channels]; state [sequences, taps - 1, channels]; weight [channels, 1, taps].
    """
    taps = weight.size(2)
    inputs = given.new_empty(step.past.numel() + len(given), given.size(1))
    inputs[step.own] = given
    inputs[step.past.flatten()] = state.flatten(0, 1)
    if step.kernels is not None:
        return step.kernels.convolve(inputs, step.own, weight, bias), inputs[step.last]
    sums = torch.zeros_like(given, dtype=torch.float32)
    for tap in range(taps):
        sums += inputs[step.own - (taps - 1 - tap)].float() * weight[:, 0, tap].float()
    return (sums if bias is None else sums + bias.float()), inputs[step.last]
