"""Sequences that share blocks: the CPU kernels read shared keys once a step, and results stay those of the equation
(and, in the vector kernels, those of each sequence alone, bit for bit)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_backends.cpu import ISAS, CpuBackend, CpuMetadata, Isa
from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer
from attention_backends.reference import ReferenceBackend

Prepared = Callable[[Isa], CpuBackend]
HEADS, KV_HEADS, DIM = 6, 2, 32
PART = 256  # keys: sharing is found in whole parts


@dataclass(frozen=True)
class Branch:
    """A sequence: the first `shared` blocks of an earlier one, then its own."""

    length: int
    queries: int = 1
    parent: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Tree:
    branches: Sequence[Branch]
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    @property
    def layer(self) -> AttentionLayer:
        return AttentionLayer(HEADS, KV_HEADS, DIM, DIM**-0.5, window=self.window, soft_cap=None)

    def tables(self) -> tuple[torch.Tensor, int]:
        """Block tables, and how many blocks there are."""
        rows: list[list[int]] = []
        count = 0
        for branch in self.branches:
            columns = -(-branch.length // self.block_size)
            # The blocks of its queries are its own.
            shared = min(branch.shared, (branch.length - branch.queries) // self.block_size)
            inherited = rows[branch.parent][:shared] if rows else []
            rows.append(inherited + list(range(count, count + columns - len(inherited))))
            count += columns - len(inherited)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))
        table = torch.full((len(rows), max(map(len, rows))), 2**30, dtype=torch.int32)
        for i, row in enumerate(rows):
            table[i, : len(row)] = order[torch.tensor(row)].int()
        return table, count

    def batch(self, table: torch.Tensor, members: Sequence[int]) -> AttentionBatch:
        queries = [self.branches[i].queries for i in members]
        slots = []
        for i in members:
            branch = self.branches[i]
            at = torch.arange(branch.length - branch.queries, branch.length)
            slots.append(table[i].long()[at // self.block_size] * self.block_size + at % self.block_size)
        return AttentionBatch(
            num_seqs=len(members),
            num_tokens=sum(queries),
            max_query_len=max(queries),
            max_seq_len=max(self.branches[i].length for i in members),
            query_start_loc=torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32),
            seq_lens=torch.tensor([self.branches[i].length for i in members], dtype=torch.int32),
            block_tables=table[list(members)],
            slot_mapping=torch.cat(slots),
            block_size=self.block_size,
        )

    def run(
        self, backend: AttentionBackend, members: Sequence[int] | None = None, exact: bool = False
    ) -> list[torch.Tensor]:
        """Outputs of each member [queries, heads, dim], all in one batch (of all where `members` is None)."""
        members = range(len(self.branches)) if members is None else members
        table, count = self.tables()
        generator = torch.Generator().manual_seed(self.seed)
        filled = torch.randn(2, count * self.block_size, KV_HEADS, DIM, generator=generator).to(self.dtype)
        tokens = sum(branch.queries for branch in self.branches)
        drawn = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM, generator=generator).to(self.dtype)
        starts = [0]
        for branch in self.branches:
            starts.append(starts[-1] + branch.queries)
        mine = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in members])
        dtype = torch.float64 if exact else self.dtype
        q, k, v = drawn[mine].to(dtype).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        cache = torch.full(backend.kv_cache_shape(count, self.block_size, KV_HEADS, DIM), float("nan"), dtype=dtype)
        backend.write_kv(*filled.to(dtype), cache, torch.arange(count * self.block_size))
        everyone = self.batch(table, range(len(self.branches)))  # a member's new tokens may be another's prefix
        _, new_k, new_v = drawn.to(dtype).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        backend.write_kv(new_k, new_v, cache, everyone.slot_mapping)
        out = torch.empty(q.shape, dtype=dtype)
        metadata = backend.build_metadata(self.batch(table, members))
        for _ in range(1 if exact else 2):  # the second layer reuses the first one's plan
            out.fill_(7)
            backend.forward(q, k, v, out, cache, self.layer, metadata)
        return list(out.split([self.branches[i].queries for i in members]))

    def summary(self, backend: CpuBackend) -> tuple[int, int, int]:
        table, count = self.tables()
        cache = torch.zeros(backend.kv_cache_shape(count, self.block_size, KV_HEADS, DIM), dtype=self.dtype)
        metadata = backend.build_metadata(self.batch(table, range(len(self.branches))))
        plan = backend.summarise_plan(cache, self.layer, metadata)
        return plan.items, plan.shared_items, plan.keys


def assert_matches_oracle(tree: Tree, backend: CpuBackend) -> None:
    tolerance = 1e-5 if tree.dtype == torch.float32 else 2**-7
    want = tree.run(ReferenceBackend(), exact=True)
    for got, expected in zip(tree.run(backend), want, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    block_size = draw(st.sampled_from([8, 16, 24, 32, 128]))
    branches: list[Branch] = []
    for i in range(draw(st.integers(2, 9))):
        queries = draw(st.sampled_from([1, 1, 1, 2, 5, 10, 11, 40]))
        parent = draw(st.integers(0, max(0, i - 1)))
        own = draw(st.integers(0, 300))
        shared = draw(st.integers(0, 900)) // block_size if i else 0
        available = len(range(0, branches[parent].length, block_size)) if i else 0
        shared = min(shared, available)
        branches.append(Branch(shared * block_size + own + queries, queries, parent, shared))
    window = draw(st.sampled_from([None, None, 300, 700]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float32]))
    return Tree(branches, block_size, window, dtype, draw(st.integers(0, 99)))


@settings(max_examples=settings.default.max_examples // 4)
@given(tree=trees())
def test_random_trees_of_prefixes_give_the_equation(cpu_backend: Prepared, tree: Tree) -> None:
    assert_matches_oracle(tree, cpu_backend("auto"))


@settings(max_examples=settings.default.max_examples // 7)
@given(tree=trees())
def test_vector_kernels_give_the_same_bits_alone_and_beside_those_who_share(cpu_backend: Prepared, tree: Tree) -> None:
    widest = [isa for isa in cpu_backend("auto").supported_isas if isa != "amx"][-1]
    for isa in ("portable", widest):
        backend = cpu_backend(isa)
        together = tree.run(backend)
        for i, got in enumerate(together):
            assert torch.equal(got, tree.run(backend, [i])[0])


@pytest.mark.parametrize("isa", ISAS[1:])
def test_many_decodes_of_one_prompt(cpu_backend: Prepared, isa: Isa) -> None:
    """More rows than one item takes; the members' own parts are all of different lengths."""
    tree = Tree([Branch(545), *(Branch(513 + i, shared=32) for i in range(69))])
    assert_matches_oracle(tree, cpu_backend(isa))
    torch.set_num_threads(2)
    twice = [tree.run(cpu_backend(isa)) for _ in range(2)]
    torch.set_num_threads(1)
    twice.append(tree.run(cpu_backend(isa)))
    assert all(torch.equal(a, b) for other in twice[1:] for a, b in zip(twice[0], other, strict=True))


def test_shared_keys_are_read_once(cpu_backend: Prepared) -> None:
    tree = Tree([Branch(544), *(Branch(544, shared=32) for _ in range(63))])
    vectors, rows = cpu_backend("portable"), 64 * HEADS // KV_HEADS
    items, shared_items, keys = tree.summary(vectors)
    passes = rows // 96  # rows of an item
    assert (shared_items, keys) == (2 * passes, 2 * PART * passes + 64 * 32)
    assert items == shared_items + 64
    apart = replace(tree, branches=[replace(branch, shared=0) for branch in tree.branches])
    assert apart.summary(vectors) == (3 * 64, 0, 64 * 544)
    if "amx" in vectors.supported_isas:
        assert tree.summary(cpu_backend("amx")) == (2 + 64, 2, 2 * PART + 64 * 32)


def test_nested_prefixes_are_shared_at_every_level(cpu_backend: Prepared) -> None:
    """Eight share 256 keys; four of them 512, two 768; each has 20 of its own; another shares nothing."""
    shared = [48, 48, 32, 32, 16, 16, 16, 16]
    tree = Tree([Branch(788), *(Branch(n * 16 + 20, shared=n) for n in shared[1:]), Branch(700)])
    own = sum(n * 16 + 20 for n in shared) + 700
    saved = PART * (7 + 3 + 1)
    _, shared_items, keys = tree.summary(cpu_backend("auto"))
    assert (shared_items, keys) == (3, own - saved)
    assert_matches_oracle(tree, cpu_backend("auto"))


def test_with_a_window_only_parts_that_all_see_whole_are_shared(cpu_backend: Prepared) -> None:
    branches = [Branch(1050), *(Branch(1050 + i, shared=64) for i in range(4))]
    assert Tree(branches).summary(cpu_backend("portable"))[1] == 4
    windowed = Tree(branches, window=700)  # the first key is 351 to 354: parts [512, 768) and [768, 1024)
    assert windowed.summary(cpu_backend("portable"))[1] == 2
    assert_matches_oracle(windowed, cpu_backend("auto"))


def test_long_chunks_keep_to_themselves(cpu_backend: Prepared) -> None:
    branches = [Branch(700), Branch(700, queries=100, shared=30), Branch(700, queries=10, shared=30)]
    tree = Tree(branches)
    assert tree.summary(cpu_backend("portable"))[1] == 1
    assert_matches_oracle(tree, cpu_backend("auto"))


def test_a_new_step_is_cut_anew(cpu_backend: Prepared) -> None:
    """The same tensors with other lengths and blocks, as a runner's buffers have them."""
    backend = cpu_backend("auto")
    tree = Tree([Branch(600), Branch(600, shared=32)])
    table, count = tree.tables()
    cache = torch.randn(backend.kv_cache_shape(count, 16, KV_HEADS, DIM)).bfloat16()
    batch = tree.batch(table, [0, 1])
    q, k, v = (torch.randn(2, heads, DIM).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))

    def attend(metadata: CpuMetadata) -> torch.Tensor:
        out = torch.zeros(q.shape, dtype=q.dtype)
        backend.forward(q, k, v, out, cache, tree.layer, metadata)
        return out

    attend(backend.build_metadata(batch))
    batch.block_tables[1] = batch.block_tables[0]
    batch.block_tables[1, 0] = count - 1
    got = attend(backend.build_metadata(batch))
    assert torch.equal(got, attend(replace(backend.build_metadata(batch), step=0)))
