"""A row's bits depend on its keys alone: computed in one prompt, in any chunks, as decodes, alone or beside others,
whatever the batch shares, on any number of threads. Of the vector kernels: tiles (AMX) add in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_backends.cpu import ISAS, CpuBackend, Isa
from attention_backends.interface import AttentionBackend, AttentionBatch, AttentionLayer, AttentionSpec

VECTOR_ISAS = [isa for isa in ISAS[1:] if isa != "amx"]
KV_DTYPES = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    None: torch.int8,
}
KV_HEADS = 2


@pytest.fixture(scope="module", params=VECTOR_ISAS)
def backends(
    request: pytest.FixtureRequest, cpu_backend: Callable[[Isa], CpuBackend], kernel_cache: Path
) -> dict[torch.dtype, CpuBackend]:
    """By the dtype of the cache, of one ISA."""
    backend = cpu_backend(request.param)
    for_int8 = CpuBackend(request.param)
    for_int8.bind(AttentionSpec(torch.device("cpu"), torch.bfloat16, torch.int8, (64,)))
    for_int8.prepare(kernel_cache)
    return {dtype: for_int8 if dtype == torch.int8 else backend for dtype in KV_DTYPES.values()}


@dataclass(frozen=True)
class Sequences:
    """Keys of some sequences in pages of one cache; the later ones begin with the blocks of the first."""

    lengths: Sequence[int]
    shared: int
    """blocks"""
    queries: int
    """of the first sequence, at its end"""
    group: int
    dim: int
    block_size: int
    kv_dtype: torch.dtype
    layer_options: dict[str, object] = field(default_factory=dict)
    seed: int = 0
    lost: int | None = None
    """a position of the first sequence whose key scores -inf"""

    @property
    def layer(self) -> AttentionLayer:
        heads = KV_HEADS * self.group
        return AttentionLayer(heads, KV_HEADS, self.dim, self.dim**-0.5, shares=0, **self.layer_options)  # type: ignore[arg-type]

    def outputs(self, backend: AttentionBackend, cuts: Sequence[int], beside: int) -> torch.Tensor:
        """[queries, heads, dim] of the first sequence, whose queries are cut at `cuts` into steps, `beside` so many
        others that decode."""
        dtype = torch.bfloat16 if self.kv_dtype.itemsize == 1 else self.kv_dtype
        torch.manual_seed(self.seed)
        tables, blocks = self._tables()
        k, v = (torch.randn(blocks * self.block_size, KV_HEADS, self.dim).to(dtype) for _ in range(2))
        q = torch.randn(self.queries + len(self.lengths), self.layer.num_heads, self.dim).to(dtype) * 2
        if self.lost is not None:
            slot = int(tables[0, self.lost // self.block_size]) * self.block_size + self.lost % self.block_size
            k[slot, :, 0], q[..., 0] = -torch.inf, 1
        shape = backend.kv_cache_shape(blocks, self.block_size, KV_HEADS, self.dim)
        cache = torch.zeros(shape, dtype=self.kv_dtype)
        backend.write_kv(k, v, cache, torch.arange(blocks * self.block_size))
        found = []
        for begin, end in pairwise([0, *cuts, self.queries]):
            rows = torch.cat([q[begin:end], q[self.queries : self.queries + beside]])
            lengths = [self.lengths[0] - self.queries + end, *self.lengths[1 : 1 + beside]]
            batch = self._batch([end - begin] + [1] * beside, lengths, self._left(tables, [end - begin], lengths))
            out = torch.empty_like(rows)
            backend.forward(rows, rows, rows, out, cache, self.layer, backend.build_metadata(batch))
            found.append(out[: end - begin])
        return torch.cat(found)

    def _tables(self) -> tuple[torch.Tensor, int]:
        columns = [-(-length // self.block_size) for length in self.lengths]
        tables = torch.full((len(columns), max(columns)), 2**30, dtype=torch.int32)
        count = 0
        for i, columns_of in enumerate(columns):
            shared = min(self.shared, columns_of, columns[0]) if i else 0
            tables[i, :shared] = tables[0, :shared]
            tables[i, shared:columns_of] = torch.arange(count, count + columns_of - shared)
            count += columns_of - shared
        order = torch.randperm(count, dtype=torch.int32)
        return torch.where(tables < count, order[tables.clamp(max=count - 1).long()], tables), count

    def _left(self, tables: torch.Tensor, queries: list[int], lengths: list[int]) -> torch.Tensor:
        """Without the blocks that no query of this step sees any more."""
        left, layer = tables.clone(), self.layer
        for i, length in enumerate(lengths):
            position = length - (queries[0] if i == 0 else 1)
            oldest = 0 if layer.window is None else max(0, position - layer.window + 1)
            if layer.chunk is not None:
                oldest = position - position % layer.chunk
            left[i, : oldest // self.block_size] = 2**30
        return left

    def _batch(self, queries: list[int], lengths: list[int], tables: torch.Tensor) -> AttentionBatch:
        return AttentionBatch(
            num_seqs=len(queries),
            num_tokens=sum(queries),
            max_query_len=max(queries),
            max_seq_len=max(lengths),
            query_start_loc=torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=tables[: len(queries)].contiguous(),
            slot_mapping=torch.full((sum(queries),), -1),
            block_size=self.block_size,
        )


@st.composite
def sequences(draw: st.DrawFn) -> Sequences:
    queries = draw(st.integers(1, 60) | st.integers(1, 700))
    block_size = draw(st.sampled_from([16, 32, 48, 128]))
    options: dict[str, object] = draw(
        st.sampled_from([{}, {}, {"window": 100}, {"window": 600}, {"chunk": 300}, {"soft_cap": 20.0}])
    )
    group = draw(st.sampled_from([1, 3, 4, 8]))
    if draw(st.booleans()):
        options = options | {"sinks": torch.linspace(-2, 2, KV_HEADS * group)}
    others = draw(st.lists(st.integers(1, 900), max_size=4))
    length = queries + draw(st.integers(0, 50) | st.integers(0, 1400))
    return Sequences(
        [length, *others],
        draw(st.integers(0, 900)) // block_size,
        queries,
        group,
        draw(st.sampled_from([32, 64, 72])),
        block_size,
        KV_DTYPES[draw(st.sampled_from(list(KV_DTYPES)))],
        options,
        draw(st.integers(0, 99)),
    )


@settings(max_examples=settings().max_examples // 4)
@given(data=st.data())
def test_a_rows_bits_depend_on_its_keys_alone(backends: dict[torch.dtype, CpuBackend], data: st.DataObject) -> None:
    these = data.draw(sequences())
    backend = backends[these.kv_dtype]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, these.queries - 1)), max_size=9)) - {these.queries})
    last = range(max(1, these.queries - 5), these.queries)  # as decodes
    whole = these.outputs(backend, [], 0)
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    for steps in (cuts, last):
        found = these.outputs(backend, list(steps), data.draw(st.integers(0, len(these.lengths) - 1)))
        assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tile_of_keys_that_all_score_minus_infinity_counts_nothing(
    backends: dict[torch.dtype, CpuBackend], dtype: torch.dtype
) -> None:
    """The only key of the second tile is such a one, seen by the last query."""
    these = Sequences([257], 0, 3, 4, 64, 16, dtype, lost=256)
    for cuts in ([], [1, 2]):
        assert these.outputs(backends[dtype], cuts, 0).isfinite().all()
