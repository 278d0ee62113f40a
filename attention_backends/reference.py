"""The paper's equation, written down once: slow, obvious, on any device. Every other backend is tested against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer, Capabilities, Latent

FP8_MAX = 448.0
QUERY_CHUNK = 256  # bounds the score matrix: 256 queries x context, not context x context


class ReferenceBackend(AttentionBackend):
    """softmax(scale * q k^T + mask) v per sequence (Kwon et al. 2023, equation 2-4), computed in float64."""

    name = "reference"
    speed_rank = 100

    only_by_name = frozenset({"cuda"})

    @classmethod
    def capabilities(cls) -> Capabilities:
        return Capabilities(
            devices=frozenset({"cpu", "cuda", "xpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64}),
            kv_dtypes=frozenset({torch.float8_e4m3fn}),
            window=True,
            soft_cap=True,
            sinks=True,
            chunk=True,
            latent=True,
            context_parts=True,
        )

    def kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """[num_blocks, 2 (k, v), block_size, num_kv_heads, head_dim]"""
        return (num_blocks, 2, block_size, num_kv_heads, head_dim)

    def latent_cache_shape(self, num_blocks: int, block_size: int, row_size: int) -> tuple[int, ...]:
        """[num_blocks, 1 (rows), block_size, 1, row_size]"""
        return (num_blocks, 1, block_size, 1, row_size)

    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

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
        assert isinstance(metadata, AttentionBatch)
        num_tokens, part = metadata.num_tokens, metadata.context
        slots = metadata.slot_mapping[:num_tokens]
        if layer.shares is None:
            self.write_kv(k[:num_tokens], v[:num_tokens], kv_cache, slots, layer.k_scale, layer.v_scale)
        # An oracle may read lengths back from the device; a backend that serves may not.
        starts = metadata.query_start_loc[: metadata.num_seqs + 1].tolist()
        lengths = metadata.seq_lens[: metadata.num_seqs].tolist()
        for seq, length in enumerate(lengths):
            begin, end = starts[seq], starts[seq + 1]
            if length == 0:
                out[begin:end] = 0
                continue
            for first in range(begin, end, QUERY_CHUNK):
                last = min(first + QUERY_CHUNK, end)
                positions = range(length - (end - first), length - (end - last))
                oldest = 0 if layer.window is None else max(0, positions[0] - layer.window + 1)
                if layer.chunk is not None:
                    oldest = positions[0] // layer.chunk * layer.chunk
                first_key, end_key = part.before(oldest), part.before(positions[-1] + 1)
                keys, values = _gather(kv_cache, metadata.block_tables[seq], first_key, end_key)
                if layer.latent is not None:
                    keys, values = _made(keys[:, 0], layer.latent, layer.num_heads)
                if kv_cache.dtype == torch.float8_e4m3fn:
                    keys, values = keys * layer.k_scale, values * layer.v_scale
                key_at = torch.arange(first_key, end_key, device=q.device) * part.size + part.rank
                found, sums = _attend(q[first:last], keys, values, positions[0], key_at, layer)
                if part.size > 1:
                    found = torch.cat((found, sums[..., None]), dim=-1)
                out[first:last] = found.to(out.dtype)

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        real = slot_mapping >= 0
        slots, block_size = slot_mapping[real], kv_cache.shape[2]
        blocks, offsets = slots // block_size, slots % block_size
        for half, (tensor, scale) in enumerate(((k, k_scale), (v, v_scale))[: kv_cache.shape[1]]):
            values = tensor[: slot_mapping.shape[0]][real]
            if kv_cache.dtype == torch.float8_e4m3fn:
                values = (values.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(kv_cache.dtype)
                kv_cache.view(torch.uint8)[blocks, half, offsets] = values.view(torch.uint8)  # no fp8 index_put
            else:
                kv_cache[blocks, half, offsets] = values

    def copy_blocks(self, kv_caches: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        for cache in kv_caches:
            for source, destination in pairs:
                cache[destination].copy_(cache[source])


def _gather(
    kv_cache: torch.Tensor, block_table: torch.Tensor, oldest: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, values [end - oldest, num_kv_heads, head_dim] of positions oldest .. end; older blocks are not read. Of
    latents both are rows."""
    block_size = kv_cache.shape[2]
    first_block = oldest // block_size
    blocks = block_table[first_block : -(-end // block_size)].long()
    if kv_cache.dtype == torch.float8_e4m3fn:
        pages = kv_cache.view(torch.uint8)[blocks].view(kv_cache.dtype).double()
    else:
        pages = kv_cache[blocks].double()
    tokens = slice(oldest - first_block * block_size, end - first_block * block_size)
    return pages[:, 0].flatten(0, 1)[tokens], pages[:, -1].flatten(0, 1)[tokens]


def _made(rows: torch.Tensor, latent: Latent, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [tokens, row size] → keys and values of all heads [tokens, heads, dim]."""
    of_keys, of_values = (part.double() for part in latent.heads(num_heads))
    latents, common = rows[:, : latent.rank], rows[:, latent.rank :]
    keys = torch.einsum("tr,hdr->thd", latents, of_keys)
    shared = common[:, None].expand(-1, num_heads, -1)
    return torch.cat((keys, shared), dim=-1), torch.einsum("tr,hdr->thd", latents, of_values)


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    key_at: torch.Tensor,
    layer: AttentionLayer,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [queries, num_heads, head_dim] at positions position, position + 1, ...; keys are at those of `key_at`. What is
    found, and the logarithms of sums [queries, num_heads]."""
    num_queries, num_heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.double().reshape(num_queries, kv_heads, num_heads // kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    query_at = torch.arange(position, position + num_queries, device=q.device)[:, None]
    key_at = key_at[None, :]
    hidden = key_at > query_at
    if layer.window is not None:
        hidden |= key_at <= query_at - layer.window
    if layer.chunk is not None:
        hidden |= key_at < query_at // layer.chunk * layer.chunk
    scores = scores.masked_fill(hidden, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.to(scores).view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    sums = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1).masked_fill(sums[..., None] == -torch.inf, 0.0)[..., : keys.shape[0]]
    found = torch.einsum("hgqk,khd->qhgd", weights, values).reshape(num_queries, num_heads, values.shape[-1])
    return found, sums.permute(2, 0, 1).reshape(num_queries, num_heads)
