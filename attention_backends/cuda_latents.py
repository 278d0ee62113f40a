"""Latent attention on CUDA devices: queries take the keys' matrix in, and what they find goes through the values'
(DeepSeek-V2, 2024, section 2.1.2); between the two are the kernels of `latent_kernels`, which Triton compiles."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attention_backends.interface import AttentionBatch, AttentionLayer, Latent

MOST_ROWS = 1 << 16
"""(query, head) pairs whose queries have the keys' matrix in them at one time: of a long prompt, some heads' only"""
_PROGRAMS_PER_MULTIPROCESSOR = 2
_ROWS_PER_PROGRAM = 32


def workspace_bytes(layers: Sequence[AttentionLayer], multiprocessors: int) -> int:
    """Upper estimate for the steps of such layers: queries and what they find, before the values' matrix and after it,
    and the parts that are merged."""
    programs = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
    largest = 0
    for layer in layers:
        if layer.latent is not None:
            found = MOST_ROWS * (2 * layer.latent.rank + layer.latent.value_dim) * layer.latent.weight.element_size()
            parts = 2 * programs * _ROWS_PER_PROGRAM * (layer.latent.rank + 1) * 4
            largest = max(largest, found + parts)
    return largest


def write_rows(rows: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, count: int) -> None:
    """rows [tokens, 1, row size] of the first `count` tokens to their slots; kv_cache [blocks, block size, row size]"""
    from attention_backends.latent_kernels import device  # Triton is a GPU's alone

    device.write_rows(rows, kv_cache, slots, count)


def attend(
    q: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: AttentionLayer,
    latent: Latent,
    batch: AttentionBatch,
    multiprocessors: int,
) -> None:
    """q [tokens, heads, a key's size] → out [tokens, heads, value_dim]. Never waits for the device, may be captured.
    Raises RuntimeError for what the kernels do not have."""
    if layer.soft_cap is not None or layer.sinks is not None or layer.chunk is not None:
        raise RuntimeError("CudaBackend: of latents it has no soft cap, no sinks and no chunks")
    from attention_backends.latent_kernels import device  # Triton is a GPU's alone

    tokens, rank = batch.num_tokens, latent.rank
    if tokens == 0:
        return
    made = q.size(2) - (layer.head_dim - rank)
    of_keys, of_values = latent.heads(layer.num_heads)
    at_once = max(1, MOST_ROWS // tokens)
    for first in range(0, layer.num_heads, at_once):
        heads = slice(first, min(first + at_once, layer.num_heads))
        mine = q[:tokens, heads]
        absorbed = torch.bmm(mine[..., :made].transpose(0, 1), of_keys[heads])
        found = device.attend(
            absorbed,
            mine[..., made:],
            kv_cache,
            batch,
            layer.scale,
            layer.window or 0,
            _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors,
        )
        out[:tokens, heads].copy_(torch.bmm(found, of_values[heads].transpose(1, 2)).transpose(0, 1))
