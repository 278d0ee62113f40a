"""Decode context parallelism: each rank has the keys and values of some positions, of all heads.

What a rank makes of q, k and v is as with divided heads. Then ranks exchange them, so that each has every head of a
step's tokens; each keeps the positions that are its own, attends to these with all heads, and tells the others what it
found. They merge it in the order of ranks and go on with their own heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attention_backends.context import ContextPart, merge_parts
from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer
from engine.models.facts import ModelFacts
from engine.models.sharding import Shard, Span, keys_of, queries_of
from engine.models.spec import DecoderSpec, MixerSpec
from engine.parallel.group import Group


@dataclass(frozen=True)
class SharedHeads:
    """One layer's heads, as ranks have them."""

    head_dim: int
    queries: tuple[Span, ...]
    """of each rank; all of them in order are the layer's"""
    keys: tuple[Span, ...]
    """of each rank; several may have the same"""

    @property
    def key_order(self) -> list[int]:
        """Where each of the layer's KV heads lies, the first time, in those of all ranks side by side."""
        lying = [head for span in self.keys for head in range(span.first, span.end)]
        return [lying.index(head) for head in range(self.keys[-1].end)]


class ContextGroup:
    """The ranks that divide positions among them, as one of them sees it."""

    def __init__(self, whole: DecoderSpec, group: Group) -> None:
        self.part = ContextPart(group.size, group.rank)
        self.whole: ModelFacts = whole.facts
        self._group = group
        self._heads = [_shared_heads(layer.mixer, group.size) for layer in whole.layers]

    def batch(self, batch: AttentionBatch) -> AttentionBatch:
        """Of blocks that all ranks have a part of → of this rank's parts of them."""
        slots, size = self.part.slots(batch.slot_mapping), batch.block_size // self.part.size
        return replace(batch, slot_mapping=slots, block_size=size, context=self.part)

    def attend(
        self,
        backend: AttentionBackend,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        cache: torch.Tensor,
        layer: AttentionLayer,
        index: int,
        metadata: object,
    ) -> None:
        """q, k, v and `out` [tokens, heads of this rank, head_dim], of real tokens; `layer`: the whole layer's heads,
        with this rank's sinks."""
        heads, rank = self._heads[index], self.part.rank
        q, k, v = self._gathered(qkv, heads, layer)
        found = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        backend.forward_part(q, k, v, found, lse, cache, replace(layer, sinks=None), metadata)
        own = heads.queries[rank]
        row = torch.cat((found, lse[..., None]), dim=-1).flatten(1)
        parts = self._all(row, [row.size(1)] * self.part.size).view(len(q), self.part.size, *q.shape[1:2], -1)
        parts = parts[:, :, own.first : own.end]
        out.copy_(merge_parts(parts[..., :-1], parts[..., -1], layer.sinks))

    def _gathered(
        self, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], heads: SharedHeads, layer: AttentionLayer
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of all heads. Where k and v are not looked at, they are q's first."""
        given = qkv if layer.shares is None else qkv[:1]
        times = len(given) - 1
        counts = [queries.count + times * keys.count for queries, keys in zip(heads.queries, heads.keys, strict=True)]
        rows = torch.cat(given, dim=1).flatten(1)
        gathered = self._all(rows, [count * heads.head_dim for count in counts])
        beside = gathered.view(len(rows), -1, heads.head_dim)
        ranks = torch.split(beside, counts, dim=1)
        cut = [
            torch.split(each, [queries.count, *[keys.count] * times], dim=1)
            for each, queries, keys in zip(ranks, heads.queries, heads.keys, strict=True)
        ]
        q = torch.cat([each[0] for each in cut], dim=1)
        if not times:
            return q, q, q
        k, v = (torch.cat([each[i] for each in cut], dim=1)[:, heads.key_order] for i in (1, 2))
        return q, k, v

    def _all(self, rows: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
        return self._group.all_gather(rows.contiguous(), columns, self._group.name)


def _shared_heads(mixer: MixerSpec, ranks: int) -> SharedHeads:
    shards = [Shard(rank, ranks) for rank in range(ranks)]
    return SharedHeads(
        mixer.head_dim,
        tuple(queries_of(mixer, shard) for shard in shards),
        tuple(keys_of(mixer, shard) for shard in shards),
    )
