"""The marker op of layers that keep states, as `attention_backends.op` is of those that attend."""

from __future__ import annotations

import torch

STATE_OP = "pageloom::mix_states"


@torch.library.custom_op(STATE_OP, mutates_args=("out",))
def mix_states(x: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    """x [tokens, outputs of the layer's first matrix]; out [tokens, inputs of its last one]; layer: among those that
    keep states."""
    raise RuntimeError(f"{STATE_OP} is a marker; it must be bound to what keeps states before it runs")


@mix_states.register_fake
def _(x: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    return None
