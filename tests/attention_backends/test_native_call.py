"""The CPU's native entry, called as C++ code calls it, leaves the bits of `forward` in the output and the cache."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from native_stages import Call, NativeAttention, NativeRows, Stage
from paged_case import PADDING, Case

from attention_backends.cpu import CpuBackend, CpuMetadata, Isa
from attention_backends.interface import AttentionLayer, AttentionSpec
from attention_backends.reference import ReferenceBackend
from attention_backends.toolchain import CSRC, find_compiler

BF16, INT8 = torch.bfloat16, torch.int8
DECODE = [(1, 300), (1, 33), (1, 1), (1, 600), (1, 16)]
PREFILL = [(37, 37), (150, 150), (40, 90)]
MIXED = [(1, 300), (1, 33), (37, 37), (5, 261), (1, 1), (40, 90), (0, 7), (2, 2)]
UNTOUCHED = 7.0

Prepared = Callable[[Isa], CpuBackend]


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_cache: torch.Tensor
    metadata: CpuMetadata

    @property
    def num_tokens(self) -> int:
        return self.metadata.num_tokens


def inputs_of(case: Case, backend: CpuBackend) -> Inputs:
    """Rows are views of one merged tensor; the cache holds the prefixes."""
    tables, (k, v) = case.block_tables(), case.prefix()
    kv_cache = case.empty_cache(backend, case.kv_dtype or case.dtype)
    cached = [case.slots(tables, i, 0, n - q) for i, (q, n) in enumerate(case.lengths)]
    backend.write_kv(k, v, kv_cache, torch.cat(cached))
    return Inputs(*case.qkv(), kv_cache, backend.build_metadata(case.batch(tables)))


def new_out(q: torch.Tensor) -> torch.Tensor:
    return torch.full(q.shape, UNTOUCHED, dtype=q.dtype)


def call(
    backend: CpuBackend, layer: AttentionLayer, given: Inputs, out: torch.Tensor, rows: int | None = None
) -> str | None:
    """The refusal, or None. `rows` None: the step's tokens."""
    return prepared(backend, layer, given, out, rows).run()


def prepared(
    backend: CpuBackend, layer: AttentionLayer, given: Inputs, out: torch.Tensor, rows: int | None = None, run: int = 0
) -> Call:
    native = backend.native_layer(layer, given.kv_cache, BF16)
    assert native is not None
    step = backend.native_step(given.metadata)
    each = [field for t in (given.q, given.k, given.v, out) for field in (t.data_ptr(), t.stride(0))]
    native_rows = NativeRows(*each, given.num_tokens if rows is None else rows)
    made = Call(native.function, native.layer.data_ptr(), step.data_ptr(), native_rows, run)
    made.holds = native, step
    return made


def bits(t: torch.Tensor) -> torch.Tensor:
    return t if t.dtype == INT8 else t.view(torch.int16)  # NaN is equal to itself


def assert_same_bits(case: Case, backend: CpuBackend) -> None:
    given = inputs_of(case, backend)
    forward = replace(given, kv_cache=given.kv_cache.clone())
    want, got = new_out(given.q), new_out(given.q)
    backend.forward(given.q, given.k, given.v, want, forward.kv_cache, case.layer, given.metadata)
    assert call(backend, case.layer, given, got) is None
    assert torch.equal(bits(got), bits(want))
    assert torch.equal(bits(given.kv_cache), bits(forward.kv_cache))


@pytest.fixture(scope="module")
def backend_of(cpu_backend: Prepared, kernel_cache: Path) -> Callable[[torch.dtype], CpuBackend]:
    def bound(kv_dtype: torch.dtype) -> CpuBackend:
        backend = CpuBackend()
        backend.bind(AttentionSpec(torch.device("cpu"), BF16, kv_dtype, (64,)))
        backend.prepare(kernel_cache)
        return backend

    return bound


@pytest.mark.parametrize("kv_dtype", [BF16, INT8], ids=str)
@pytest.mark.parametrize("lengths", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"])
def test_the_same_bits_as_forward(
    backend_of: Callable[[torch.dtype], CpuBackend], lengths: list[tuple[int, int]], kv_dtype: torch.dtype
) -> None:
    case = Case(lengths, dtype=BF16, kv_dtype=kv_dtype)
    for changes in (
        {},
        {"sinks": True},
        {"window": 21},
        {"soft_cap": 20.0},
        {"num_heads": 9, "num_kv_heads": 3, "head_dim": 40},
    ):
        assert_same_bits(replace(case, **changes), backend_of(kv_dtype))  # type: ignore[arg-type]  # checked by Case


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "avx512bf16"])
def test_a_forced_isa_holds_for_native_calls(cpu_backend: Prepared, isa: Isa) -> None:
    assert_same_bits(Case(MIXED, dtype=BF16), cpu_backend(isa))


def test_several_threads(cpu_backend: Prepared) -> None:
    torch.set_num_threads(3)
    assert_same_bits(Case([*MIXED, *DECODE], dtype=BF16), cpu_backend("auto"))


@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
def test_rows_beyond_the_step_become_zero(cpu_backend: Prepared, lengths: list[tuple[int, int]]) -> None:
    case, backend = Case(lengths, dtype=BF16), cpu_backend("auto")
    given = inputs_of(case, backend)
    tokens = given.num_tokens
    exact, padded = new_out(given.q), new_out(given.q)
    assert call(backend, case.layer, given, exact) is None
    assert call(backend, case.layer, given, padded, rows=tokens + PADDING - 1) is None
    assert torch.equal(bits(padded[:tokens]), bits(exact[:tokens]))
    assert (exact[tokens:] == UNTOUCHED).all()
    assert (padded[tokens:-1] == 0).all()
    assert (padded[-1] == UNTOUCHED).all()


def test_token_strides_are_free(cpu_backend: Prepared) -> None:
    case, backend = Case(MIXED, dtype=BF16), cpu_backend("auto")
    given = inputs_of(case, backend)
    want, wide_out = new_out(given.q), torch.full((len(given.q), case.num_heads + 1, case.head_dim), UNTOUCHED).to(BF16)
    assert call(backend, case.layer, given, want, rows=len(want)) is None
    apart = [torch.nn.functional.pad(t, (0, 0, 0, 1 + i))[:, : t.shape[1]] for i, t in enumerate((given.q, given.k))]
    assert len({t.stride(0) for t in (*apart, given.v)}) == 3
    strided = replace(given, q=apart[0], k=apart[1])
    assert call(backend, case.layer, strided, wide_out, rows=len(want)) is None
    assert torch.equal(bits(wide_out[:, :-1]), bits(want))
    assert (wide_out[:, -1] == UNTOUCHED).all(), "what lies between two tokens' heads is not ours"


def test_layers_of_one_step_share_its_description(cpu_backend: Prepared) -> None:
    case, backend = Case(MIXED, dtype=BF16), cpu_backend("auto")
    given = inputs_of(case, backend)
    for window in (None, 21, None, 70):
        layer, want, got = replace(case.layer, window=window), new_out(given.q), new_out(given.q)
        assert call(backend, layer, given, got) is None
        backend.forward(given.q, given.k, given.v, want, given.kv_cache, layer, given.metadata)
        assert torch.equal(bits(got), bits(want))


def test_what_is_prepared_for_one_run_stays_as_it_is(cpu_backend: Prepared) -> None:
    """More layer groups, each with a number of its own for the step, than plans are kept otherwise."""
    backend = cpu_backend("auto")
    cases = [Case([(1, 40 + 60 * i), (3 + i, 300)], dtype=BF16) for i in range(20)]
    given = [inputs_of(case, backend) for case in cases]
    outs = [new_out(each.q) for each in given]
    calls = [
        prepared(backend, case.layer, each, out, run=7) for case, each, out in zip(cases, given, outs, strict=True)
    ]
    for call_, case, each, out in zip(calls, cases, given, outs, strict=True):
        assert call_.run() is None
        want = new_out(each.q)
        backend.forward(each.q, each.k, each.v, want, each.kv_cache, case.layer, each.metadata)
        assert torch.equal(bits(out), bits(want))


def test_what_only_a_call_can_see_is_returned_as_a_reason(cpu_backend: Prepared) -> None:
    case, backend = Case(DECODE, dtype=BF16), cpu_backend("auto")
    given = inputs_of(case, backend)
    out = new_out(given.q)
    assert "more tokens" in (call(backend, case.layer, given, out, rows=given.num_tokens - 1) or "")
    slots = torch.full_like(given.metadata.slot_mapping, 2**40)
    wild = replace(given, metadata=replace(given.metadata, slot_mapping=slots))
    assert "slot_mapping" in (call(backend, case.layer, wild, out) or "")
    tables = torch.full_like(given.metadata.block_tables, case.num_blocks)
    wild = replace(given, metadata=replace(given.metadata, block_tables=tables))
    assert "block_tables" in (call(backend, case.layer, wild, out) or "")


def test_what_is_no_description_is_refused(cpu_backend: Prepared) -> None:
    case, backend = Case(DECODE, dtype=BF16), cpu_backend("auto")
    given = inputs_of(case, backend)
    native = backend.native_layer(case.layer, given.kv_cache, BF16)
    assert native is not None
    layer, step = native.layer.data_ptr(), backend.native_step(given.metadata)
    for wrong in (None, step.data_ptr()):
        assert "native_layer" in (Call(native.function, wrong, step.data_ptr(), NativeRows()).refusal or "")
    for wrong in (None, layer):
        assert "native_step" in (Call(native.function, layer, wrong, NativeRows()).refusal or "")


def test_other_queries_and_other_backends_have_no_native_entry(cpu_backend: Prepared) -> None:
    case = Case(DECODE)
    for dtype in (torch.float32, torch.float16):
        backend = cpu_backend("auto")
        assert backend.native_layer(case.layer, case.empty_cache(backend, dtype), dtype) is None
    reference = ReferenceBackend()
    assert reference.native_layer(case.layer, case.empty_cache(reference, BF16), BF16) is None
    with pytest.raises(NotImplementedError, match="native"):
        reference.native_step(object())


@pytest.mark.parametrize(
    ("shape", "dtype", "changes", "message"),
    [
        ((5, 2, 2, 16, 64), torch.float32, {}, "bfloat16 or int8"),
        ((5, 2, 2, 16), BF16, {}, "kv_cache_shape"),
        ((5, 1, 2, 16, 64), BF16, {}, "kv_cache_shape"),
        ((5, 2, 2, 12, 64), BF16, {}, "block size 12"),
        ((5, 2, 2, 16, 64), INT8, {}, "head_dim 64"),
        ((5, 2, 2, 16, 64), BF16, {"head_dim": 80}, "head_dim 80"),
        ((5, 2, 2, 16, 64), BF16, {"head_dim": 60}, "head_dim 60"),
        ((5, 2, 2, 16, 0), BF16, {"head_dim": 0}, "head_dim 0"),
        ((5, 2, 2, 16, 64), BF16, {"num_heads": 5}, "multiple of KV heads"),
        ((5, 2, 2, 16, 64), BF16, {"num_heads": 0}, "multiple of KV heads"),
        ((5, 2, 0, 16, 64), BF16, {"num_kv_heads": 0}, "multiple of KV heads"),
        ((5, 2, 4, 16, 64), BF16, {}, "cache's 4 heads"),
    ],
    ids=str,
)
def test_a_layer_that_does_not_fit_its_cache_is_refused(
    cpu_backend: Prepared, shape: tuple[int, ...], dtype: torch.dtype, changes: dict[str, int], message: str
) -> None:
    layer = replace(Case(DECODE).layer, **changes)  # type: ignore[arg-type]  # sizes only
    with pytest.raises(RuntimeError, match=message):
        cpu_backend("auto").native_layer(layer, torch.zeros(shape, dtype=dtype), BF16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": torch.arange(5, dtype=torch.int32)}, "query_start_loc"),
        ({"query_start_loc": torch.arange(2, 8, dtype=torch.int32)}, "beyond num_tokens"),
        ({"seq_lens": torch.ones(4, dtype=torch.int32)}, "seq_lens"),
        ({"seq_lens": torch.ones(5, dtype=torch.int64)}, "seq_lens"),
        ({"seq_lens": torch.ones(10, dtype=torch.int32)[::2]}, "seq_lens"),
        ({"block_tables": torch.zeros(4, 40, dtype=torch.int32)}, "block_tables"),
        ({"block_tables": torch.zeros(40, 5, dtype=torch.int32).mT}, "block_tables"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int64)}, "slot_mapping"),
        ({"slot_mapping": torch.zeros(5, dtype=torch.int32)}, "slot_mapping"),
        ({"num_tokens": 4}, "beyond num_tokens"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"num_seqs": -1}, "num_seqs"),
        ({"num_seqs": 6}, "query_start_loc"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_step_with_wrong_tables_is_refused(cpu_backend: Prepared, changes: dict[str, object], message: str) -> None:
    case, backend = Case(DECODE, dtype=BF16), cpu_backend("auto")
    metadata = backend.build_metadata(case.batch(case.block_tables()))
    with pytest.raises(RuntimeError, match=message):
        backend.native_step(replace(metadata, **changes))  # type: ignore[arg-type]  # the point of the test


def test_the_header_is_plain_cpp17_with_the_layout_that_is_tested_here(tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "caller.cpp"
    sizes = {"NativeRows": NativeRows, "Stage": Stage, "NativeAttention": NativeAttention}
    checks = [f"sizeof(pageloom::{name}) == {ctypes.sizeof(kind)}" for name, kind in sizes.items()]
    fields = ("units", "workers", "ahead", "error", "next", "done")
    checks += [f"__builtin_offsetof(pageloom::Stage, {name}) == {getattr(Stage, name).offset}" for name in fields]
    source.write_text("\n".join(['#include "native_call.h"', *(f"static_assert({check});" for check in checks), ""]))
    strict = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"]
    subprocess.run([compiler, *strict, f"-I{CSRC}", str(source)], check=True, timeout=60)
