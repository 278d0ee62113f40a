"""The host side of the CUDA backend, without a GPU: how steps are cut, what is launched, where scratch memory lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_backends.cuda import CudaBackend
from attention_backends.cuda_launchers import MAX_DECODE_ROWS, arrival_words, partial_floats, schedule_words
from attention_backends.cuda_plan import (
    BLOCKS_PER_MULTIPROCESSOR,
    MAX_SHORT_PARTIALS,
    SHORT_MIN_CONTEXT,
    Workspace,
    max_items,
    split_batch,
)
from attention_backends.interface import AttentionBatch, AttentionLayer, AttentionSpec
from attention_backends.registry import NoBackendError, select

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 8, 2, 64, 16
GROUP = HEADS // KV_HEADS
PROCESSORS = 132
CPU = torch.device("cpu")


@dataclass
class Recorder:
    """Launchers that compute nothing and remember everything."""

    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)

    def schedule_decode(self, *arguments: Any) -> None:
        self.calls.append(("schedule", arguments))

    def attend(self, *arguments: Any) -> None:
        self.calls.append(("attend", arguments))

    def write_kv(self, *arguments: Any) -> None:
        self.calls.append(("write", arguments))

    def copy_blocks(self, *arguments: Any) -> None:
        self.calls.append(("copy", arguments))

    def gather_blocks(self, *arguments: Any) -> None:
        self.calls.append(("gather", arguments))

    def scatter_blocks(self, *arguments: Any) -> None:
        self.calls.append(("scatter", arguments))

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def counts(self) -> list[tuple[int, ...]]:
        """num_tokens, first_decode, num_decodes, max_query_len, max_items, first_prefill, num_prefills, prefill_tokens
        of each attend"""
        return [arguments[13:21] for name, arguments in self.calls if name == "attend"]


def layer_of(window: int | None = None) -> AttentionLayer:
    return AttentionLayer(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, window)


def batch_of(lengths: Sequence[tuple[int, int]], graph_size: int | None = None) -> AttentionBatch:
    queries = [q for q, _ in lengths]
    num_seqs = graph_size or len(lengths)
    num_decodes = next((i for i, q in enumerate(queries) if q != 1), len(queries))
    return AttentionBatch(
        num_seqs=num_seqs,
        num_tokens=graph_size or sum(queries),
        max_query_len=max(queries, default=0),
        max_seq_len=max((n for _, n in lengths), default=0),
        query_start_loc=torch.zeros(num_seqs + 1, dtype=torch.int32),
        seq_lens=torch.zeros(num_seqs, dtype=torch.int32),
        block_tables=torch.zeros(num_seqs, 4, dtype=torch.int32),
        slot_mapping=torch.zeros(graph_size or sum(queries), dtype=torch.int64),
        block_size=BLOCK,
        num_decodes=num_decodes,
        query_lens_host=queries,
        seq_lens_host=[n for _, n in lengths],
        graph_size=graph_size,
    )


def backend_of(recorder: Recorder) -> CudaBackend:
    backend = CudaBackend(recorder, PROCESSORS)
    backend.bind(AttentionSpec(CPU, torch.bfloat16, torch.bfloat16, (HEAD_DIM,)))
    return backend


def caches_of(backend: CudaBackend, count: int) -> list[torch.Tensor]:
    return [
        torch.zeros(backend.kv_cache_shape(4, BLOCK, KV_HEADS, HEAD_DIM), dtype=torch.bfloat16) for _ in range(count)
    ]


def run_layers(
    backend: CudaBackend, metadata: object, windows: Sequence[int | None], caches: Sequence[torch.Tensor]
) -> None:
    tokens = torch.zeros(4, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    for window, cache in zip(windows, caches, strict=True):
        kv = tokens[:, :KV_HEADS]
        backend.forward(tokens, kv, kv, tokens, cache, layer_of(window), metadata)


@given(st.integers(1, 2000), st.integers(1, 64), st.integers(1, 200))
def test_items_suffice_for_every_sequence_and_fill_the_machine_once(seqs: int, kv_heads: int, processors: int) -> None:
    items = max_items(seqs, kv_heads, processors)
    machine = BLOCKS_PER_MULTIPROCESSOR * processors
    assert items >= seqs + 1
    assert items * kv_heads > machine - kv_heads, "idle processors"
    assert max_items(seqs + 1, kv_heads, processors) >= items, "a buffer for more sequences must serve fewer"
    if 2 * seqs * kv_heads <= machine - 2 * kv_heads:
        assert items * kv_heads <= machine, "a second wave for a few sequences"
    assert items <= max(machine // kv_heads, seqs + max(1, machine // kv_heads))


lengths = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 3000)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=1,
    max_size=30,
)


@given(st.integers(0, 20), lengths, st.sampled_from([1, 4, 8]))
def test_every_sequence_is_served_once_and_only_long_short_queries_join_the_decodes(
    decodes: int, rest: list[tuple[int, int]], group: int
) -> None:
    batch = batch_of([(1, 700)] * decodes + rest)
    split = split_batch(batch, group, KV_HEADS, HEAD_DIM, PROCESSORS)
    if batch.max_query_len == 1:
        assert (split.num_decodes, split.num_short, split.num_prefills) == (batch.num_seqs, 0, 0)
        return
    assert split.num_decodes == batch.num_decodes
    assert split.num_decodes + split.num_short + split.num_prefills == batch.num_seqs
    first_prefill = split.num_decodes + split.num_short
    queries, contexts = batch.query_lens_host, batch.seq_lens_host
    assert split.prefill_tokens == sum(queries[first_prefill:])
    for i in range(split.num_decodes, first_prefill):
        assert queries[i] * group <= MAX_DECODE_ROWS
        assert queries[i] <= split.short_query_len
        assert contexts[i] >= SHORT_MIN_CONTEXT
    if split.num_short:
        items = max_items(split.num_short, KV_HEADS, PROCESSORS)
        assert partial_floats(items, KV_HEADS, split.short_query_len * group, HEAD_DIM) <= MAX_SHORT_PARTIALS


def test_a_decode_schedules_once_per_window_and_attends_once_per_layer() -> None:
    recorder = Recorder()
    backend = backend_of(recorder)
    windows = [None, 64, None, 64, None]
    run_layers(backend, backend.build_metadata(batch_of([(1, 100), (1, 3)])), windows, caches_of(backend, 5))
    assert recorder.names() == ["schedule", "attend", "schedule", "attend", "attend", "attend", "attend"]
    schedules = [call for name, call in recorder.calls if name == "schedule"]
    assert [call[-1] for call in schedules] == [0, 64]
    attends = [call for name, call in recorder.calls if name == "attend"]
    used = [call[9].data_ptr() for call in attends]
    assert used == [schedules[0][2].data_ptr() if w is None else schedules[1][2].data_ptr() for w in windows]
    assert used[0] != used[1], "layers alternate between windows, so their schedules must not share memory"
    assert all(call[21] == (window or 0) for call, window in zip(attends, windows, strict=True))


def test_a_mixed_step_writes_once_and_decodes_shorts_and_prefills_in_their_own_launches() -> None:
    recorder = Recorder()
    backend = backend_of(recorder)
    steps = [(1, 900), (1, 5), (4, 4000), (3, 2000), (70, 70), (2, 600)]
    run_layers(backend, backend.build_metadata(batch_of(steps)), [None], caches_of(backend, 1))
    assert recorder.names() == ["schedule", "schedule", "attend", "attend"]
    items = max_items(2, KV_HEADS, PROCESSORS)
    assert recorder.counts() == [(81, 0, 2, 1, items, 0, 0, 0), (0, 2, 2, 4, items, 4, 2, 72)]
    scratch = [call[9] for name, call in recorder.calls if name == "attend"]
    assert scratch[0].data_ptr() != scratch[1].data_ptr()


def test_a_pure_prefill_makes_no_schedule() -> None:
    recorder = Recorder()
    backend = backend_of(recorder)
    run_layers(backend, backend.build_metadata(batch_of([(100, 100), (7, 7)])), [None], caches_of(backend, 1))
    assert recorder.names() == ["attend"]
    assert recorder.counts() == [(107, 0, 0, 0, 0, 0, 2, 107)]


def test_buffers_are_large_enough_for_what_is_launched() -> None:
    recorder = Recorder()
    backend = backend_of(recorder)
    (cache,) = caches_of(backend, 1)
    for count in (1, 3, 2, 40, 33, 64, 5):
        run_layers(backend, backend.build_metadata(batch_of([(1, 50)] * count)), [None], [cache])
    run_layers(backend, backend.build_metadata(batch_of([(5, 5000)] * 9)), [None], [cache])
    for name, arguments in recorder.calls:
        if name == "attend":
            _, _, decodes, query_len, items, *_ = arguments[13:21]
            assert arguments[9].numel() >= schedule_words(items, decodes)
            assert arguments[10].numel() >= partial_floats(items, KV_HEADS, query_len * GROUP, HEAD_DIM)
            assert arguments[11].numel() >= arrival_words(decodes, KV_HEADS, query_len * GROUP)
            assert not arguments[11].any()


def test_a_graph_size_keeps_its_addresses_and_counts_whatever_the_lengths() -> None:
    recorder = Recorder()
    backend = backend_of(recorder)
    caches = caches_of(backend, 2)

    def launched(batch: AttentionBatch) -> list[tuple[object, ...]]:
        recorder.calls.clear()
        run_layers(backend, backend.build_metadata(batch), [None, 128], caches)
        return [
            tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments[9:])
            for name, arguments in recorder.calls
            if name == "attend"
        ]

    first = {size: launched(batch_of([(1, 10)] * size, size)) for size in (1, 4, 64)}
    launched(batch_of([(1, 90_000)] * 200))  # grows the scratch of eager steps
    launched(batch_of([(8, 90_000)] * 60))
    again = {size: launched(batch_of([(1, 70_000)] * (size - 1) + [(0, 0)], size)) for size in (64, 1, 4)}
    assert again == first
    schedules = {addresses[0] for size in first for addresses in first[size]}
    assert len(schedules) == 6, "each size and window has its own schedule"
    eager = {addresses[0] for addresses in launched(batch_of([(1, 10)] * 4))}
    assert not eager & schedules, "an eager step must not disturb what a graph replays"


def test_metadata_that_serves_a_warm_up_and_then_a_capture_schedules_in_both() -> None:
    recorder = Recorder()
    backend = backend_of(recorder)
    caches = caches_of(backend, 3)
    metadata = backend.build_metadata(batch_of([(1, 10)] * 2, 2))
    run_layers(backend, metadata, [None, None, 64], caches)
    warm_up = recorder.names()
    recorder.calls.clear()
    run_layers(backend, metadata, [None, None, 64], caches)
    assert recorder.names() == warm_up == ["schedule", "attend", "attend", "schedule", "attend"]


def test_layers_values_reach_the_kernels() -> None:
    recorder = Recorder()
    backend = backend_of(recorder)
    (cache,) = caches_of(backend, 1)
    sinks = torch.zeros(HEADS)
    layer = AttentionLayer(HEADS, KV_HEADS, HEAD_DIM, 0.25, 7, 30.0, sinks, 0.5, 2.0)
    tokens = torch.zeros(1, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    kv = tokens[:, :KV_HEADS]
    backend.forward(tokens, kv, kv, tokens, cache, layer, backend.build_metadata(batch_of([(1, 9)])))
    arguments = recorder.calls[-1][1]
    assert arguments[12] is sinks
    assert arguments[21:] == (7, 0.25, 30.0, 0.5, 2.0)


def test_scratch_memory_grows_without_moving_what_was_handed_out() -> None:
    workspace = Workspace(CPU)
    small = workspace.partials(100)
    small.fill_(3.0)
    large = workspace.partials(1000)
    assert large.data_ptr() != small.data_ptr()
    large.zero_()
    assert (small == 3.0).all()
    assert workspace.partials(50).data_ptr() == large.data_ptr()
    assert workspace.size_bytes == 4 * (128 + 1024)


def test_a_cpu_has_a_reason_for_refusing() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(NoBackendError, match="cuda: runs on cuda, not on cpu"):
        select("cpu", torch.bfloat16, [64], 16, False, False, name="cuda")
    with pytest.raises(NoBackendError, match="cuda: torch finds no CUDA device"):
        select("cuda", torch.bfloat16, [64], 16, False, False, name="cuda")
    with pytest.raises(NoBackendError, match="has no head_dim 80"):
        select("cuda", torch.bfloat16, [80], 16, False, False, name="cuda")


def test_an_unprepared_cuda_backend_says_what_is_missing() -> None:
    with pytest.raises(RuntimeError, match=r"bind\(\)"):
        CudaBackend().prepare()
    backend = CudaBackend()
    backend.bind(AttentionSpec(CPU, torch.bfloat16, torch.bfloat16, (64,)))
    with pytest.raises(RuntimeError, match=r"prepare\(\)"):
        backend.copy_blocks([], [(0, 1)])
