"""As test_invariant_bits.py: the CUDA kernels, run on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated_cuda import EmulatedLaunchers, kernels_in
from hypothesis import given, settings
from hypothesis import strategies as st
from test_invariant_bits import KV_HEADS, Sequences

from attention_backends.cuda import CudaBackend
from attention_backends.interface import AttentionSpec

KINDS = {
    "64": (64, torch.float16),
    "96": (96, torch.bfloat16),
    "256": (256, torch.bfloat16),
    "128 fp8": (128, torch.float8_e4m3fn),
}
PROCESSORS = 4


def backend_of(launchers: EmulatedLaunchers, these: Sequences, invariant: bool = True) -> CudaBackend:
    dtype = torch.bfloat16 if these.kv_dtype.itemsize == 1 else these.kv_dtype
    backend = CudaBackend(launchers, PROCESSORS)
    backend.bind(AttentionSpec(torch.device("cpu"), dtype, these.kv_dtype, (these.dim,), invariant))
    backend.prepare()
    return backend


@pytest.fixture(scope="module")
def launchers(native_cache: Path) -> dict[tuple[int, torch.dtype], EmulatedLaunchers]:
    kernels = kernels_in(native_cache)
    return {(dim, kv): kernels(dim, torch.bfloat16 if kv.itemsize == 1 else kv, kv) for dim, kv in KINDS.values()}


@st.composite
def sequences(draw: st.DrawFn) -> Sequences:
    dim, kv_dtype = KINDS[draw(st.sampled_from(list(KINDS)))]
    queries = draw(st.integers(1, 40) | st.integers(1, 160))
    options: dict[str, object] = draw(
        st.sampled_from([{}, {}, {"window": 21}, {"window": 100}, {"chunk": 70}, {"soft_cap": 20.0}])
    )
    group = draw(st.sampled_from([1, 3, 4, 8]))
    if draw(st.booleans()):
        options = options | {"sinks": torch.linspace(-2, 2, KV_HEADS * group)}
    length = queries + draw(st.integers(0, 50) | st.integers(0, 700))
    others = draw(st.lists(st.integers(1, 700), max_size=4))
    return Sequences(
        [length, *others],
        draw(st.integers(0, 20)),
        queries,
        group,
        dim,
        draw(st.sampled_from([16, 32, 128])),
        kv_dtype,
        options,
        draw(st.integers(0, 99)),
    )


@settings(max_examples=settings().max_examples // 8)
@given(data=st.data())
def test_a_rows_bits_depend_on_its_keys_alone(
    launchers: dict[tuple[int, torch.dtype], EmulatedLaunchers], data: st.DataObject
) -> None:
    these = data.draw(sequences())
    backend = backend_of(launchers[these.dim, these.kv_dtype], these)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, these.queries - 1)), max_size=4)) - {these.queries})
    last = range(max(1, these.queries - 3), these.queries)  # as decodes
    whole = these.outputs(backend, [], 0)
    for steps in (cuts, last):
        found = these.outputs(backend, list(steps), data.draw(st.integers(0, len(these.lengths) - 1)))
        assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8))


def test_without_it_bits_depend_on_the_batch(
    launchers: dict[tuple[int, torch.dtype], EmulatedLaunchers],
) -> None:
    """What is asked for, and not what there is anyway."""
    these = Sequences([1500, 900], 0, 8, 4, 64, 16, torch.float16)
    plain = backend_of(launchers[64, torch.float16], these, invariant=False)
    whole, cut = these.outputs(plain, [], 0), these.outputs(plain, list(range(1, 8)), 1)
    torch.testing.assert_close(cut, whole, rtol=2**-6, atol=2**-6)
    assert not torch.equal(cut, whole)
    kept = backend_of(launchers[64, torch.float16], these)
    assert torch.equal(these.outputs(kept, [], 0), these.outputs(kept, list(range(1, 8)), 1))
