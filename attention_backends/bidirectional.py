"""Attention of encoders: each token sees its whole prompt, which is computed in one step, and nothing is kept.

It stands where a paged backend does. Its caches have no bytes; a step's sequences are the prompts that it computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer, Capabilities


@dataclass(frozen=True)
class Prompts:
    """Of one step: runs of prompts of equal length that lie behind each other, as (first token, how many, length)."""

    runs: list[tuple[int, int, int]]
    masks: dict[tuple[int, int], torch.Tensor]
    """by (length, window), made once a step"""


class BidirectionalAttention(AttentionBackend):
    """`AttentionLayer.window` w: a query at position p sees keys in [p - w, p + w]."""

    name = "bidirectional"

    @classmethod
    def capabilities(cls) -> Capabilities:
        dtypes = frozenset({torch.float32, torch.bfloat16, torch.float16})
        return Capabilities(devices=frozenset({"cpu", "cuda"}), dtypes=dtypes, window=True)

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return num_blocks, 0

    def build_metadata(self, batch: AttentionBatch) -> Prompts:
        runs: list[tuple[int, int, int]] = []
        at = 0
        for length in batch.query_lens_host:
            if runs and runs[-1][2] == length:
                first, count, _ = runs.pop()
                runs.append((first, count + 1, length))
            elif length:
                runs.append((at, 1, length))
            at += length
        return Prompts(runs, {})

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        metadata: object,
    ) -> None:
        assert isinstance(metadata, Prompts)
        grouped = layer.num_heads != layer.num_kv_heads
        for first, count, length in metadata.runs:
            past, shape = first + count * length, (count, length, -1, layer.head_dim)
            query, key, value = (x[first:past].view(shape).transpose(1, 2) for x in (q, k, v))
            mask = _mask(metadata, length, layer.window, q.device)
            found = F.scaled_dot_product_attention(query, key, value, mask, scale=layer.scale, enable_gqa=grouped)
            out[first:past].view(shape).copy_(found.transpose(1, 2))

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """Nothing is kept."""

    def copy_blocks(self, kv_caches: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """There is nothing to copy."""


def _mask(prompts: Prompts, length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    if window is None or length <= window + 1:
        return None
    mask = prompts.masks.get((length, window))
    if mask is None:
        at = torch.arange(length, device=device)
        mask = (at[:, None] - at).abs() <= window
        prompts.masks[length, window] = mask
    return mask
