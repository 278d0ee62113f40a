"""Layers that keep matrices as states, natively: one call for a layer and step, on the pages where states lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.cpu_kernels.linear import LinearOps

MOST_TAPS, MOST_KEYS = 16, 512
"""of a convolution; of a head"""
AUTO = 0


class StatePlace(NamedTuple):
    """Where a layer's states are."""

    caches: list[torch.Tensor]
    """uint8 [blocks, bytes] each"""
    blocks: torch.Tensor
    """int64 [blocks, pages]: of each bundle, by its first block"""
    start: int
    """at which byte of a bundle the layer's state begins"""


class MixShape(NamedTuple):
    """As `csrc/states.h` has it."""

    kind: int
    """0: with the delta rule; 1: Mamba 2; 2: a convolution between two gates, and no recurrence; 3: Kimi's delta
    attention"""
    heads: int
    groups: int
    keys: int
    values: int
    taps: int
    norm_eps: float
    lowest: float = 0.0
    highest: float = float("inf")


class NativeMix:
    """The operator with one layer's weights. Bits of a token depend on its own past alone."""

    def __init__(
        self,
        ops: LinearOps,
        shape: MixShape,
        conv_weight: torch.Tensor,
        conv_bias: torch.Tensor | None,
        log_decay: torch.Tensor | None = None,
        decay_bias: torch.Tensor | None = None,
        passed_on: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        isa: int = AUTO,
    ) -> None:
        """conv_weight [channels, 1, taps], conv_bias [channels]; log_decay, decay_bias, passed_on [heads]; norm: of a
        head with the delta rule, else of all. Of Kimi's decay_bias [heads * keys]."""
        self._op, self._isa = ops.mix_states, isa
        self._shape, self._numbers = list(shape[:6]), shape[6:]
        self._weights = (
            conv_weight[:, 0].float().T.contiguous(),
            _floats(conv_bias),
            None if log_decay is None else -log_decay.float().exp(),
            _floats(decay_bias),
            _floats(passed_on),
            _floats(norm),
        )

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor, place: StatePlace, sequences: torch.Tensor, writes: torch.Tensor
    ) -> None:
        """x [tokens, outputs of the layer's first matrix], out [tokens, inputs of its last one], bfloat16 or float32.
        sequences int64 [n, 4]: first token, end, first block of the bundle that is read or -1, first write; writes
        int64 [m, 2]: behind which token, and the first block of the bundle. RuntimeError where anything does not fit.
        """
        self._op(
            x,
            out,
            self._shape,
            *self._numbers,
            *self._weights,
            place.caches,
            place.blocks,
            place.start,
            sequences,
            writes,
            self._isa,
        )


def _floats(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()


def fits(taps: int, keys: int, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether there is a kernel."""
    return taps <= MOST_TAPS and keys <= MOST_KEYS and {*dtypes} <= {torch.bfloat16, torch.float32}
