"""The FlashInfer backend against the oracle, on fakes that compute from exactly what `plan` and `run` were given."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from dataclasses import replace

import pytest
import torch
from fake_flashinfer import FakeDecodeWrapper, FakePrefillWrapper, fake_runtime
from paged_case import Case

from attention_backends import flashinfer_library, flashinfer_plans
from attention_backends.flashinfer import FlashInferBackend
from attention_backends.flashinfer_plans import PlanKind, float_bytes, graph_int_bytes
from attention_backends.interface import AttentionBatch, AttentionLayer, AttentionSpec
from attention_backends.reference import ReferenceBackend
from attention_backends.registry import NoBackendError, select

FP8 = torch.float8_e4m3fn
DECODES = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 300), (1, 33)]
MIXED = [*DECODES, (16, 16), (0, 0), (37, 37), (5, 261), (1, 5), (0, 7), (40, 90), (2, 2)]
PREFILLS = [(17, 17), (1, 40), (64, 200)]
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-10}


def prepared(only_longest: bool = False) -> FlashInferBackend:
    backend = FlashInferBackend(fake_runtime(only_longest=only_longest))
    backend.prepare()
    return backend


def assert_matches_oracle(case: Case, backend: FlashInferBackend) -> None:
    got, want = case.run(backend), case.run(ReferenceBackend(), torch.float64)
    assert got.isfinite().all()
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [DECODES, MIXED, PREFILLS], ids=["decodes", "mixed", "prefills"])
def test_every_kind_of_batch_gives_the_equation(lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    for only_longest in (False, True):
        backend = prepared(only_longest=only_longest)
        for window, soft_cap in [(None, None), (21, None), (1, None), (None, 20.0), (70, 5.0)]:
            assert_matches_oracle(Case(lengths, dtype=dtype, window=window, soft_cap=soft_cap), backend)


@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (7, 1), (16, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_heads_and_their_sizes(heads: tuple[int, int], head_dim: int) -> None:
    case = Case(MIXED, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, dtype=torch.bfloat16, apart=128)
    assert_matches_oracle(case, prepared())


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
def test_block_sizes_at_their_edges(block_size: int) -> None:
    edges = [(1, n) for n in (1, block_size - 1, block_size, block_size + 1, 2 * block_size)]
    for window in (None, block_size - 1, block_size, block_size + 1):
        case = Case([*edges, *MIXED], block_size=block_size, dtype=torch.bfloat16, window=window)
        assert_matches_oracle(case, prepared())


@pytest.mark.parametrize("window", [None, 21])
def test_8_bit_caches_with_scales(window: int | None) -> None:
    for graph_size, lengths in ((None, MIXED), (8, DECODES)):
        case = Case(lengths, dtype=torch.bfloat16, window=window, graph_size=graph_size)
        assert_matches_oracle(replace(case, kv_dtype=FP8, k_scale=0.5, v_scale=4.0), prepared())


@pytest.mark.parametrize("size", [6, 8, 16])
@pytest.mark.parametrize("window", [None, 21])
def test_graph_sizes_with_padding_leave_zeros_in_padded_rows(size: int, window: int | None) -> None:
    case = Case(DECODES, dtype=torch.bfloat16, window=window, graph_size=size)
    backend = prepared()
    assert_matches_oracle(case, backend)
    assert not case.run(backend)[len(DECODES) :].any()
    assert not Case([], dtype=torch.bfloat16, graph_size=size).run(backend).any()


def test_lengths_on_the_device_are_never_read() -> None:
    class Poisoned(FlashInferBackend):
        def build_metadata(self, batch: AttentionBatch) -> flashinfer_plans.Step:
            unknown = torch.full_like(batch.seq_lens, -(10**9))
            return super().build_metadata(
                replace(batch, seq_lens=unknown, query_start_loc=torch.full_like(batch.query_start_loc, -(10**9)))
            )

    backend = Poisoned(fake_runtime())
    backend.prepare()
    for case in (Case(MIXED, dtype=torch.bfloat16), Case(DECODES, dtype=torch.bfloat16, window=9, graph_size=8)):
        assert_matches_oracle(case, backend)


def test_copy_blocks_copies_in_every_cache_and_nothing_else() -> None:
    caches = [torch.randn(6, 2, heads, 16, 64) for heads in (1, 2, 1)]
    before = [cache.clone() for cache in caches]
    prepared().copy_blocks(caches, [(0, 3), (0, 5), (2, 1)])
    prepared().copy_blocks(caches, [])
    with pytest.raises(ValueError, match="outside a cache of 6 blocks"):
        prepared().copy_blocks(caches, [(0, 6)])
    for cache, old in zip(caches, before):
        assert torch.equal(cache[[3, 5, 1]], old[[0, 0, 2]])
        assert torch.equal(cache[[0, 2, 4]], old[[0, 2, 4]])


def test_what_the_library_would_drop_or_cannot_do_is_refused() -> None:
    refusals = [
        ({"needs_sinks": True}, "has no attention sinks"),
        ({"head_dims": [64, 96]}, "has no head_dim 96"),
        ({"block_size": 8}, "has no block_size 8"),
        ({"dtype": torch.float32}, "has no torch.float32"),
        ({"device": "cpu"}, "not on cpu"),
        ({"kv_dtype": torch.float8_e5m2}, "has no torch.float8_e5m2 KV cache"),
    ]
    good = {"device": "cuda", "dtype": torch.bfloat16, "head_dims": [64], "block_size": 16}
    for asked, reason in refusals:
        with pytest.raises(NoBackendError, match=reason):
            select(**{**good, **asked}, needs_window=True, needs_soft_cap=True, name="flashinfer")
    backend = prepared()
    metadata = backend.build_metadata(Case(DECODES).batch(Case(DECODES).block_tables()))
    layer = AttentionLayer(4, 2, 64, 1.0, sinks=torch.zeros(4))
    nothing = torch.zeros(6, 4, 64)
    with pytest.raises(ValueError, match="ignores attention sinks"):
        backend.forward(nothing, nothing, nothing, nothing, nothing, layer, metadata)


def test_a_missing_or_old_library_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert FlashInferBackend.unavailable() == "flashinfer-python is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    for version, reason in (("0.6.17", "at least 0.6.18"), ("0.6.18.post1", "CUDA"), ("0.10.0rc1", "CUDA")):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert reason in str(FlashInferBackend.unavailable())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "7.5" in str(FlashInferBackend.unavailable())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert FlashInferBackend.unavailable() is None
    assert flashinfer_library.version_numbers("0.6.18.post1") == (0, 6, 18)


def test_a_library_that_cannot_compile_fails_in_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(torch.device("cpu"), torch.bfloat16, FP8, (64,))
    backend = FlashInferBackend(fake_runtime())
    backend.bind(spec)
    backend.prepare()

    def plan(*args: object, **more: object) -> None:
        raise FileNotFoundError("nvcc")

    monkeypatch.setattr(FakeDecodeWrapper, "plan", plan)
    with pytest.raises(RuntimeError, match="does not build its kernels here: nvcc"):
        backend.prepare()


def test_host_lengths_are_asked_for_and_prepare_too() -> None:
    batch = Case(DECODES).batch(Case(DECODES).block_tables())
    with pytest.raises(ValueError, match="query_lens_host and seq_lens_host"):
        prepared().build_metadata(replace(batch, query_lens_host=(), seq_lens_host=()))
    with pytest.raises(RuntimeError, match=r"prepare\(\)"):
        FlashInferBackend().build_metadata(batch)


def test_workspace_bounds_follow_the_librarys_grid() -> None:
    """Figures worked out by hand for 132 multiprocessors (at most 264 blocks) from the library's planner."""
    kind = PlanKind(32, 8, 128, 16, torch.bfloat16, torch.bfloat16, 1.0, None, None)
    assert float_bytes(kind, 132, None) >= 32 * (264 // 8) * 128 * 129 * 4
    # 512 sequences x 4 heads a group = 128 tiles of 16 rows, and one for each sequence but one that may be cut
    assert float_bytes(kind, 132, 512) >= 32 * (128 + 511) * 16 * 129 * 4
    assert float_bytes(kind, 132, 1) >= 32 * 33 * 16 * 129 * 4
    assert graph_int_bytes(kind, 132, 512) >= (128 + 511) * 13 + 513 * 8
    assert graph_int_bytes(kind, 132, 512) < 1 << 16


def test_the_fakes_take_what_the_real_wrappers_take() -> None:
    flashinfer = pytest.importorskip("flashinfer", exc_type=ImportError)
    pairs = (
        (FakeDecodeWrapper, flashinfer.BatchDecodeWithPagedKVCacheWrapper),
        (FakePrefillWrapper, flashinfer.BatchPrefillWithPagedKVCacheWrapper),
    )
    for fake, real in pairs:
        for method in ("__init__", "plan", "run", "reset_workspace_buffer"):
            theirs = getattr(real, "_plan_impl", None) if method == "plan" else None
            ours = inspect.signature(getattr(fake, method)).parameters
            real_parameters = inspect.signature(theirs or getattr(real, method)).parameters
            assert set(ours) <= set(real_parameters), (fake, method)
            in_order = [
                name
                for name in real_parameters
                if name in ours and ours[name].kind is not inspect.Parameter.KEYWORD_ONLY
            ]
            expected = [name for name, each in ours.items() if each.kind is not inspect.Parameter.KEYWORD_ONLY]
            if method in ("plan", "run"):
                assert in_order == expected == list(real_parameters)[: len(expected)], (fake, method)
