"""How a step is cut for the CUDA kernels: which sequences decode and which prefill, how many chunks a decode may have,
and where the scratch memory lies.

Pure host arithmetic on what the step's lists say; what only the device knows, `schedule_decode` decides there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention_backends.cuda_launchers import MAX_DECODE_ROWS, arrival_words, partial_floats, schedule_words
from attention_backends.interface import AttentionBatch, AttentionLayer

BLOCKS_PER_MULTIPROCESSOR = 2
"""thread blocks of the decode kernel that are at work on one multiprocessor at a time: shared memory lets in two"""
SHORT_MIN_CONTEXT = 512
"""keys below which splitting a short query over the machine gains nothing over one prefill tile"""
MAX_SHORT_PARTIALS = 1 << 24
"""floats (64 MiB): short queries that would need more scratch are prefilled"""


def max_items(num_seqs: int, num_kv_heads: int, multiprocessors: int) -> int:
    """Chunks that a decode of `num_seqs` sequences may be cut into: an item is `num_kv_heads` thread blocks.

    Few sequences: as many items as fill the machine once, since one block more would be a second wave. Many: each its
    own item, and half a machine of further ones for those that are longer than the rest.
    """
    filling = BLOCKS_PER_MULTIPROCESSOR * multiprocessors // num_kv_heads
    return max(filling, num_seqs + max(1, filling // 2))


@dataclass(frozen=True, slots=True)
class Split:
    """A step's sequences in the order in which they come: one-token decodes, short queries, prefills."""

    num_decodes: int
    num_short: int
    """sequences of several queries that the decode kernel serves"""
    short_query_len: int
    """longest of these"""
    num_prefills: int
    prefill_tokens: int


def split_batch(
    batch: AttentionBatch,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    multiprocessors: int,
    invariant: bool = False,
) -> Split:
    """`group`: query heads per KV head.

    The rule for short queries (speculative verification, the tail of a chunked prompt): the sequences that follow the
    decodes, as long as query_len * group <= MAX_DECODE_ROWS and the context is SHORT_MIN_CONTEXT or more. They read
    much and compute little, and a prefill tile would read a whole context in one block. Never in a graph batch, whose
    work may not depend on lengths.

    `invariant`: all are prefills, of which a row's sums are cut by the positions of its keys alone.
    """
    if invariant:
        return Split(0, 0, 0, batch.num_seqs, batch.num_tokens)
    if batch.graph_size is not None or (batch.max_query_len <= 1 and 0 not in batch.query_lens_host):
        return Split(batch.num_seqs, 0, 0, 0, 0)
    first = end = batch.num_decodes
    longest = short_tokens = 0
    for query_len, seq_len in zip(batch.query_lens_host[first:], batch.seq_lens_host[first:], strict=True):
        if query_len == 0 or query_len * group > MAX_DECODE_ROWS or seq_len < SHORT_MIN_CONTEXT:
            break
        end += 1
        longest = max(longest, query_len)
        short_tokens += query_len
    num_short = end - first
    items = max_items(num_short, num_kv_heads, multiprocessors)
    if partial_floats(items, num_kv_heads, longest * group, head_dim) > MAX_SHORT_PARTIALS:
        num_short = longest = short_tokens = 0
    prefills = batch.num_seqs - first - num_short
    tokens = batch.num_tokens - first - short_tokens
    return Split(first, num_short, longest, prefills, tokens if prefills else 0)


class Workspace:
    """Scratch memory of one backend instance, shared by all layers and steps in stream order.

    Whatever was handed out keeps its address for ever: a captured graph may hold it. Sizes are powers of two (or one
    per captured graph), so what is left behind by growth is less than what is in use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._schedules: dict[tuple[object, ...], torch.Tensor] = {}
        self._partials = _Growing(torch.float32, device)
        self._arrivals = _Growing(torch.int32, device)

    def schedule(self, key: tuple[object, ...], words: int) -> torch.Tensor:
        """int32 [>= words], zeroed when new; the same memory for the same `key`, whose `words` never change."""
        found = self._schedules.get(key)
        if found is None:
            found = self._schedules[key] = torch.zeros(words, dtype=torch.int32, device=self._device)
        return found

    def partials(self, floats: int, graph: tuple[object, ...] | None = None) -> torch.Tensor:
        """float32 [>= floats]; the same memory for the same `graph`, whose `floats` never change."""
        return self._partials.at_least(floats, graph)

    def arrivals(self, words: int, graph: tuple[object, ...] | None = None) -> torch.Tensor:
        """int32 [>= words], likewise. Zero: every decode leaves them so, hence all may share them."""
        return self._arrivals.at_least(words, graph)

    @property
    def size_bytes(self) -> int:
        tensors = (*self._schedules.values(), *self._partials.tensors, *self._arrivals.tensors)
        return sum(t.numel() * t.element_size() for t in tensors)


class _Growing:
    """Memory of one kind, zeroed when new: the latest piece serves whoever it is large enough for."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._of_graphs: dict[tuple[object, ...], torch.Tensor] = {}
        self.tensors: list[torch.Tensor] = []

    def at_least(self, count: int, graph: tuple[object, ...] | None) -> torch.Tensor:
        if graph is not None and graph in self._of_graphs:
            return self._of_graphs[graph]
        if not self.tensors or self.tensors[-1].numel() < count:
            self.tensors.append(torch.zeros(power_of_two(count), dtype=self._dtype, device=self._device))
        if graph is not None:
            self._of_graphs[graph] = self.tensors[-1]
        return self.tensors[-1]


def power_of_two(count: int) -> int:
    """The least power of two that is not below `count`; 1 for 0."""
    return 1 << max(0, count - 1).bit_length()


def workspace_bytes(max_num_seqs: int, layers: Sequence[AttentionLayer], multiprocessors: int) -> int:
    """Upper estimate of what a `Workspace` will hold. Partial results take nearly all of it; what growth leaves behind
    is less than what is in use."""
    largest = schedules = 0
    for heads, kv_heads, dim in {(x.num_heads, x.num_kv_heads, x.head_dim) for x in layers}:
        items = max_items(max_num_seqs, kv_heads, multiprocessors)
        decode = partial_floats(items, kv_heads, heads // kv_heads, dim)
        short = min(partial_floats(items, kv_heads, MAX_DECODE_ROWS, dim), MAX_SHORT_PARTIALS)
        largest = max(largest, power_of_two(max(decode, short)))
        words = schedule_words(items, max_num_seqs) + arrival_words(max_num_seqs, kv_heads, MAX_DECODE_ROWS)
        schedules += words * len({x.signed_window for x in layers})
    sizes = max_num_seqs // 8 + 8  # of graphs; each has schedules of its own, of half the largest's size on average
    return 4 * (2 * largest + schedules * (sizes // 2 + 2))


@dataclass(slots=True)
class DecodePart:
    """One launch of the decode kernel: its sequences and its scratch."""

    first_seq: int
    num_seqs: int
    max_query_len: int
    max_items: int
    schedule: torch.Tensor
    partials: torch.Tensor
    arrivals: torch.Tensor
    made_by: int = 0
    """address of the KV cache whose layer queued schedule_decode; 0: none has yet"""


@dataclass(frozen=True, slots=True)
class Launch:
    """Arguments of one `Launchers.attend`, as there."""

    schedule: torch.Tensor | None
    partials: torch.Tensor | None
    arrivals: torch.Tensor | None
    counts: tuple[int, int, int, int, int, int, int, int]
    """num_tokens, first_decode, num_decodes, max_query_len, max_items, first_prefill, num_prefills, prefill_tokens"""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What layers with the same window and heads share in one step."""

    parts: tuple[DecodePart, ...]
    launches: tuple[Launch, ...]
    """the first writes the step's keys and values"""


def plan_layer(
    batch: AttentionBatch,
    layer: AttentionLayer,
    head_dim: int,
    multiprocessors: int,
    workspace: Workspace,
    invariant: bool = False,
) -> LayerPlan:
    """The launches of one step for layers like `layer`. Allocates scratch on first use of a size, nothing later."""
    group = layer.num_heads // layer.num_kv_heads
    split = split_batch(batch, group, layer.num_kv_heads, head_dim, multiprocessors, invariant)
    parts = []
    for role, first, count, query_len in (
        ("decode", 0, split.num_decodes, 1),
        ("short", split.num_decodes, split.num_short, split.short_query_len),
    ):
        if count == 0:
            continue
        items = max_items(count, layer.num_kv_heads, multiprocessors)
        graph = batch.graph_size is not None
        room = count if graph else power_of_two(count)
        key = (graph, role, room, layer.signed_window, layer.num_heads, layer.num_kv_heads, head_dim)
        schedule = workspace.schedule(key, schedule_words(max_items(room, layer.num_kv_heads, multiprocessors), room))
        rows = query_len * group
        partials = workspace.partials(partial_floats(items, layer.num_kv_heads, rows, head_dim), key if graph else None)
        arrivals = workspace.arrivals(arrival_words(count, layer.num_kv_heads, rows), key if graph else None)
        parts.append(DecodePart(first, count, query_len, items, schedule, partials, arrivals))
    return LayerPlan(tuple(parts), _launches(batch.num_tokens, parts, split))


def _launches(num_tokens: int, parts: list[DecodePart], split: Split) -> tuple[Launch, ...]:
    """One launch per decode part; the first also writes, the last also prefills."""
    prefill = (split.num_decodes + split.num_short, split.num_prefills, split.prefill_tokens)
    if not parts:
        return (Launch(None, None, None, (num_tokens, 0, 0, 0, 0, *prefill)),)
    launches = []
    for i, part in enumerate(parts):
        launches.append(
            Launch(
                part.schedule,
                part.partials,
                part.arrivals,
                (
                    num_tokens if i == 0 else 0,
                    part.first_seq,
                    part.num_seqs,
                    part.max_query_len,
                    part.max_items,
                    *(prefill if i == len(parts) - 1 else (0, 0, 0)),
                ),
            )
        )
    return tuple(launches)
