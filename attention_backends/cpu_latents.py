"""Latent attention on CPUs: two ways to the same result, and each sequence of a step goes the one that multiplies less.

Queries take the keys' matrix in, and what they find goes through the values' matrix: then a row of the cache is key and
value of all heads (DeepSeek-V2, 2024, section 2.1.2). Or rows are made keys and values first, in pages that live as
long as the call: heads are then a third as wide, which pays where many queries meet the same rows (prompts).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attention_backends.interface import AttentionLayer, Latent

if TYPE_CHECKING:
    from attention_backends.cpu import CpuMetadata

MADE_VALUES = 1 << 23
"""numbers of keys that are made at once, and of values as many"""
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class LatentKernels:
    """What a backend has, by its own names."""

    attend: Callable[..., None]
    write_kv: Callable[..., None]
    head_product: Callable[..., None]
    """(x, weight, out, transposed)"""
    kv_cache_shape: Callable[[int, int, int, int], tuple[int, ...]]
    new_step: Callable[[], int]
    absorbs_all: bool
    """one way for all, whose results are the same bits however a sequence is cut into steps"""


@dataclass(frozen=True, slots=True)
class LatentSizes:
    rank: int
    common: int
    made: int
    value: int

    @classmethod
    def of(cls, layer: AttentionLayer, latent: Latent) -> LatentSizes:
        made = latent.weight.size(0) // layer.num_heads - latent.value_dim
        return cls(latent.rank, layer.head_dim - latent.rank, made, latent.value_dim)

    @property
    def head_dim(self) -> int:
        """Of heads whose keys and values are made: as wide as the wider ones, for pages have one width."""
        return (max(self.made + self.common, self.value) + 7) // 8 * 8

    def is_less_to_make(self, queries: int, length: int) -> bool:
        """Multiplications of a head, for one sequence."""
        pairs = queries * length - queries * (queries - 1) // 2
        of_row = self.rank * (self.made + self.value)
        return pairs * 2 * self.head_dim + length * of_row < pairs * (2 * self.rank + self.common) + queries * of_row


@dataclass(frozen=True, slots=True)
class Absorbed:
    """Sequences whose queries take the keys' matrix in."""

    metadata: CpuMetadata
    tokens: torch.Tensor
    """int64 [queries]: which of the step's"""


@dataclass(frozen=True, slots=True)
class Made:
    """Sequences whose rows are made keys and values."""

    metadata: CpuMetadata
    """of the pages that these are in"""
    tokens: torch.Tensor
    """int64 [queries]: which of the step's"""
    read: torch.Tensor
    """int64 [rows]: slots of the cache"""
    written: torch.Tensor
    """int64 [rows]: slots of those pages"""
    num_blocks: int


Ways = tuple[Absorbed | None, Made]


def split(metadata: CpuMetadata, block_size: int, sizes: LatentSizes, new_step: Callable[[], int]) -> Ways | None:
    """A step's sequences by their ways; None: the queries of all take the keys' matrix in."""
    starts = metadata.query_start_loc[: metadata.num_seqs + 1].tolist()
    lengths = metadata.seq_lens[: metadata.num_seqs].tolist()
    made, rest, rows = list[int](), list[int](), 0
    for seq, length in enumerate(lengths):
        fits = (rows + length) * sizes.head_dim <= MADE_VALUES
        if fits and sizes.is_less_to_make(starts[seq + 1] - starts[seq], length):
            made.append(seq)
            rows += length
        else:
            rest.append(seq)
    if not made:
        return None
    absorbed = Absorbed(*_part(metadata, rest, starts, new_step())) if rest else None
    part, tokens = _part(metadata, made, starts, new_step())
    read, written, first, tables = list[torch.Tensor](), list[torch.Tensor](), 0, list[torch.Tensor]()
    for seq in made:
        at, blocks = torch.arange(lengths[seq]), -(-lengths[seq] // _BLOCK)
        table = metadata.block_tables[seq, : -(-lengths[seq] // block_size)].long()
        read.append(table[at // block_size] * block_size + at % block_size)
        written.append(first * _BLOCK + at)
        tables.append(torch.arange(first, first + blocks, dtype=torch.int32))
        first += blocks
    own = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
    part = replace(part, block_tables=own)
    return absorbed, Made(part, tokens, torch.cat(read), torch.cat(written), first)


def _part(
    metadata: CpuMetadata, seqs: Sequence[int], starts: Sequence[int], step: int
) -> tuple[CpuMetadata, torch.Tensor]:
    tokens = torch.cat([torch.arange(starts[seq], starts[seq + 1]) for seq in seqs])
    counts = torch.tensor([0, *(starts[seq + 1] - starts[seq] for seq in seqs)])
    index = torch.tensor(seqs)
    part = replace(
        metadata,
        query_start_loc=counts.cumsum(0).to(torch.int32),
        seq_lens=metadata.seq_lens[index],
        block_tables=metadata.block_tables[index],
        num_seqs=len(seqs),
        num_tokens=len(tokens),
        step=step,
        latent_ways={},
    )
    return part, tokens


def attend_to_latents(
    kernels: LatentKernels,
    q: torch.Tensor,
    rows: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: AttentionLayer,
    latent: Latent,
    metadata: CpuMetadata,
) -> None:
    """`AttentionBackend.forward` of latents; rows [tokens, 1, row size]."""
    real = metadata.num_tokens
    kernels.write_kv(rows[:real], rows[:real], kv_cache, metadata.slot_mapping[:real])
    sizes = LatentSizes.of(layer, latent)
    if sizes not in metadata.latent_ways:
        metadata.latent_ways[sizes] = split(metadata, kv_cache.size(3), sizes, kernels.new_step)
    one_way = kernels.absorbs_all or layer.signed_window  # blocks before a window are another's
    ways = None if one_way else metadata.latent_ways[sizes]
    layer = replace(layer, latent=None, shares=0)  # all is written
    if ways is None:
        _absorb(kernels, q[:real], out[:real], kv_cache, layer, latent, metadata)
        return
    absorbed, made = ways
    if absorbed is not None:
        found = out[absorbed.tokens]
        _absorb(kernels, q[absorbed.tokens], found, kv_cache, layer, latent, absorbed.metadata)
        out[absorbed.tokens] = found
    _make(kernels, q, out, kv_cache, layer, latent, made)


def _absorb(
    kernels: LatentKernels,
    q: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: AttentionLayer,
    latent: Latent,
    metadata: CpuMetadata,
) -> None:
    rank, common = latent.rank, layer.head_dim - latent.rank
    of_keys, of_values = latent.heads(layer.num_heads)
    absorbed = q.new_empty(len(q), layer.num_heads, layer.head_dim)
    kernels.head_product(q[..., :-common], of_keys, absorbed[..., :rank], False)
    absorbed[..., rank:] = q[..., -common:]
    found = torch.empty_like(absorbed)
    kernels.attend(absorbed, absorbed, absorbed, found, kv_cache, layer, metadata)
    kernels.head_product(found[..., :rank], of_values, out, True)


def _make(
    kernels: LatentKernels,
    q: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: AttentionLayer,
    latent: Latent,
    part: Made,
) -> None:
    sizes, count = LatentSizes.of(layer, latent), len(part.read)
    rows, dim, own = _rows(kv_cache, part.read), sizes.head_dim, sizes.made + sizes.common
    of_keys, of_values = latent.heads(layer.num_heads)
    at_once = max(1, MADE_VALUES // (count * dim))
    for first in range(0, layer.num_heads, at_once):
        heads = slice(first, min(first + at_once, layer.num_heads))
        many = heads.stop - first
        latents = rows[:, None, : sizes.rank].expand(-1, many, -1)
        keys, values = q.new_empty(2, count, many, dim)
        kernels.head_product(latents, of_keys[heads], keys[..., : sizes.made], True)
        keys[..., sizes.made : own] = rows[:, None, sizes.rank : layer.head_dim]
        kernels.head_product(latents, of_values[heads], values[..., : sizes.value], True)
        keys[..., own:], values[..., sizes.value :] = 0, 0
        pages = q.new_empty(kernels.kv_cache_shape(part.num_blocks, _BLOCK, many, dim))
        kernels.write_kv(keys, values, pages, part.written)
        mine = torch.nn.functional.pad(q[part.tokens, heads], (0, dim - own))
        found = torch.empty_like(mine)
        alike = replace(layer, num_heads=many, num_kv_heads=many, head_dim=dim)
        kernels.attend(mine, mine, mine, found, pages, alike, part.metadata)
        out[part.tokens, heads] = found[..., : sizes.value]


def _rows(kv_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[slots, row size], as the kernels order a block's inside: 16-bit elements of two tokens are side by side."""
    block_size, row = kv_cache.shape[3:]
    block, offset = slots // block_size, slots % block_size
    if kv_cache.element_size() == 4:
        return kv_cache[block, 0, 0, offset]
    pairs = kv_cache.flatten(1).unflatten(1, (block_size // 2, row, 2))  # type: ignore[no-untyped-call]
    found: torch.Tensor = pairs[block, offset // 2, :, offset % 2]
    return found
