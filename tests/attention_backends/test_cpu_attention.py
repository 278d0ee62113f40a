"""The C++ kernels against the oracle, computed in float64 on the same (rounded) inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from paged_case import Case

from attention_backends.cpu import ISAS, CpuBackend, Isa
from attention_backends.interface import AttentionLayer
from attention_backends.reference import ReferenceBackend

Prepared = Callable[[Isa], CpuBackend]

BLOCK = 16
EDGE_LENGTHS = [(1, 1), (1, BLOCK - 1), (1, BLOCK), (1, BLOCK + 1), (0, 0), (0, 5), (BLOCK, BLOCK), (BLOCK + 1,) * 2]
MIXED = [(1, 300), (1, 33), (37, 37), (5, 261), (1, 1), (40, 90), (0, 7), (2, 2)]
# Output rounding is half a unit in the last place; rounding probabilities (bfloat16 only) adds as much again per key,
# averaged over keys, relative to the values' magnitude.
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}
ABSOLUTE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def assert_matches_oracle(case: Case, backend: CpuBackend) -> None:
    got = case.run(backend)
    want = case.run(ReferenceBackend(), torch.float64)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), want, rtol=RELATIVE[case.dtype], atol=ABSOLUTE[case.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", ISAS[1:])
@pytest.mark.parametrize("lengths", [EDGE_LENGTHS, MIXED], ids=["edges", "mixed"])
def test_every_isa_and_dtype_gives_the_equation(
    cpu_backend: Prepared, isa: Isa, dtype: torch.dtype, lengths: list[tuple[int, int]]
) -> None:
    for window, soft_cap in [(None, None), (21, None), (None, 20.0), (70, 5.0)]:
        case = Case(lengths, dtype=dtype, window=window, soft_cap=soft_cap, block_size=BLOCK)
        assert_matches_oracle(case, cpu_backend(isa))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", ISAS[1:])
def test_a_sink_joins_once_however_keys_are_split(cpu_backend: Prepared, isa: Isa, dtype: torch.dtype) -> None:
    """Lengths of one part and of several, of one tile of rows and of several, and no queries at all."""
    lengths = [*MIXED, (1, 1500), (150, 1300)]
    for window, soft_cap in [(None, None), (21, None), (None, 20.0), (600, 5.0)]:
        case = Case(lengths, dtype=dtype, window=window, soft_cap=soft_cap, sinks=True)
        assert_matches_oracle(case, cpu_backend(isa))
    assert_matches_oracle(Case(lengths, num_heads=8, num_kv_heads=1, dtype=dtype, sinks=True), cpu_backend(isa))


@pytest.mark.parametrize("isa", ISAS[1:])
@pytest.mark.parametrize("sink", [-1e30, -90.0, 90.0, 1e30])
def test_sinks_far_from_all_scores(cpu_backend: Prepared, isa: Isa, sink: float) -> None:
    class Far(Case):
        @property
        def layer(self) -> AttentionLayer:
            return replace(super().layer, sinks=torch.full((self.num_heads,), sink))

    assert_matches_oracle(Far([(1, 700), (40, 90)], dtype=torch.bfloat16), cpu_backend(isa))


def test_sinks_of_another_shape_are_refused(cpu_backend: Prepared) -> None:
    class Wrong(Case):
        @property
        def layer(self) -> AttentionLayer:
            return replace(super().layer, sinks=torch.zeros(self.num_heads - 1))

    with pytest.raises(RuntimeError, match="sinks must be a contiguous float32 tensor of 4 elements"):
        Wrong([(1, 5)]).run(cpu_backend("auto"))


def test_a_layer_that_shares_keys_writes_none(cpu_backend: Prepared) -> None:
    assert_matches_oracle(Case(MIXED, shares=True), cpu_backend("auto"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_blocks_may_lie_apart(cpu_backend: Prepared, dtype: torch.dtype) -> None:
    for isa in cpu_backend("auto").supported_isas:
        assert_matches_oracle(Case(MIXED, dtype=dtype, apart=3 * 64), cpu_backend(isa))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (8, 2), (16, 2), (7, 1), (128, 1)], ids=str)
def test_grouped_query_heads_share_their_kv_head(
    cpu_backend: Prepared, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    assert_matches_oracle(Case(MIXED, num_heads=heads[0], num_kv_heads=heads[1], dtype=dtype), cpu_backend("auto"))


@pytest.mark.parametrize("isa", ISAS[1:])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 80, 96, 128, 256, 504, 512])
def test_head_dims(cpu_backend: Prepared, head_dim: int, isa: Isa) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert_matches_oracle(Case(MIXED, head_dim=head_dim, dtype=dtype), cpu_backend(isa))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 64, 128])
def test_block_sizes_at_their_edges(cpu_backend: Prepared, block_size: int, dtype: torch.dtype) -> None:
    edges = [(1, 1), (1, block_size - 1), (1, block_size), (1, block_size + 1), (block_size + 1, 2 * block_size + 1)]
    for isa in cpu_backend("auto").supported_isas:
        assert_matches_oracle(Case([*edges, *MIXED], block_size=block_size, dtype=dtype), cpu_backend(isa))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [1, 2, 3, 15, 16, 17, 100, 1000])
def test_window_smaller_and_larger_than_a_block(cpu_backend: Prepared, window: int, dtype: torch.dtype) -> None:
    for isa in cpu_backend("auto").supported_isas:
        assert_matches_oracle(Case([*EDGE_LENGTHS, *MIXED, (70, 700)], window=window, dtype=dtype), cpu_backend(isa))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 16, 40, 300, 1000])
def test_a_query_sees_its_chunk_alone(cpu_backend: Prepared, chunk: int, dtype: torch.dtype) -> None:
    for isa in cpu_backend("auto").supported_isas:
        assert_matches_oracle(Case([*EDGE_LENGTHS, *MIXED, (70, 700)], chunk=chunk, dtype=dtype), cpu_backend(isa))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1000])
def test_long_context_decode_and_chunk(cpu_backend: Prepared, dtype: torch.dtype, window: int | None) -> None:
    lengths = [(1, 4096), (1, 4095), (70, 4096), (1, 257), (1, 256)]
    assert_matches_oracle(Case(lengths, num_heads=9, num_kv_heads=3, dtype=dtype, window=window), cpu_backend("auto"))


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("isa", ISAS[1:])
def test_row_counts_at_the_edges_of_tiles(cpu_backend: Prepared, isa: Isa, window: int | None) -> None:
    """3 rows a query: 12 rows, 16 +- 1, 32 +- 1 and 384 are where items change kernels, tiles, passes and parts."""
    lengths = [(n, n + prefix) for n, prefix in ((3, 7), (4, 300), (5, 11), (6, 255), (10, 1), (11, 256), (16, 1100))]
    lengths += [(128, 128), (128, 1060), (129, 300), (300, 301)]
    assert_matches_oracle(
        Case(lengths, num_heads=3, num_kv_heads=1, dtype=torch.bfloat16, window=window), cpu_backend(isa)
    )


@pytest.mark.parametrize("isa", ISAS[1:])
def test_a_negative_scale_is_a_scale(cpu_backend: Prepared, isa: Isa) -> None:
    class Negative(Case):
        @property
        def layer(self) -> AttentionLayer:
            return replace(super().layer, scale=-0.1)

    assert_matches_oracle(Negative(MIXED, dtype=torch.bfloat16), cpu_backend(isa))


def test_whole_prompt_of_4096(cpu_backend: Prepared) -> None:
    assert_matches_oracle(Case([(4096, 4096)], num_heads=2, num_kv_heads=1, dtype=torch.bfloat16), cpu_backend("auto"))


@pytest.mark.parametrize("isa", ISAS[1:])
def test_sharp_softmax_and_large_scores(cpu_backend: Prepared, isa: Isa) -> None:
    # Scores of several hundred: float32 scores are good to 1e-7 of their size, and so is the exponent's argument.
    case = Case(MIXED, spread=100.0)
    got, want = case.run(cpu_backend(isa)), case.run(ReferenceBackend(), torch.float64)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("isa", [isa for isa in ISAS[1:] if isa != "amx"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_huge_equal_scores_weigh_all_keys_alike(
    cpu_backend: Prepared, isa: Isa, dtype: torch.dtype, head_dim: int
) -> None:
    """Scores of 1e10 and more: what is subtracted from them must have been rounded as they were. (AMX subtracts from
    a fused product; it is left out until there is a machine to change it on.)"""

    class Huge(Case):
        def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            q, k, v = super().qkv()
            return q.fill_(60000.0), k.fill_(60000.0), v

        def prefix(self) -> tuple[torch.Tensor, torch.Tensor]:
            k, v = super().prefix()
            return k.fill_(60000.0), v

    assert_matches_oracle(Huge([(1, 40), (40, 90), (1, 700)], dtype=dtype, head_dim=head_dim), cpu_backend(isa))


def test_same_bits_on_one_and_on_two_threads(cpu_backend: Prepared) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = Case([(1, 4096), (130, 900), (1, 700)], num_heads=9, num_kv_heads=3, dtype=dtype)
        outputs = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(case.run(cpu_backend("auto")))
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_same_bits_alone_and_in_a_batch(cpu_backend: Prepared) -> None:
    """A sequence does not see its neighbours: permuting the batch permutes the rows."""
    alone = Case([(1, 777)], dtype=torch.bfloat16, seed=5)
    both = replace(alone, lengths=[(1, 777), (1, 777)])
    q, k, v = alone.qkv()
    backend = cpu_backend("auto")
    tables = alone.block_tables()
    cache = torch.zeros(backend.kv_cache_shape(alone.num_blocks, 16, 2, 64), dtype=torch.bfloat16)
    backend.write_kv(*alone.prefix(), cache, alone.slots(tables, 0, 0, 776))
    single, doubled = torch.zeros(4, 4, 64).bfloat16(), torch.zeros(4, 4, 64).bfloat16()
    backend.forward(q, k, v, single, cache, alone.layer, backend.build_metadata(alone.batch(tables)))
    # Two sequences over one shared table, the same token twice: both write the same slot with the same bits.
    twice = [x[:1].expand(4, -1, -1) for x in (q, k, v)]
    shared = backend.build_metadata(both.batch(tables.expand(2, -1)))
    backend.forward(twice[0], twice[1], twice[2], doubled, cache, alone.layer, shared)
    assert torch.equal(doubled[0], single[0])
    assert torch.equal(doubled[1], single[0])


def test_nan_in_one_sequence_stays_there(cpu_backend: Prepared) -> None:
    case = Case([(3, 40), (1, 50), (20, 20)])
    q, k, v = case.qkv()
    backend = cpu_backend("auto")
    tables = case.block_tables()
    cache = torch.zeros(backend.kv_cache_shape(case.num_blocks, 16, 2, 64))
    q[3] = float("nan")
    out = torch.zeros(24 + 3, 4, 64)
    backend.forward(q, k, v, out, cache, case.layer, backend.build_metadata(case.batch(tables)))
    assert out[3].isnan().all()
    assert out[:3].isfinite().all()
    assert out[4:24].isfinite().all()
