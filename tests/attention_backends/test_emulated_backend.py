"""`CudaBackend` whole, its kernels run on a CPU, against the oracle in float64 on the same (rounded) inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulated_cuda import EmulatedLaunchers, kernels_in
from hypothesis import given
from hypothesis import strategies as st
from paged_case import Case

from attention_backends.cuda import CudaBackend
from attention_backends.interface import AttentionLayer, AttentionSpec
from attention_backends.reference import ReferenceBackend

FP8 = torch.float8_e4m3fn
BF16, F16 = torch.bfloat16, torch.float16
BLOCK = 16
EDGES = [(1, 1), (1, BLOCK - 1), (1, BLOCK), (1, BLOCK + 1), (0, 0), (0, 5), (BLOCK, BLOCK), (BLOCK + 1,) * 2]
# One-token decodes, short queries over long contexts (served as decodes), prefills with and without a cached prefix.
MIXED = [(1, 300), (1, 33), (1, 1), (4, 600), (2, 513), (37, 37), (5, 261), (40, 90), (0, 7), (2, 2)]
# As for the CPU's kernels: the output's rounding, and that of the probabilities.
RELATIVE = {BF16: 2**-8, F16: 2**-10}
ABSOLUTE = {BF16: 2**-7, F16: 2**-10}
PROCESSORS = 4


class Backends:
    """Prepared backends over emulated kernels; kernels are compiled at first use."""

    def __init__(self, cache: Path) -> None:
        self._kernels = kernels_in(cache)

    def launchers(self, case: Case) -> EmulatedLaunchers:
        return self._kernels(case.head_dim, case.dtype, case.kv_dtype or case.dtype)

    def for_case(self, case: Case, multiprocessors: int = PROCESSORS, seed: int = 1) -> CudaBackend:
        launchers = self.launchers(case)
        launchers.seed(seed)
        backend = CudaBackend(launchers, multiprocessors)
        backend.bind(AttentionSpec(torch.device("cpu"), case.dtype, case.kv_dtype or case.dtype, (case.head_dim,)))
        backend.prepare()
        return backend


@pytest.fixture(scope="session")
def backends(native_cache: Path) -> Backends:
    return Backends(native_cache)


def assert_matches_oracle(case: Case, backend: CudaBackend) -> None:
    got, want = case.run(backend), case.run(ReferenceBackend(), torch.float64)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), want, rtol=RELATIVE[case.dtype], atol=ABSOLUTE[case.dtype])


def case_of(lengths: list[tuple[int, int]], **settings: object) -> Case:
    return replace(Case(lengths, dtype=BF16), **settings)  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("lengths", [EDGES, MIXED], ids=["edges", "mixed"])
@pytest.mark.parametrize("variant", [(None, None), (21, None), (None, 20.0), (70, 5.0)], ids=str)
def test_a_step_gives_the_equation(
    backends: Backends, lengths: list[tuple[int, int]], dtype: torch.dtype, variant: tuple[int | None, float | None]
) -> None:
    case = case_of(lengths, dtype=dtype, window=variant[0], soft_cap=variant[1])
    assert_matches_oracle(case, backends.for_case(case))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=str)
def test_head_dims_and_cache_types(backends: Backends, head_dim: int, kv_dtype: torch.dtype) -> None:
    for window, soft_cap, sinks in [(None, None, False), (50, 8.0, True)]:
        case = case_of(MIXED, head_dim=head_dim, kv_dtype=kv_dtype, window=window, soft_cap=soft_cap, sinks=sinks)
        if kv_dtype == FP8:
            case = replace(case, k_scale=0.5, v_scale=2.0)
        assert_matches_oracle(case, backends.for_case(case))


def test_a_backend_serves_layers_of_several_head_sizes(backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its own library; what is prepared for one kind of layer serves no other."""
    small, large = case_of(MIXED, head_dim=64), case_of(MIXED, head_dim=128)
    libraries = {case.head_dim: backends.launchers(case) for case in (small, large)}
    backend = CudaBackend(libraries[64], PROCESSORS)
    backend.bind(AttentionSpec(torch.device("cpu"), BF16, BF16, (64, 128)))
    backend.prepare()
    monkeypatch.setattr(backend._prepared(), "_launchers", libraries)
    for case in (small, large, small):
        assert_matches_oracle(case, backend)
    with pytest.raises(RuntimeError, match="head_dim 64, 128, not 96"):
        case_of(MIXED, head_dim=96).run(backend)


def test_an_8_bit_cache_under_float16_queries(backends: Backends) -> None:
    case = case_of(MIXED, dtype=F16, kv_dtype=FP8, k_scale=0.25, v_scale=0.5)
    assert_matches_oracle(case, backends.for_case(case))


@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (8, 2), (16, 1), (7, 1), (40, 1), (64, 1)], ids=str)
def test_grouped_query_heads_share_their_kv_head(backends: Backends, heads: tuple[int, int]) -> None:
    lengths = [(1, 300), (1, 33), (2, 530), (70, 90), (3, 3)]
    case = case_of(lengths, num_heads=heads[0], num_kv_heads=heads[1])
    assert_matches_oracle(case, backends.for_case(case))


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_block_sizes_at_their_edges(backends: Backends, block_size: int) -> None:
    edges = [(1, 1), (1, block_size - 1), (1, block_size), (1, block_size + 1), (block_size + 1, 2 * block_size + 1)]
    case = case_of([*edges, (9, 300)], block_size=block_size)
    assert_matches_oracle(case, backends.for_case(case))


def test_a_layer_that_shares_keys_writes_none(backends: Backends) -> None:
    case = case_of(MIXED, shares=True)
    assert_matches_oracle(case, backends.for_case(case))


@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=str)
def test_blocks_may_lie_apart(backends: Backends, kv_dtype: torch.dtype) -> None:
    case = case_of(MIXED, kv_dtype=kv_dtype, apart=3 * 64)
    assert_matches_oracle(case, backends.for_case(case))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, 100, 1000])
def test_window_smaller_and_larger_than_a_block(backends: Backends, window: int) -> None:
    case = case_of([*EDGES, (1, 700), (4, 640), (70, 400)], window=window)
    assert_matches_oracle(case, backends.for_case(case))


@pytest.mark.parametrize("chunk", [1, 40, 512])
def test_a_query_sees_its_chunk_alone(backends: Backends, chunk: int) -> None:
    case = case_of([*EDGES, (1, 700), (4, 640), (70, 400)], chunk=chunk)
    assert_matches_oracle(case, backends.for_case(case))


@pytest.mark.parametrize("multiprocessors", [1, 2, 7, 132])
@pytest.mark.parametrize("window", [None, 1000])
def test_a_decode_is_the_same_however_it_is_split(backends: Backends, multiprocessors: int, window: int | None) -> None:
    lengths = [(1, 4096), (1, 1), (1, 64), (1, 65), (1, 1500), (1, 2), (5, 2049)]
    case = case_of(lengths, num_heads=9, num_kv_heads=3, window=window)
    assert_matches_oracle(case, backends.for_case(case, multiprocessors))


@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_a_graph_padded_with_empty_sequences_leaves_zeros_there(
    backends: Backends, kv_dtype: torch.dtype, window: int | None
) -> None:
    case = case_of([(1, 300), (1, 17), (1, 1)], kv_dtype=kv_dtype, window=window, graph_size=8)
    backend = backends.for_case(case)
    assert_matches_oracle(case, backend)
    assert (case.run(backend)[3:] == 0).all()


def test_sinks_take_their_share(backends: Backends) -> None:
    for window in (None, 30):
        case = case_of(MIXED, sinks=True, window=window)
        assert_matches_oracle(case, backends.for_case(case))


def test_a_negative_scale_is_a_scale(backends: Backends) -> None:
    class Negative(Case):
        @property
        def layer(self) -> AttentionLayer:
            return replace(super().layer, scale=-0.1)

    case = Negative(MIXED, dtype=BF16)
    assert_matches_oracle(case, backends.for_case(case))


def test_sharp_softmax_and_large_scores(backends: Backends) -> None:
    """Scores of several hundred: their float32 rounding is 1e-5 in the exponent; the rest is the output's."""
    case = case_of(MIXED, spread=100.0)
    assert_matches_oracle(case, backends.for_case(case))


@pytest.mark.parametrize("kv_dtype", [BF16, FP8], ids=str)
def test_same_bits_in_every_order_of_threads(backends: Backends, kv_dtype: torch.dtype) -> None:
    """A missing barrier would show: threads, warps and blocks run in another order for each seed."""
    case = case_of(MIXED, kv_dtype=kv_dtype, window=300, soft_cap=10.0, sinks=True)
    outputs = [case.run(backends.for_case(case, seed=seed)) for seed in range(5)]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_layers_with_different_windows_share_one_step(backends: Backends) -> None:
    case = case_of([(1, 700), (1, 90), (3, 650), (40, 60)])
    backend, oracle = backends.for_case(case), ReferenceBackend()
    tables = case.block_tables()
    batch = case.batch(tables)
    metadata = backend.build_metadata(batch)
    for window, chunk in ((None, None), (50, None), (None, 50), (50, None), (600, None), (None, 50), (None, None)):
        layer = replace(case.layer, window=window, chunk=chunk)
        outputs = []
        for each, each_metadata in ((backend, metadata), (oracle, batch)):
            cache = case.empty_cache(each, BF16)
            k, v = case.prefix()
            slots = [case.slots(tables, i, 0, n - q) for i, (q, n) in enumerate(case.lengths)]
            each.write_kv(k, v, cache, torch.cat(slots))
            q, k, v = case.qkv()
            out = torch.zeros(q.shape, dtype=BF16)
            each.forward(q, k, v, out, cache, layer, each_metadata)
            outputs.append(out[: case.num_tokens])
        torch.testing.assert_close(outputs[0], outputs[1], rtol=2**-7, atol=2**-7)


def test_nan_in_one_sequence_stays_there(backends: Backends) -> None:
    case = case_of([(1, 50), (1, 600), (3, 40), (20, 20)])
    backend = backends.for_case(case)
    q, k, v = case.qkv()
    q[1] = float("nan")
    cache = torch.zeros(backend.kv_cache_shape(case.num_blocks, 16, 2, 64), dtype=BF16)
    out = torch.zeros(q.shape, dtype=BF16)
    backend.forward(q, k, v, out, cache, case.layer, backend.build_metadata(case.batch(case.block_tables())))
    assert out[1].isnan().all()
    assert out[0].isfinite().all()
    assert out[2:].isfinite().all()


def test_copied_and_swapped_blocks_attend_like_their_sources(backends: Backends) -> None:
    case = case_of([(1, 40)])
    backend = backends.for_case(case)
    shape = backend.kv_cache_shape(6, 16, 2, 64)
    caches = [torch.full(shape, float("nan"), dtype=BF16) for _ in range(3)]
    elsewhere = [torch.full(shape, float("nan"), dtype=BF16) for _ in range(3)]
    k, v = case.prefix()
    tables = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    for i, cache in enumerate(caches):
        backend.write_kv(k * (i + 1), v * (i + 1), cache, case.slots(tables, 0, 0, 39))
    want = [attend(backend, case, cache.clone(), tables) for cache in caches]
    backend.copy_blocks(caches, [(0, 5), (1, 3), (2, 4)])
    for cache in caches:
        cache[:3] = float("nan")
    backend.swap_blocks(caches, elsewhere, [(5, 1), (3, 2), (4, 0)])
    moved = torch.tensor([[5, 3, 4]], dtype=torch.int32), torch.tensor([[1, 2, 0]], dtype=torch.int32)
    for held, table in zip((caches, elsewhere), moved, strict=True):
        for cache, expected in zip(held, want, strict=True):
            assert torch.equal(attend(backend, case, cache, table), expected)
    backend.copy_blocks(caches, [])


def attend(backend: CudaBackend, case: Case, cache: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    q, k, v = case.qkv()
    out = torch.zeros(q.shape, dtype=q.dtype)
    backend.forward(q, k, v, out, cache, case.layer, backend.build_metadata(case.batch(tables)))
    return out[: case.num_tokens]


@st.composite
def lengths_of_a_step(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Decodes, then anything."""
    decodes = [(1, draw(st.integers(1, 700))) for _ in range(draw(st.integers(0, 4)))]
    others = []
    for _ in range(draw(st.integers(0 if decodes else 1, 4))):
        queries = draw(st.sampled_from([2, 3, 4, 7, 16, 33, 70]))
        others.append((queries, queries + draw(st.sampled_from([0, 0, 1, 15, 100, 520]))))
    return decodes + others


@given(
    lengths=lengths_of_a_step(),
    heads=st.sampled_from([(4, 2), (1, 1), (6, 2), (16, 1)]),
    block_size=st.sampled_from([16, 64]),
    window=st.sampled_from([None, None, 1, 16, 47, 300, -1, -40, -256]),
    soft_cap=st.sampled_from([None, None, 7.0]),
    sinks=st.booleans(),
    kv_dtype=st.sampled_from([BF16, FP8]),
    multiprocessors=st.sampled_from([1, 3, 132]),
    seed=st.integers(0, 2**31),
)
def test_any_step(
    backends: Backends,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    sinks: bool,
    kv_dtype: torch.dtype,
    multiprocessors: int,
    seed: int,
) -> None:
    """`window`: less than 0 a chunk."""
    span = {"chunk": -window} if window is not None and window < 0 else {"window": window}
    case = case_of(lengths, num_heads=heads[0], num_kv_heads=heads[1], block_size=block_size, seed=seed, **span)
    case = replace(case, soft_cap=soft_cap, sinks=sinks, kv_dtype=kv_dtype)
    assert_matches_oracle(case, backends.for_case(case, multiprocessors, seed))
