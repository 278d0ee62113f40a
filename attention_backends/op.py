"""The marker op at which traced graphs are split. It computes nothing: whoever runs a graph binds a function to it."""

from __future__ import annotations

import torch

ATTENTION_OP = "pageloom::attention"


@torch.library.custom_op(ATTENTION_OP, mutates_args=("out",))
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    """q, out [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim]; layer: index of the layer's KV cache."""
    raise RuntimeError("pageloom::attention is a marker; it must be bound to a backend before it runs")


@attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    return None
