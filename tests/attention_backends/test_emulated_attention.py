"""The CUDA attention kernels, run on a CPU by the emulator, against the oracle in float64 on the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from emulated_cuda import EmulatedKernels, EmulatedLaunchers, kernels_in

from attention_backends.cuda_launchers import arrival_words
from attention_backends.interface import AttentionBatch, AttentionLayer
from attention_backends.reference import ReferenceBackend

BF16, F16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
UNTOUCHED = 7.0
NO_BLOCK = 2**30
# Half a unit in the last place of the output, and as much again for rounded probabilities, averaged over keys.
RELATIVE = {BF16: 2**-7, F16: 2**-9}
ABSOLUTE = {BF16: 2**-7, F16: 2**-9}


@dataclass(frozen=True)
class Problem:
    """Cached keys of some sequences, and their queries."""

    lengths: Sequence[tuple[int, int]]
    """(queries, keys with this step's) per sequence"""
    group: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = BF16
    fp8: bool = False
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scale: float | None = None
    max_items: int = 64
    first_seq: int = 0
    """sequences before it are somebody else's: not to be computed"""
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads

    @property
    def layer(self) -> AttentionLayer:
        generator = torch.Generator().manual_seed(self.seed + 1)
        sinks = torch.randn(self.num_heads, generator=generator) * 2 if self.sinks else None
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        scales = (0.5, 2.0) if self.fp8 else (1.0, 1.0)
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        return AttentionLayer(*heads, scale, self.window, self.soft_cap, sinks, *scales, self.chunk)

    @property
    def kv_dtype(self) -> torch.dtype:
        return FP8 if self.fp8 else self.dtype

    def starts(self) -> torch.Tensor:
        return torch.tensor([0, *(q for q, _ in self.lengths)], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """block tables, and a cache [blocks, 2, kv heads, block_size, head_dim], NaN wherever no visible key lies"""
        generator = torch.Generator().manual_seed(self.seed + 2)
        counts = [-(-length // self.block_size) for _, length in self.lengths]
        free = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        cache = torch.full(
            (len(free), 2, self.num_kv_heads, self.block_size, self.head_dim), torch.nan, dtype=self.kv_dtype
        )
        tables = torch.full((len(counts), max(counts, default=0) + 1), NO_BLOCK, dtype=torch.int32)
        for seq, (queries, length) in enumerate(self.lengths):
            oldest = 0 if self.window is None else max(0, length - queries - self.window + 1)
            if self.chunk is not None:
                oldest = max(0, length - queries) // self.chunk * self.chunk
            for column in range(oldest // self.block_size, counts[seq]):
                block = tables[seq, column] = free.pop()
                first = column * self.block_size
                begin, end = max(oldest - first, 0), min(self.block_size, length - first)
                page = torch.randn(2, self.num_kv_heads, self.block_size, self.head_dim, generator=generator)
                cache[block, :, :, begin:end] = page[:, :, begin:end].to(self.kv_dtype)
        return tables, cache

    def queries(self) -> torch.Tensor:
        """A view of a wider tensor, as a merged projection gives it."""
        torch.manual_seed(self.seed)
        tokens = int(self.starts()[-1]) + 2
        merged = torch.randn(tokens, self.num_heads + 2, self.head_dim).to(self.dtype)
        return merged[:, : self.num_heads]

    def oracle(self) -> torch.Tensor:
        tables, cache = self.pages()
        layer = self.layer
        exact = cache.double() * torch.tensor([layer.k_scale, layer.v_scale]).view(1, 2, 1, 1, 1).double()
        starts, q = self.starts(), self.queries().double()
        lengths = torch.tensor([n for _, n in self.lengths], dtype=torch.int32)
        nowhere = torch.full((int(starts[-1]),), -1)
        longest = max(q for q, _ in self.lengths)
        batch = AttentionBatch(
            len(self.lengths), len(nowhere), longest, 0, starts, lengths, tables, nowhere, self.block_size
        )
        out = torch.full(q.shape, UNTOUCHED, dtype=torch.float64)
        unused = torch.zeros(len(q), self.num_kv_heads, self.head_dim, dtype=torch.float64)
        paged = exact.transpose(2, 3).contiguous()
        ReferenceBackend().forward(q, unused, unused, out, paged, replace(layer, k_scale=1.0, v_scale=1.0), batch)
        out[: int(starts[self.first_seq])] = UNTOUCHED
        return out

    def run(self, launchers: EmulatedLaunchers, phase: str, cache: torch.Tensor | None = None) -> torch.Tensor:
        tables, own = self.pages()
        cache = own if cache is None else cache
        layer, starts, q = self.layer, self.starts(), self.queries()
        lengths = torch.tensor([n for _, n in self.lengths], dtype=torch.int32)
        count, longest = len(self.lengths) - self.first_seq, max(q for q, _ in self.lengths)
        tokens = int(starts[-1] - starts[self.first_seq])
        out = torch.full((len(q), self.num_heads + 1, self.head_dim), UNTOUCHED, dtype=self.dtype)[:, 1:]
        schedule = torch.full((3 + 2 * self.max_items + count,), -(2**31), dtype=torch.int32)
        partials = torch.full(
            (self.max_items * self.num_heads * longest * (self.head_dim + 1) if phase == "decode" else 1,), torch.nan
        )
        arrivals = torch.zeros(arrival_words(count, self.num_kv_heads, longest * self.group), dtype=torch.int32)
        window = layer.signed_window
        decodes, prefills = (count, 0) if phase == "decode" else (0, count)
        if phase == "decode":
            launchers.schedule_decode(starts, lengths, schedule, self.first_seq, count, longest, self.max_items, window)
            assert count <= schedule[0] <= self.max_items
        launchers.attend(
            q, q, q, out, cache, torch.empty(0, dtype=torch.int64), starts, lengths, tables, schedule, partials,
            arrivals, layer.sinks, 0, self.first_seq, decodes, longest, self.max_items, self.first_seq, prefills,
            tokens, window, layer.scale, self.soft_cap or 0.0, layer.k_scale, layer.v_scale,
        )  # fmt: skip
        assert not arrivals.any(), "the next decode finds them as this one did"
        return out


@pytest.fixture(scope="module")
def kernels(kernel_cache: Path) -> EmulatedKernels:
    return kernels_in(kernel_cache)


PHASES = ("decode", "prefill")
EDGES = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 700)
SHORT = [(1, 300), (3, 257), (1, 0), (2, 2), (1, 1), (4, 65), (1, 700), (0, 0), (3, 16)]
LONG = [(70, 70), (5, 300), (1, 0), (33, 129), (0, 0), (0, 130), (130, 257), (1, 64), (2, 17)]


def assert_matches_oracle(problem: Problem, kernels: EmulatedKernels, phase: str) -> None:
    launchers = kernels(problem.head_dim, problem.dtype, problem.kv_dtype)
    launchers.seed(problem.seed)
    got = problem.run(launchers, phase).double()
    assert got.isfinite().all()
    largest = problem.layer.v_scale
    torch.testing.assert_close(
        got, problem.oracle(), rtol=RELATIVE[problem.dtype], atol=ABSOLUTE[problem.dtype] * largest
    )


def lengths_of(phase: str) -> list[tuple[int, int]]:
    return SHORT if phase == "decode" else LONG


VARIANTS = (
    {},
    {"window": 21},
    {"soft_cap": 5.0},
    {"sinks": True},
    {"window": 100, "soft_cap": 20.0, "sinks": True},
    {"chunk": 48},
)


@pytest.mark.pairwise
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fp8", [False, True], ids=["same", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_head_dim_cache_type_and_variant_gives_the_equation(
    kernels: EmulatedKernels, head_dim: int, fp8: bool, phase: str
) -> None:
    for seed, variant in enumerate(VARIANTS):
        problem = Problem(lengths_of(phase), head_dim=head_dim, fp8=fp8, seed=seed, max_items=12)
        assert_matches_oracle(replace(problem, **variant), kernels, phase)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("head_dim", "fp8"),
    [
        *(pytest.param(*kind, marks=pytest.mark.exhaustive) for kind in ((64, False), (128, True), (256, False))),
        (128, False),
        (256, True),
    ],
    ids=str,
)
def test_devices_with_little_shared_memory(kernel_cache: Path, head_dim: int, fp8: bool, phase: str) -> None:
    """99 KiB a block, where most kinds need other tiles than on a Hopper: of a decode two stages, or two warps."""
    small = kernels_in(kernel_cache, shared_kib=99)
    for seed, variant in enumerate(({"group": 8}, {"window": 100, "sinks": True})):
        problem = Problem(lengths_of(phase), head_dim=head_dim, fp8=fp8, seed=seed, max_items=12)
        assert_matches_oracle(replace(problem, **variant), small, phase)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fp8", [False, True], ids=["same", "fp8"])
def test_float16(kernels: EmulatedKernels, fp8: bool, phase: str) -> None:
    for seed, variant in enumerate(VARIANTS):
        assert_matches_oracle(
            replace(Problem(lengths_of(phase), dtype=F16, fp8=fp8, seed=seed), **variant), kernels, phase
        )


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16])
def test_query_heads_of_a_group_share_their_kv_head(kernels: EmulatedKernels, group: int, phase: str) -> None:
    for head_dim in (64, 256):
        problem = Problem(lengths_of(phase), group=group, head_dim=head_dim, seed=group)
        assert_matches_oracle(problem, kernels, phase)
        assert_matches_oracle(replace(problem, window=33, sinks=True), kernels, phase)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_lengths_at_the_edges_of_pages_tiles_and_chunks(kernels: EmulatedKernels, block_size: int, phase: str) -> None:
    lengths = [(1, n) for n in EDGES] + [(2, n) for n in EDGES[1:]]
    if phase == "prefill":
        lengths = [(n, n) for n in EDGES[:-1]] + [(17, n) for n in EDGES[3:]]
    problem = Problem(lengths, block_size=block_size, num_kv_heads=1, seed=block_size)
    assert_matches_oracle(problem, kernels, phase)
    assert_matches_oracle(replace(problem, window=65), kernels, phase)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 100, 5000])
def test_window_and_garbage_table_entries_before_it(kernels: EmulatedKernels, window: int, phase: str) -> None:
    problem = Problem(lengths_of(phase), window=window, seed=window)
    assert_matches_oracle(problem, kernels, phase)
    assert_matches_oracle(replace(problem, head_dim=128, fp8=True), kernels, phase)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("chunk", [1, 16, 40, 64, 300])
def test_chunk_and_garbage_table_entries_before_it(kernels: EmulatedKernels, chunk: int, phase: str) -> None:
    problem = Problem(lengths_of(phase), chunk=chunk, seed=chunk)
    assert_matches_oracle(problem, kernels, phase)
    assert_matches_oracle(replace(problem, head_dim=128, fp8=True, sinks=True, soft_cap=9.0), kernels, phase)


@pytest.mark.parametrize("queries", [1, 2, 5, 8, 11, 16])
def test_decode_rows_at_the_edges_of_row_tiles(kernels: EmulatedKernels, queries: int) -> None:
    """4 rows a query: up to 16, 32 and 64, which are one row tile, two, and two blocks of two."""
    lengths = [(queries, 700), (1, 333), (queries, queries), (min(3, queries), 300)]
    for head_dim in (128, 256):
        for max_items in (5, 64):
            problem = Problem(lengths, head_dim=head_dim, max_items=max_items, seed=queries)
            assert_matches_oracle(problem, kernels, "decode")
            assert_matches_oracle(replace(problem, window=50, sinks=True), kernels, "decode")
            assert_matches_oracle(replace(problem, chunk=9), kernels, "decode")


@pytest.mark.parametrize("max_items", [7, 8, 9, 12, 20, 200])
def test_number_of_splits_does_not_matter(kernels: EmulatedKernels, max_items: int) -> None:
    lengths = [(1, 3000), (1, 0), (1, 256), (1, 257), (2, 1025), (1, 1)]
    problem = Problem(lengths, max_items=max_items, num_kv_heads=1, seed=max_items)
    assert_matches_oracle(problem, kernels, "decode")
    assert_matches_oracle(replace(problem, window=1500, sinks=True, soft_cap=9.0), kernels, "decode")


@pytest.mark.parametrize("phase", PHASES)
def test_sequences_before_the_first_are_not_touched(kernels: EmulatedKernels, phase: str) -> None:
    for first in (1, 3, 5):
        assert_matches_oracle(Problem(lengths_of(phase), first_seq=first, max_items=9, seed=first), kernels, phase)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("scale", [-0.125, 0.0, 3.0])
def test_any_scale_is_a_scale(kernels: EmulatedKernels, scale: float, phase: str) -> None:
    for fp8 in (False, True):
        assert_matches_oracle(Problem(lengths_of(phase), scale=scale, fp8=fp8, soft_cap=None), kernels, phase)
        assert_matches_oracle(Problem(lengths_of(phase), scale=scale, fp8=fp8, soft_cap=30.0), kernels, phase)


@pytest.mark.pairwise
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fp8", [False, True], ids=["same", "fp8"])
@pytest.mark.parametrize("which", ["key", "value"])
def test_a_nan_shows_in_every_row_that_sees_it_and_in_no_other_sequence(
    kernels: EmulatedKernels, which: str, fp8: bool, phase: str
) -> None:
    """At any place of a sequence: a maximum drops NaN, so the sum must carry it, through chunks and their merge too."""
    lengths = [(1, 300), (3, 700), (1, 5), (2, 257)] if phase == "decode" else [(70, 70), (5, 300), (33, 129)]
    problem = Problem(lengths, fp8=fp8, head_dim=128, max_items=9, soft_cap=None)
    launchers = kernels(128, BF16, problem.kv_dtype)
    tables, cache = problem.pages()
    starts = problem.starts().tolist()
    for position in (0, 17, 40, 255, 256):
        broken = cache.clone()
        seq = 1
        length = lengths[seq][1]
        page = int(tables[seq, position // problem.block_size])
        broken[page, int(which == "value"), 1, position % problem.block_size, 3] = torch.nan
        got = problem.run(launchers, phase, broken)
        sees = torch.zeros(got.shape[0], problem.num_heads, dtype=torch.bool)
        sees[starts[seq] : starts[seq + 1], problem.group :] = True
        assert length - lengths[seq][0] >= position, "every query sees the position"
        got = got[: starts[-1]]
        expected = sees[: starts[-1]]
        nans = got.isnan()
        assert torch.equal(nans.any(-1), expected)
        assert which == "value" or torch.equal(nans.all(-1), expected)


@pytest.mark.parametrize("phase", PHASES)
def test_same_bits_in_any_order_of_threads(kernels: EmulatedKernels, phase: str) -> None:
    problem = Problem(lengths_of(phase), max_items=10, head_dim=128, window=200)
    launchers, outputs = kernels(128, BF16, BF16), []
    for seed in range(4):
        launchers.seed(seed)
        outputs.append(problem.run(launchers, phase))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("num_seqs", [1, 31, 32, 33, 70])
def test_tile_slots_find_every_sequence(kernels: EmulatedKernels, num_seqs: int) -> None:
    """More sequences than lanes, tiles that end with a sequence and tiles that do not."""
    lengths = [((i * 29) % 41, (i * 29) % 41 + i % 3) for i in range(num_seqs - 1)] + [(128, 130)]
    assert_matches_oracle(Problem(lengths, group=1, num_kv_heads=1, seed=num_seqs), kernels, "prefill")


def schedule_of(
    kernels: EmulatedKernels, lengths: Sequence[tuple[int, int]], max_items: int, window: int = 0
) -> list[int]:
    problem, count = Problem(lengths), len(lengths)
    seq_lens = torch.tensor([n for _, n in lengths], dtype=torch.int32)
    schedule = torch.full((3 + 2 * max_items + count,), -1, dtype=torch.int32)
    longest = max(q for q, _ in lengths)
    kernels(64, BF16, BF16).schedule_decode(problem.starts(), seq_lens, schedule, 0, count, longest, max_items, window)
    return schedule.tolist()


@pytest.mark.parametrize("window", [0, 300, -700])
@pytest.mark.parametrize("num_seqs", [1, 5, 255, 256, 257, 600])
def test_schedule_covers_every_key_once_with_the_shortest_chunks_that_fit(
    kernels: EmulatedKernels, num_seqs: int, window: int
) -> None:
    lengths = [(1 + i % 2, (i * 997) % 5000 + 2 if i % 7 else 1 + i % 2) for i in range(num_seqs)]
    max_items = num_seqs + 40
    words = schedule_of(kernels, lengths, max_items, window)
    (items, chunk), rest = words[:2], words[2:]
    pairs, starts = rest[: 2 * max_items], rest[2 * max_items :]

    def keys(queries: int, length: int) -> int:
        oldest = max(0, length - queries - window + 1) if window > 0 else 0
        if window < 0:
            oldest = (length - queries) // -window * -window
        return length - oldest // 64 * 64

    def needed(size: int) -> list[int]:
        return [max(1, -(-keys(q, n) // size)) for q, n in lengths]

    assert chunk % 64 == 0
    assert chunk >= 256
    assert sum(needed(chunk)) == items <= max_items
    assert chunk == 256 or sum(needed(chunk - 64)) > max_items
    want = [(seq, part) for seq, parts in enumerate(needed(chunk)) for part in range(parts)]
    assert list(zip(pairs[0 : 2 * items : 2], pairs[1 : 2 * items : 2], strict=True)) == want
    assert starts == [sum(needed(chunk)[:i]) for i in range(num_seqs + 1)]


def test_what_cannot_be_served_is_refused(kernels: EmulatedKernels) -> None:
    launchers = kernels(64, BF16, BF16)
    with pytest.raises(RuntimeError, match="1 to 64 rows"):
        Problem([(17, 300)], group=4).run(launchers, "decode")
    with pytest.raises(RuntimeError, match="power of two"):
        Problem([(1, 30)], block_size=24).run(launchers, "prefill")
