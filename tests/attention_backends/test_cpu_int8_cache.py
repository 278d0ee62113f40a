"""The CPU's int8 KV cache: exact against the oracle on dequantised values, close to it on the original ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged_case import Case

from attention_backends.cpu import ISAS, CpuBackend, Isa
from attention_backends.interface import AttentionSpec
from attention_backends.reference import ReferenceBackend
from attention_backends.registry import NoBackendError, select

MIXED = [(1, 300), (1, 33), (37, 37), (5, 261), (1, 1), (40, 90), (0, 7), (2, 2), (150, 700)]
CPU = torch.device("cpu")
BF16, INT8 = torch.bfloat16, torch.int8

Bound = Callable[[Isa], CpuBackend]


@pytest.fixture(scope="module")
def int8_backend(cpu_backend: Callable[[Isa], CpuBackend], kernel_cache: Path) -> Bound:
    def bound(isa: Isa) -> CpuBackend:
        cpu_backend(isa)  # skips where the CPU lacks it
        backend = CpuBackend(isa)
        backend.bind(AttentionSpec(CPU, BF16, INT8, (64,)))
        backend.prepare(kernel_cache)
        return backend

    return bound


def case_of(lengths: list[tuple[int, int]], **changes: object) -> Case:
    return replace(Case(lengths, dtype=BF16, kv_dtype=INT8), **changes)  # type: ignore[arg-type]  # checked by Case


def assert_matches_oracle(case: Case, backend: CpuBackend) -> None:
    """Keys and values are the cache's to the last bit; what differs is bfloat16 output, and probabilities where they
    are bfloat16, as in a bfloat16 cache."""
    got = case.run(backend)
    want = case.run(ReferenceBackend(), torch.float64)
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=2**-7)


@pytest.mark.parametrize("isa", ISAS[1:])
def test_every_isa_gives_the_equation_on_dequantised_values(int8_backend: Bound, isa: Isa) -> None:
    for window, soft_cap in [(None, None), (21, None), (None, 20.0), (70, 5.0)]:
        for sinks in (False, True):
            case = case_of(MIXED, window=window, soft_cap=soft_cap, sinks=sinks)
            assert_matches_oracle(case, int8_backend(isa))


@pytest.mark.parametrize("isa", ISAS[1:])
@pytest.mark.parametrize("shape", [(8, 8), (40, 24), (72, 32), (80, 64), (128, 16), (256, 128), (512, 16)], ids=str)
def test_head_dims_and_block_sizes(int8_backend: Bound, shape: tuple[int, int], isa: Isa) -> None:
    for heads, apart in (((4, 2), 0), ((9, 3), 0), ((16, 1), 0), ((4, 2), 192)):
        sizes = {"head_dim": shape[0], "block_size": shape[1], "apart": apart}
        case = case_of(MIXED, num_heads=heads[0], num_kv_heads=heads[1], **sizes)
        assert_matches_oracle(case, int8_backend(isa))


@pytest.mark.parametrize("isa", ISAS[1:])
def test_close_to_unquantised_attention(int8_backend: Bound, isa: Isa) -> None:
    """Rounding errs by at most 1/254 of a token's largest element: with unit normal keys, values and queries, scores by
    about 0.01 each, outputs (averages over many keys) far less than a value's own error."""
    case = case_of(MIXED)
    got = case.run(int8_backend(isa)).double()
    want = replace(case, kv_dtype=None).run(ReferenceBackend(), torch.float64)
    assert (got - want).abs().max() < 0.05
    assert (got - want).norm() < 0.015 * want.norm()


@pytest.mark.parametrize("isa", ISAS[1:])
def test_extreme_tokens_quantise_on_their_own(int8_backend: Bound, isa: Isa) -> None:
    """A token's scale is its own: zeros stay zeros, and a huge value coarsens no other token."""
    backend = int8_backend(isa)
    case = case_of([(1, 40)], num_heads=2, num_kv_heads=1)
    tables = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    cache = torch.zeros(backend.kv_cache_shape(3, 16, 1, 64), dtype=INT8)
    k, v = case.prefix()
    v[3], v[5] = 0, 1e30
    k[5] = -100 * case.qkv()[0][0].sum(dim=0)  # nobody looks at the huge value
    backend.write_kv(k, v, cache, case.slots(tables, 0, 0, 39))
    q, own_k, own_v = case.qkv()
    out = torch.zeros(q.shape, dtype=BF16)
    q[:, 1] = q[:, 0]
    backend.forward(q, own_k, own_v, out, cache, case.layer, backend.build_metadata(case.batch(tables)))
    assert out[0].isfinite().all()
    assert out[0].abs().max() < 5


@pytest.mark.parametrize("isa", ["portable", "auto"])
def test_a_nan_stays_in_its_sequence(int8_backend: Bound, isa: Isa) -> None:
    backend, case = int8_backend(isa), case_of([(1, 40), (20, 50), (1, 60)])
    q, k, v = case.qkv()
    k[5, 0, 3] = float("nan")  # a token of the second sequence
    tables = case.block_tables()
    cache = torch.zeros(backend.kv_cache_shape(case.num_blocks, 16, 2, 64), dtype=INT8)
    out = torch.zeros(q.shape, dtype=BF16)
    backend.forward(q, k, v, out, cache, case.layer, backend.build_metadata(case.batch(tables)))
    assert out[0].isfinite().all()
    assert out[21].isfinite().all()
    assert out[20].isnan().any()


def test_same_bits_on_one_and_on_two_threads(int8_backend: Bound) -> None:
    case = case_of([(1, 4096), (130, 900), (1, 700)], num_heads=9, num_kv_heads=3)
    outputs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        outputs.append(case.run(int8_backend("auto")))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_copied_blocks_carry_their_scales(int8_backend: Bound) -> None:
    backend, case = int8_backend("auto"), case_of([(1, 40)])
    tables, moved = torch.tensor([[0, 1, 2], [5, 3, 4]], dtype=torch.int32).split(1)
    cache = torch.full(backend.kv_cache_shape(6, 16, 2, 64), -1, dtype=INT8)
    host = torch.zeros_like(cache)
    backend.write_kv(*case.prefix(), cache, case.slots(tables, 0, 0, 39))

    def attend(table: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        q, k, v = case.qkv()
        out = torch.zeros(q.shape, dtype=BF16)
        backend.forward(q, k, v, out, of, case.layer, backend.build_metadata(case.batch(table)))
        return out[:1]

    want = attend(tables, cache)
    backend.copy_blocks([cache], [(0, 5), (1, 3), (2, 4)])
    backend.swap_blocks([cache], [host], [(0, 5), (1, 3), (2, 4)])
    cache[:3] = -1
    assert torch.equal(attend(moved, cache), want)
    assert torch.equal(attend(moved, host), want)


def test_a_block_is_half_as_large_and_its_scales(int8_backend: Bound, cpu_backend: Bound) -> None:
    small = torch.Size(int8_backend("auto").kv_cache_shape(1, 16, 3, 64)).numel()
    large = torch.Size(cpu_backend("auto").kv_cache_shape(1, 16, 3, 64)).numel() * 2
    assert small == large // 2 + 2 * 3 * 16 * 4


def test_queries_that_int8_does_not_serve_are_refused(int8_backend: Bound, kernel_cache: Path) -> None:
    with pytest.raises(NoBackendError, match=r"int8 KV cache serves torch\.bfloat16 queries, not torch\.float32"):
        select("cpu", torch.float32, [64], 16, False, False, name="cpu", cache_dir=kernel_cache, kv_dtype=INT8)
    chosen = select("cpu", BF16, [64], 16, False, False, cache_dir=kernel_cache, kv_dtype=INT8)
    assert chosen.backend.name == "cpu"
    assert "no torch.int8 KV cache" in chosen.rejected["reference"]
    backend = int8_backend("auto")
    cache = torch.zeros(backend.kv_cache_shape(1, 16, 2, 64), dtype=INT8)
    token = torch.zeros(1, 2, 64)
    with pytest.raises(RuntimeError, match="bfloat16 where that is int8"):
        backend.write_kv(token, token, cache, torch.tensor([0]))
