"""Decode context parallelism: each rank has the keys and values of some positions, of all heads.

What a rank makes of q, k and v is as with divided heads. Then ranks exchange them, so that each has every head of a
step's tokens; each keeps the positions that are its own, attends to these with all heads, and tells the others what it
found. They merge it in the order of ranks and go on with their own heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attention_backends.context import ContextPart
from attention_backends.interface import (
    AttentionBackend,
    AttentionBatch,
    AttentionLayer,
    ContextHeads,
    NativeLayer,
)
from engine.models.facts import HeadsSpec, ModelFacts
from engine.models.sharding import Shard, Span, keys_of, queries_of, sharers_of
from engine.parallel.group import ContextRanks
from engine.parallel.native_group import NativeGroup


@dataclass(frozen=True)
class SharedHeads:
    """One layer's heads, as ranks have them; in the order of ranks they are the layer's."""

    head_dim: int
    queries: tuple[Span, ...]
    keys: tuple[int, ...]
    """that each rank gives, the first of its own: where several have the same, the first of them does"""


class ContextGroup:
    """The ranks that divide positions among them, as one of them sees it."""

    def __init__(self, whole: ModelFacts, group: ContextRanks) -> None:
        self.part = ContextPart(group.size, group.rank)
        self.whole = whole
        self._group = group
        self._heads = [_shared_heads(layer, group.size) for layer in whole.layers]

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
        heads = self._heads[index]
        q, k, v = self._gathered(qkv, heads, layer)
        found = torch.empty((*q.shape[:2], q.size(2) + 1), dtype=torch.float32, device=q.device)
        backend.forward(q, k, v, found, cache, replace(layer, sinks=None), metadata)
        columns = [span.count * found.size(2) for span in heads.queries]
        dealt = self._group.all_to_all(found.flatten(1), columns, self._group.name)
        backend.merge_parts(dealt.view(len(q), self.part.size, -1, found.size(2)), out, layer.sinks)

    def native_layer(
        self, backend: AttentionBackend, layer: AttentionLayer, index: int, cache: torch.Tensor, dtype: torch.dtype
    ) -> NativeLayer | None:
        """`attend` for a caller in native code; None: there is none."""
        if not isinstance(self._group, NativeGroup):
            return None
        heads = self._heads[index]
        queries = tuple(span.count for span in heads.queries)
        exchange = ContextHeads(self._group.native_exchange, self.part.rank, queries, heads.keys)
        return backend.native_layer(layer, cache, dtype, exchange)

    def _gathered(
        self, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], heads: SharedHeads, layer: AttentionLayer
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of all heads. Where k and v are not looked at, they are q's first."""
        q, *kv = qkv if layer.shares is None else qkv[:1]
        given = heads.keys[self.part.rank]
        rows = torch.cat((q, *(x[:, :given] for x in kv)), dim=1).flatten(1)
        counts = [[span.count, *[keys] * len(kv)] for span, keys in zip(heads.queries, heads.keys, strict=True)]
        columns = [sum(each) * heads.head_dim for each in counts]
        beside = self._group.all_gather(rows, columns, self._group.name).view(len(rows), -1, heads.head_dim)
        cut = torch.split(beside, [count for each in counts for count in each], dim=1)
        of_kind = [torch.cat(cut[kind :: 1 + len(kv)], dim=1) for kind in range(1 + len(kv))]
        q, k, v = of_kind if kv else of_kind * 3
        return q, k, v


def _shared_heads(layer: HeadsSpec, ranks: int) -> SharedHeads:
    shards = [Shard(rank, ranks) for rank in range(ranks)]
    gives = [sharers_of(layer, shard)[0] == shard.rank for shard in shards]
    return SharedHeads(
        layer.head_dim,
        tuple(queries_of(layer, shard) for shard in shards),
        tuple(keys_of(layer, shard).count * own for shard, own in zip(shards, gives, strict=True)),
    )
