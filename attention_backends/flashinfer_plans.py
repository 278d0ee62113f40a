"""Plans of one step: page lists from lengths that the host knows, and FlashInfer wrappers planned with them.

A wrapper's plan holds for one *kind* of layer (heads, window, soft cap, scale), so a step has one plan for each kind of
its layers and each part of its batch (decodes, prefills). Kinds are learned from the layers that come by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch

from attention_backends.alternating_sets import AlternatingSets, Lease
from attention_backends.flashinfer_library import DecodeWrapper, PrefillWrapper, Runtime, Wrapper
from attention_backends.interface import AttentionBatch, AttentionLayer
from attention_backends.page_lists import PageLists, page_lists

W = TypeVar("W", bound=Wrapper)

LAYOUT = "HND"
LIBRARY_BACKEND = "fa2"
"""the only one with 8-bit caches under 16-bit queries, windows and soft caps on every GPU that we serve"""
SETS = 2
EAGER_INT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class PlanKind:
    """What layers must have in common to share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    scale: float
    window: int | None
    soft_cap: float | None


@dataclass(frozen=True)
class Plan:
    """Wrappers that are planned for one step and kind; None where the step has no such sequences."""

    decode: DecodeWrapper | None
    prefill: PrefillWrapper | None


@dataclass
class Step:
    """Metadata of one step."""

    num_tokens: int
    num_decodes: int
    """sequences and tokens of the decode part, those that pad a graph included"""
    num_prefill_tokens: int
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    block_size: int
    group: int
    graph_size: int | None
    query_lens: np.ndarray
    seq_lens: np.ndarray
    lease: Lease[int]
    pages: dict[int | None, tuple[PageLists, torch.Tensor]] = field(default_factory=dict)
    """window -> page lists, and the page indices on the device"""
    plans: dict[PlanKind, Plan] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphBuffers:
    """What captured decodes of one size and window read; the addresses are in the graphs."""

    indptr: torch.Tensor
    last_page_lens: torch.Tensor
    indices: torch.Tensor


class Scratch:
    """Partial results of a run, on the device: all wrappers of a stream share them."""

    def __init__(self, device: torch.device) -> None:
        self._floats = torch.empty(0, dtype=torch.uint8, device=device)

    def at_least(self, size_bytes: int) -> torch.Tensor:
        """uint8 [>= size_bytes], zeroed when new."""
        if self._floats.numel() < size_bytes:
            grown = _grown(size_bytes, self._floats.numel())
            self._floats = torch.zeros(grown, dtype=torch.uint8, device=self._floats.device)
        return self._floats


class Planner:
    """Owns wrappers and page indices of one layer group. All work of a step goes to one stream.

    Of every wrapper there are two, which share the workspace on the device (the stream orders its use) and have a
    pinned source each: steps use them in turn. Whichever of the two a graph was captured with, a plan by the other
    writes what the graph will read.
    """

    def __init__(self, runtime: Runtime, scratch: Scratch) -> None:
        self._runtime = runtime
        self._scratch = scratch
        self._pinned = runtime.device.type == "cuda"
        self._sets = AlternatingSets(range(SETS), runtime.make_event)
        self._known: dict[PlanKind, None] = {}
        self._decodes: dict[tuple[PlanKind, int | None], list[DecodeWrapper]] = {}
        self._prefills: dict[PlanKind, list[PrefillWrapper]] = {}
        self._graphs: dict[tuple[int, int | None], GraphBuffers] = {}
        self._indices: dict[int | None, torch.Tensor] = {}

    @property
    def multiprocessors(self) -> int:
        return self._runtime.multiprocessors

    def begin(self, batch: AttentionBatch) -> Step:
        """Metadata of `batch`, with plans for every kind of layer known so far."""
        step = self._describe(batch)
        for kind in self._known:
            if kind.block_size == batch.block_size:
                step.plans[kind] = self._make(step, kind)
        step.lease.seal()
        return step

    def plan(self, step: Step, kind: PlanKind) -> Plan:
        """The step's plan for layers of `kind`, made now if no such layer came by before. Raises RuntimeError where it
        would have to be made during a capture."""
        found = step.plans.get(kind)
        if found is None:
            if self._runtime.capturing():
                raise RuntimeError(
                    f"FlashInferBackend: {kind} comes by for the first time during a capture; run the layer once "
                    "before, with metadata of the same graph size"
                )
            self._known[kind] = None
            found = step.plans[kind] = self._make(step, kind)
            step.lease.seal()
        return found

    def _describe(self, batch: AttentionBatch) -> Step:
        real = len(batch.seq_lens_host)
        if len(batch.query_lens_host) != real or (real == 0 and batch.graph_size is None and batch.num_tokens > 0):
            raise ValueError(
                "FlashInferBackend plans on the host: AttentionBatch needs query_lens_host and seq_lens_host of every "
                f"real sequence; got {len(batch.query_lens_host)} and {real} of them"
            )
        query_lens = np.asarray(batch.query_lens_host, np.int32)
        seq_lens = np.asarray(batch.seq_lens_host, np.int32)
        num_decodes = min(batch.num_decodes, real)
        if batch.graph_size is not None:
            num_decodes = batch.graph_size
            padding = np.zeros(num_decodes - real, np.int32)
            query_lens, seq_lens = np.ones(num_decodes, np.int32), np.concatenate((seq_lens, padding))
        return Step(
            num_tokens=batch.num_tokens,
            num_decodes=num_decodes,
            num_prefill_tokens=int(query_lens[num_decodes:].sum()),
            slot_mapping=batch.slot_mapping[: batch.num_tokens],
            block_tables=batch.block_tables,
            block_size=batch.block_size,
            group=batch.group,
            graph_size=batch.graph_size,
            query_lens=query_lens,
            seq_lens=seq_lens,
            lease=self._sets.begin(),
        )

    def _make(self, step: Step, kind: PlanKind) -> Plan:
        lists, indices = self._pages(step, kind.window)
        decode = self._plan_decode(step, kind, lists, indices) if step.num_decodes else None
        prefill = self._plan_prefill(step, kind, lists, indices) if step.num_prefill_tokens else None
        return Plan(decode, prefill)

    def _pages(self, step: Step, window: int | None) -> tuple[PageLists, torch.Tensor]:
        if window not in step.pages:
            lists = page_lists(step.query_lens, step.seq_lens, step.num_decodes, window, step.block_size, self._pinned)
            if step.graph_size is None:
                indices = self._index_buffer(window, lists.num_pages)
            else:
                indices = self._graph_buffers(step, step.graph_size, window).indices
                if lists.num_pages > indices.numel():
                    raise RuntimeError(
                        f"FlashInferBackend: a graph of {step.graph_size} sequences was made for {indices.numel()} "
                        f"pages, this step has {lists.num_pages}: block tables grew wider since"
                    )
            tables = lists.for_gather.to(indices.device, non_blocking=True)
            starts, firsts = tables[: len(lists.page_starts)], tables[len(lists.page_starts) :]
            self._runtime.kernels.gather_pages(step.block_tables, starts, firsts, indices, lists.max_pages)
            step.pages[window] = (lists, indices)
        return step.pages[window]

    def _plan_decode(self, step: Step, kind: PlanKind, lists: PageLists, indices: torch.Tensor) -> DecodeWrapper:
        wrapper = self._decode_wrappers(step, kind)[step.lease.set]
        count = step.num_decodes
        # A graph's indices are gathered in place: nothing is left for the wrapper to copy.
        taken = int(lists.page_starts[count]) if step.graph_size is None else 0
        wrapper.plan(
            lists.page_starts[: count + 1],
            indices[:taken],
            lists.last_page_lens[:count],
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            kind.block_size,
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.soft_cap,
            q_data_type=kind.dtype,
            kv_data_type=kind.kv_dtype,
            sm_scale=kind.scale,
            non_blocking=True,
            seq_lens=self._lengths(lists.kv_lens[:count]),
        )
        return wrapper

    def _plan_prefill(self, step: Step, kind: PlanKind, lists: PageLists, indices: torch.Tensor) -> PrefillWrapper:
        wrapper = self._prefill_wrappers(kind)[step.lease.set]
        begin = step.num_decodes
        wrapper.plan(
            lists.query_starts,
            lists.prefill_starts,
            indices[int(lists.page_starts[begin]) : lists.num_pages],
            lists.last_page_lens[begin:],
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            kind.block_size,
            causal=True,
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.soft_cap,
            q_data_type=kind.dtype,
            kv_data_type=kind.kv_dtype,
            sm_scale=kind.scale,
            non_blocking=True,
            seq_lens=self._lengths(lists.kv_lens[begin:]),
            max_token_per_sequence=int(step.query_lens[begin:].max()),
        )
        return wrapper

    def _lengths(self, kv_lens: torch.Tensor) -> torch.Tensor:
        if not self._runtime.only_longest:
            return kv_lens
        longest = int(kv_lens.numpy().argmax())
        return kv_lens[longest : longest + 1]

    def _decode_wrappers(self, step: Step, kind: PlanKind) -> list[DecodeWrapper]:
        key = (kind, step.graph_size)
        if key not in self._decodes:
            floats = self._scratch.at_least(float_bytes(kind, self._runtime.multiprocessors, step.graph_size))
            arguments: dict[str, object] = {"use_tensor_cores": True, "backend": LIBRARY_BACKEND}
            int_bytes = EAGER_INT_BYTES
            if step.graph_size is not None:
                int_bytes = graph_int_bytes(kind, self._runtime.multiprocessors, step.graph_size)
                buffers = self._graph_buffers(step, step.graph_size, kind.window)
                arguments |= {
                    "use_cuda_graph": True,
                    "paged_kv_indptr_buffer": buffers.indptr,
                    "paged_kv_indices_buffer": buffers.indices,
                    "paged_kv_last_page_len_buffer": buffers.last_page_lens,
                }
            wrappers = [self._runtime.make_decode(floats, LAYOUT, **arguments) for _ in range(SETS)]
            self._decodes[key] = self._with_workspace(wrappers, floats, int_bytes)
        return self._decodes[key]

    def _prefill_wrappers(self, kind: PlanKind) -> list[PrefillWrapper]:
        if kind not in self._prefills:
            floats = self._scratch.at_least(float_bytes(kind, self._runtime.multiprocessors, None))
            wrappers = [self._runtime.make_prefill(floats, LAYOUT, backend=LIBRARY_BACKEND) for _ in range(SETS)]
            self._prefills[kind] = self._with_workspace(wrappers, floats, EAGER_INT_BYTES)
        return self._prefills[kind]

    def _with_workspace(self, wrappers: list[W], floats: torch.Tensor, int_bytes: int) -> list[W]:
        """Give all of them one device workspace; each allocates its own pinned source of that size."""
        ints = torch.empty(int_bytes, dtype=torch.uint8, device=self._runtime.device)
        for wrapper in wrappers:
            wrapper.reset_workspace_buffer(floats, ints)
        return wrappers

    def _graph_buffers(self, step: Step, size: int, window: int | None) -> GraphBuffers:
        key = (size, window)
        if key not in self._graphs:
            columns = step.block_tables.shape[1]
            if window is not None:
                columns = min(columns, (window - 1) // step.block_size + 2)
            device = self._runtime.device
            self._graphs[key] = GraphBuffers(
                indptr=torch.zeros(size + 1, dtype=torch.int32, device=device),
                last_page_lens=torch.ones(size, dtype=torch.int32, device=device),
                indices=self._index_buffer(window, size * columns),
            )
        return self._graphs[key]

    def _index_buffer(self, window: int | None, count: int) -> torch.Tensor:
        """int32 [>= count], the same for all sizes until a larger one comes: a step fills it before it reads it."""
        held = self._indices.get(window)
        if held is None or held.numel() < count:
            grown = _grown(count, 0 if held is None else held.numel())
            held = self._indices[window] = torch.zeros(grown, dtype=torch.int32, device=self._runtime.device)
        return held


def _grown(needed: int, held: int) -> int:
    """What outlives its growth (graphs keep their addresses) grows geometrically, rounded up to 256."""
    return -(-max(needed, held + held // 2) // 256) * 256


def workspace_bytes(
    max_num_seqs: int, layers: Sequence[AttentionLayer], multiprocessors: int, num_groups: int = 1
) -> int:
    """Upper estimate of what the `Planner`s of all groups will hold on the device, page indices (a few MiB) left out:
    one workspace of partial results for steps without a graph and one for the largest graph, and schedules for each
    group and kind of layer."""
    kinds = {replace(layer, sinks=None, k_scale=1.0, v_scale=1.0): None for layer in layers}
    eager = max((float_bytes(kind, multiprocessors, None) for kind in kinds), default=0)
    graph = max((float_bytes(kind, multiprocessors, max_num_seqs) for kind in kinds), default=0)
    sizes = max_num_seqs // 8 + 8  # of graphs
    of_graphs = sum(sizes * graph_int_bytes(kind, multiprocessors, max_num_seqs) for kind in kinds)
    schedules = max(num_groups, len(kinds))  # a group's layers are of one kind, as good as always
    of_groups = (of_graphs + 2 * EAGER_INT_BYTES * len(kinds)) * schedules // max(len(kinds), 1)
    return eager + max(graph, eager + eager // 2) + of_groups


def float_bytes(kind: PlanKind | AttentionLayer, multiprocessors: int, graph_size: int | None) -> int:
    """Upper bound of the partial results of a run: float32 [heads, work items, rows of a tile, head_dim + 1].

    fa2 starts at most two blocks per multiprocessor; a graph of many sequences has a fixed grid that can be larger. A
    tile has 16, 64 or 128 rows, by the number of query rows that share a KV head.
    """
    items = 2 * multiprocessors // kind.num_kv_heads
    rows = 64 if kind.head_dim >= 256 else 128
    if graph_size is not None:
        rows = _graph_tile_rows(kind)
        items = _graph_items(kind, multiprocessors, graph_size)
    return kind.num_heads * items * rows * (kind.head_dim + 1) * 4 + 4096


def graph_int_bytes(kind: PlanKind | AttentionLayer, multiprocessors: int, graph_size: int) -> int:
    """Upper bound of the schedule that a plan writes for a graph: four words for each work item, three for each
    sequence, and padding."""
    words = 4 * _graph_items(kind, multiprocessors, graph_size) + 3 * graph_size
    return -(-(4 * words + 4096) // 256) * 256


def _graph_tile_rows(kind: PlanKind | AttentionLayer) -> int:
    group = kind.num_heads // kind.num_kv_heads
    if group <= 16:
        return 16
    return 64 if group <= 64 or kind.head_dim >= 256 else 128


def _graph_items(kind: PlanKind | AttentionLayer, multiprocessors: int, graph_size: int) -> int:
    group = kind.num_heads // kind.num_kv_heads
    tiles = -(-graph_size * group // _graph_tile_rows(kind)) + graph_size - 1
    return max(2 * multiprocessors // kind.num_kv_heads, tiles)
