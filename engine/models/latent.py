"""Latent attention (DeepSeek-V2, 2024, section 2.1): queries, and the one row of a token that is kept in the place of
all heads' keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.models.device_packed import StoredLinear
from engine.models.layers import Linear, RMSNorm, parameter
from engine.models.mixers import LatentSpec
from engine.models.packed import JoinedLinear, PackedLinear

Rotate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class LatentHeads(nn.Module):
    """What stands between the first matrix and attention.

    `kv_b` [heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank] makes a head's key and value of a latent. It is for
    whoever supplies attention, which multiplies queries and what they find with it, or latents: so it stays in the
    model's dtype, whatever a checkpoint has it in.
    """

    q_b_proj: Linear | PackedLinear | StoredLinear | JoinedLinear | None

    def __init__(self, spec: LatentSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        facts = spec.latent
        self.heads, self.v_dim = spec.num_heads, facts.v_head_dim
        self.first = [spec.q_lora_rank or spec.q_size, facts.kv_lora_rank, facts.qk_rope_head_dim]
        self.parts = [facts.qk_nope_head_dim, facts.qk_rope_head_dim]
        self.q_a_norm = self.q_b_proj = None
        if spec.q_lora_rank is not None:
            self.q_a_norm = RMSNorm(spec.q_lora_rank, spec.norm_eps, dtype, device)
            self.q_b_proj = Linear(spec.q_lora_rank, spec.q_size, False, dtype, device)
        self.kv_a_norm = RMSNorm(facts.kv_lora_rank, spec.norm_eps, dtype, device)
        self.kv_b = parameter((spec.num_heads * facts.made_size, facts.kv_lora_rank), dtype, device)

    def forward(
        self, given: torch.Tensor, rope: torch.Tensor | None, growth: torch.Tensor | None, rotate: Rotate
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """given [tokens, outputs of the first matrix]; rope [tokens, qk_rope_head_dim], None: nothing is turned; growth
        [tokens, 1, 1], of queries. Queries [tokens, heads, qk_head_dim] and rows [tokens, 1, kv_lora_rank +
        qk_rope_head_dim]."""
        q, latent, turned = torch.split(given, self.first, dim=1)
        if self.q_b_proj is not None:
            q = self.q_b_proj(q.contiguous(), self.q_a_norm)
        heads = q.unflatten(-1, (self.heads, -1))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        key = turned[:, None]
        if rope is not None:
            passing, turning = torch.split(heads, self.parts, dim=-1)
            heads, key = torch.cat((passing, rotate(turning, rope)), dim=-1), rotate(key, rope)
        if growth is not None:
            heads = (heads * growth).to(heads.dtype)
        return heads, torch.cat((self.kv_a_norm(latent.contiguous())[:, None], key), dim=-1)
