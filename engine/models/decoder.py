"""The one decoder: a pre-norm transformer over a flat batch of tokens, built from a `DecoderSpec`.

It knows nothing of sequences, pages or caches: tokens of all sequences lie side by side in one dimension, and whoever
runs it supplies attention. Rounding points follow transformers, so that float32 picks the same tokens.

Traced once with the token dimension unbacked, so: no data-dependent control flow, and nothing about a layer but its
index (given to attention alone) and its weights may differ from the next, or layers would not share compiled pieces.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.models.layers import Embedding, Linear, RMSNorm, normalised
from engine.models.packed import HeadRotation, JoinedLinear, PackedEmbedding, PackedLinear, RowNorm
from engine.models.rope import rope_table
from engine.models.spec import DecoderSpec

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]
"""(q, k, v, out, layer index): writes attention's result into `out`.

q [tokens, num_heads, head_dim] and k, v [tokens, num_kv_heads, head_dim] may be views with a free token stride; out is
contiguous and shaped like q.
"""


def _attention_not_set(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer_index: int) -> None:
    raise RuntimeError("Decoder.set_attention must be called before the first forward")


AnyLinear = Linear | PackedLinear | JoinedLinear


class DecoderLayer(nn.Module):
    """Its linear layers may be replaced by packed ones before the first forward, and be given an operator that
    rotates heads."""

    qkv_proj: AnyLinear
    o_proj: AnyLinear
    gate_up_proj: AnyLinear
    down_proj: AnyLinear
    rotation: HeadRotation | None

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
        self.heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        self.head_dim = dim
        self.input_norm = RMSNorm(hidden, spec.norm_eps, dtype, device)
        self.qkv_proj = Linear(hidden, sum(self.heads) * dim, spec.qkv_bias, dtype, device)
        self.q_norm = RMSNorm(dim, spec.norm_eps, dtype, device) if spec.qk_norm else None
        self.k_norm = RMSNorm(dim, spec.norm_eps, dtype, device) if spec.qk_norm else None
        self.o_proj = Linear(spec.num_heads * dim, hidden, spec.o_bias, dtype, device)
        self.post_attention_norm = RMSNorm(hidden, spec.norm_eps, dtype, device)
        self.gate_up_proj = Linear(hidden, 2 * inner, spec.mlp_bias, dtype, device, gated=True)
        self.down_proj = Linear(inner, hidden, spec.mlp_bias, dtype, device)
        self.rotation = None

    def forward(self, hidden: torch.Tensor, rope: torch.Tensor, attend: Attend, layer_index: int) -> torch.Tensor:
        """hidden [tokens, hidden_size]; rope [tokens, rotary_dim], a row of the rope table for each token."""
        qkv = self.qkv_proj(hidden, self.input_norm)
        if self.rotation is not None:
            rotated = self.rotation(qkv, rope, self.q_norm, self.k_norm).unflatten(-1, (-1, self.head_dim))
            q, k, v = torch.split(rotated, self.heads, dim=1)
        else:
            q, k, v = self._rotated(qkv.unflatten(-1, (-1, self.head_dim)), rope)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        attend(q, k, v, out, layer_index)
        hidden = self.o_proj(out.flatten(1), residual=hidden)
        updated: torch.Tensor = self.down_proj(self.gate_up_proj(hidden, self.post_attention_norm), residual=hidden)
        return updated

    def _rotated(self, qkv: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qk, v = torch.split(qkv, [self.heads[0] + self.heads[1], self.heads[2]], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            # q and k at once, head by head: as two norms, they are two more kernels of a GPU's step
            pairs = zip((self.q_norm, self.k_norm), self.heads, strict=False)
            weights = torch.cat([norm.weight.expand(heads, -1) for norm, heads in pairs])
            qk = weights * normalised(qk, self.q_norm.eps)
        q, k = torch.split(_rotate(qk, rope), self.heads[:2], dim=1)
        return q, k, v


class Decoder(nn.Module):
    """Weights are uninitialised until `engine.weights.loader.load_weights` fills them; nothing requires gradients."""

    attend: Attend
    rope: torch.Tensor
    embed_tokens: Embedding | PackedEmbedding
    lm_head: Linear | PackedLinear
    row_norm: RowNorm | None

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_position: int | None = None,
    ) -> None:
        """`max_position`: positions that the rope table covers (the engine's max_model_len); None: the spec's."""
        super().__init__()
        device = torch.device(device)
        self.spec = spec
        self.dtype = dtype
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(spec, dtype, device) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, dtype, device)
        self.row_norm = None
        self.lm_head = Linear(
            spec.hidden_size, spec.vocab_size, False, dtype, torch.device("meta") if spec.tie_embeddings else device
        )
        if spec.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        table = rope_table(spec.rope, max_position or spec.max_position).to(device)
        self.register_buffer("rope", table, persistent=False)
        self.set_attention(_attention_not_set)

    def set_attention(self, attend: Attend) -> None:
        """Bind what computes attention: an operator while tracing, a function of the runner when eager."""
        # Past nn.Module's own __setattr__, which would make a module given here a part of this one.
        object.__setattr__(self, "attend", attend)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [tokens], int64 [tokens] → [tokens, hidden_size] in the model's dtype, after the final norm."""
        hidden = self.embed_tokens(input_ids)
        rope = self.rope[positions].to(self.dtype)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, rope, self.attend, index)
        final: torch.Tensor = self.norm(hidden) if self.row_norm is None else self.row_norm(hidden, self.norm)
        return final

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] → float32 [rows, vocab_size], rounded to the model's dtype first (as transformers)."""
        logits: torch.Tensor = self.lm_head(hidden)
        cap = self.spec.logit_cap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.float()


def _rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + rotary_dim / 2) of each head. x [tokens, heads, rotary_dim], rope [tokens, rotary_dim]."""
    cos, sin = rope[:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
