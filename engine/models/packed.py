"""Linear layers and embeddings whose weights are packed for the CPU kernels (`engine.cpu_kernels`), one copy in memory.

A checkpoint's loader puts them where the decoder had dense ones. Their weights are plain buffers, so a compiled piece
takes them as inputs, like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from engine.models.layers import LayerNorm, Norm, RMSNorm, finished
from engine.models.mixers import QkNorm
from engine.models.spec import Activation

if TYPE_CHECKING:
    from engine.cpu_kernels.formats import Format
    from engine.cpu_kernels.linear import LinearOps
    from engine.models.device_packed import StoredLinear


FUSED_GATES: dict[Activation, int] = {"silu": 1, "gelu_tanh": 2}
"""activations that the operator has for gated layers; numbers as in `csrc/linear.h`"""


class PackedLinear(nn.Module):
    """See `engine.models.layers.Linear`; bfloat16 activations.

    `weight`: uint8 [panels, panel_bytes], packed as `format` from a matrix [n, k]. `gate`: the activation of a gated
    layer, whose rows are interleaved by `interleave_gate_up`, `bias` too. `wide`: returns float32 that holds the
    rounded values (logits).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        ops: LinearOps,
        weight: torch.Tensor,
        n: int,
        k: int,
        format: Format,
        *,
        bias: torch.Tensor | None = None,
        gate: Activation | None = None,
        wide: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.n, self.k, self.format = n, k, int(format)
        self.gate, self.wide = 0 if gate is None else FUSED_GATES[gate], wide
        self.op = ops.packed_linear

    def forward(self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, k]: `norm` is applied to it first; `residual` [tokens, outputs] is added to the result."""
        if isinstance(norm, LayerNorm):
            x, norm = norm(x), None
        y: torch.Tensor = self.op(
            x,
            self.weight,
            self.n,
            self.format,
            self.bias,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            residual,
            self.gate,
            self.wide,
            0,
        )
        return y


class ReorderedLinear(PackedLinear):
    """Whose columns are in another order than its inputs, which are brought into theirs first: `order`, int32 [k], is
    which input each column is for."""

    order: torch.Tensor

    def reordered(self, order: torch.Tensor) -> Self:
        self.register_buffer("order", order)
        return self

    def forward(self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        x = x if norm is None else norm(x)
        return super().forward(x.index_select(1, self.order), None, residual)


class JoinedLinear(nn.Module):
    """Layers over the same input whose outputs lie side by side: parts of one matrix that are encoded differently."""

    def __init__(self, parts: Sequence[PackedLinear | StoredLinear]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        joined = torch.cat([part(x, norm) for part in self.parts], dim=-1)
        return joined if residual is None else residual + joined


class ActivatedLinear(nn.Module):
    """A packed layer with an activation that its operator does not have: left to the compiler."""

    def __init__(self, linear: PackedLinear | JoinedLinear, activation: Activation, gated: bool) -> None:
        """`gated`: the outputs of `linear` are all gates, then all ups."""
        super().__init__()
        self.linear = linear
        self.activation: Activation = activation
        self.gated = gated

    def forward(self, x: torch.Tensor, norm: Norm | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
        return finished(self.linear(x, norm), self.activation, self.gated, residual)


class HeadRotation(nn.Module):
    """RoPE on rows of heads, and the norms of q and k where the model has some, in one operator (two, where the norms
    are of turned heads, or of rows of q and k, which then have as many heads)."""

    def __init__(
        self, ops: LinearOps, q_heads: int, k_heads: int, head_dim: int, qk_norm: QkNorm | None = "head"
    ) -> None:
        super().__init__()
        self.q_heads, self.k_heads, self.head_dim, self.qk_norm = q_heads, k_heads, head_dim, qk_norm
        self.op = ops.rotate_heads

    def forward(
        self, qkv: torch.Tensor, rope: torch.Tensor | None, q_norm: RMSNorm | None, k_norm: RMSNorm | None
    ) -> torch.Tensor:
        """qkv [tokens, n], bfloat16: its first heads rotated, the others as they are. rope [tokens, rotary_dim]."""
        heads = (self.q_heads, self.k_heads, self.head_dim)
        if self.qk_norm == "row":
            normed = self._call(qkv, None, q_norm, k_norm, (1, 1, self.q_heads * self.head_dim))
            return self._call(normed, rope, None, None, heads)
        if self.qk_norm == "turned_head":
            return self._call(self._call(qkv, rope, None, None, heads), None, q_norm, k_norm, heads)
        return self._call(qkv, rope, q_norm, k_norm, heads)

    def _call(
        self,
        qkv: torch.Tensor,
        rope: torch.Tensor | None,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
        heads: tuple[int, int, int],
    ) -> torch.Tensor:
        rotated: torch.Tensor = self.op(
            qkv,
            rope,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            *heads,
            None,
        )
        return rotated


class RowNorm(nn.Module):
    """RMSNorm of whole rows by the same operator, and a residual added to it."""

    def __init__(self, ops: LinearOps) -> None:
        super().__init__()
        self.op = ops.rotate_heads

    def forward(self, x: torch.Tensor, norm: RMSNorm, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x, residual [tokens, hidden], bfloat16."""
        rows: torch.Tensor = self.op(x, None, norm.weight, norm.weight, norm.eps, 1, 0, x.size(1), residual)
        return rows


class PackedEmbedding(nn.Module):
    """Looks tokens up in a packed matrix [vocabulary, hidden], which the unembedding may share."""

    weight: torch.Tensor

    def __init__(self, ops: LinearOps, weight: torch.Tensor, n: int, k: int, format: Format) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.n, self.k, self.format = n, k, int(format)
        self.op = ops.packed_embedding

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] → bfloat16 [tokens, k]."""
        rows: torch.Tensor = self.op(input_ids, self.weight, self.n, self.k, self.format)
        return rows
