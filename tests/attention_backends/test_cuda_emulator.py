"""The emulated device layer is CUDA's: layouts, roundings, and an error for what a device would not forgive.

What is well behaved runs on a device too, where there is one: then it holds the real header to the same tables.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from emulated_cuda import EMULATOR, KERNELS, EmulatedLibrary, compile_library

from attention_backends.cuda_build import find_nvcc

SELF_TEST = EMULATOR / "self_test.cu"
FAULTS = [  # `Fault` of self_test.cu, in its order
    "none",
    "no_barrier",
    "no_wait",
    "late_group",
    "ended_before_wait",
    "divergent_barrier",
    "divergent_warp",
    "lanes_ended",
    "shuffle_from_ended",
    "ldmatrix_outside",
    "ldmatrix_misaligned",
    "store_outside",
    "global_outside",
    "global_misaligned",
    "plain_write_before",
    "plain_write_after",
    "wild_write",
    "deep_stack",
    "uninitialised",
    "warp_barrier",
    "no_warp_barrier",
]
WIDEN = {torch.bfloat16: 0, torch.float16: 1, torch.float8_e4m3fn: 2}
NARROW_PAIRS = {torch.bfloat16: 3, torch.float16: 4}
NARROW_FOURS = 5
WIDEN_PAIRS = {torch.bfloat16: 6, torch.float16: 7}

Call = Callable[..., None]


@pytest.fixture(scope="session")
def emulated(native_cache: Path) -> EmulatedLibrary:
    return compile_library(native_cache, "self_test", [SELF_TEST])


class Layer:
    """`call(launcher, tensors and ints...)` on tensors of `device`."""

    def __init__(self, call: Call, device: str) -> None:
        self._call, self.device = call, device

    def call(self, launcher: str, *arguments: torch.Tensor | int) -> None:
        tensors = (ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments)
        self._call(launcher, *tensors)


@pytest.fixture(scope="session")
def on_device(tmp_path_factory: pytest.TempPathFactory) -> Call:
    nvcc = find_nvcc()
    if nvcc is None or not torch.cuda.is_available():
        pytest.skip("no CUDA device or compiler")
    return _device_caller(str(nvcc), tmp_path_factory.mktemp("device"))


@pytest.fixture(params=["emulator", pytest.param("device", marks=pytest.mark.gpu)])
def layer(request: pytest.FixtureRequest) -> Layer:
    if request.param == "emulator":
        return Layer(request.getfixturevalue("emulated").call, "cpu")
    return Layer(request.getfixturevalue("on_device"), "cuda")


def _device_caller(nvcc: str, folder: Path) -> Call:
    major, minor = torch.cuda.get_device_capability()
    path = folder / "self_test.so"
    options = ["-std=c++20", "-O3", f"-arch=sm_{major}{minor}", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run([nvcc, *options, "-I", str(KERNELS / "device"), "-o", str(path), str(SELF_TEST)], check=True)
    library = ctypes.CDLL(str(path))

    def call(launcher: str, *arguments: object) -> None:
        function = getattr(library, launcher)
        function.restype = ctypes.c_char_p
        torch.cuda.synchronize()
        assert function(*arguments) is None
        torch.cuda.synchronize()

    return call


def converted(layer: Layer, kind: int, values: torch.Tensor, out: torch.Tensor, count: int) -> torch.Tensor:
    source, target = values.to(layer.device), out.to(layer.device)
    layer.call("self_test_convert", kind, source, target, count)
    return target.cpu()


def all_codes(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float8_e4m3fn:
        return torch.arange(256).to(torch.uint8).view(dtype)
    return torch.arange(65536).to(torch.int32).to(torch.uint16).view(dtype)


def tricky_floats() -> torch.Tensor:
    """Every upper half of a float (sign, exponent, 7 bits of mantissa) with lower halves at and beside the ties of all
    three formats."""
    upper = np.arange(65536, dtype=np.uint32)[:, None] << 16
    lower = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return torch.from_numpy((upper | lower).reshape(-1).view(np.float32).copy())


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's own rounding; e4m3 saturates."""
    return (values.clamp(-448, 448) if dtype == torch.float8_e4m3fn else values).to(dtype)


def assert_same_codes(got: torch.Tensor, want: torch.Tensor) -> None:
    """Bit for bit, but any NaN is as good as another."""
    got, want = got.float(), want.float()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert torch.equal(torch.signbit(got[~got.isnan()]), torch.signbit(want[~want.isnan()]))


@pytest.mark.parametrize("dtype", WIDEN, ids=str)
def test_every_code_widens_as_in_torch(layer: Layer, dtype: torch.dtype) -> None:
    codes = all_codes(dtype)
    got = converted(layer, WIDEN[dtype], codes, torch.empty(codes.numel()), codes.numel())
    assert_same_codes(got, codes.float())


@pytest.mark.parametrize("dtype", NARROW_PAIRS, ids=str)
def test_pairs_round_as_in_torch_and_keep_their_order(layer: Layer, dtype: torch.dtype) -> None:
    values = tricky_floats()
    out = torch.empty(values.numel(), dtype=dtype)
    assert_same_codes(converted(layer, NARROW_PAIRS[dtype], values, out, values.numel() // 2), values.to(dtype))


def test_fours_round_as_in_torch_and_keep_their_order(layer: Layer) -> None:
    values = tricky_floats()
    out = torch.empty(values.numel(), dtype=torch.float8_e4m3fn)
    got = converted(layer, NARROW_FOURS, values, out, values.numel() // 4)
    assert_same_codes(got, narrowed(values, torch.float8_e4m3fn))


@pytest.mark.parametrize("dtype", WIDEN_PAIRS, ids=str)
def test_every_pair_of_e4m3_codes_widens_exactly(layer: Layer, dtype: torch.dtype) -> None:
    pairs = torch.arange(65536).to(torch.int32).to(torch.uint16).view(torch.float8_e4m3fn)
    got = converted(layer, WIDEN_PAIRS[dtype], pairs, torch.empty(pairs.numel()), pairs.numel() // 2)
    assert_same_codes(got, pairs.float())


def test_functions_and_shuffles(layer: Layer) -> None:
    values = torch.linspace(-20, 20, 32)
    values[0], values[1] = float("-inf"), 0.0
    lanes = torch.arange(32)
    for lane, found in ((31, 1.0), (32, 0.0)):
        out = torch.zeros(8, 32, device=layer.device)
        layer.call("self_test_functions", values.to(layer.device), out, lane)
        got = out.cpu()
        torch.testing.assert_close(got[0], values.exp2(), rtol=1e-6, atol=0)
        torch.testing.assert_close(got[1], values.log2(), rtol=1e-5, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(got[2], values.tanh(), rtol=1e-6, atol=1e-7)
        assert torch.equal(got[3], values[lanes ^ 5])
        assert torch.equal(got[4], values[(lanes * 7 + 3) % 32])
        assert torch.equal(got[5], ((lanes ^ 16) * 100 + 9).float())
        assert (got[6] == found).all()
        assert (got[7].view(torch.int32) == 0x77225500).all()  # bytes 0, 5, 2, 7 of the eight, lowest first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mma_fragments_lie_where_ptx_says(layer: Layer, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    a, b, d = torch.randn(16, 16).to(dtype), torch.randn(16, 8).to(dtype), torch.randn(16, 8)
    a_registers, b_registers = torch.zeros(32, 4, 2, dtype=dtype), torch.zeros(32, 2, 2, dtype=dtype)
    d_registers = torch.zeros(32, 4)
    for lane in range(32):
        group, pair = lane // 4, lane % 4 * 2
        for i in range(2):
            # PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type": rules for a0..a7, b0..b3, c0..c3.
            a_registers[lane, 0, i], a_registers[lane, 1, i] = a[group, pair + i], a[group + 8, pair + i]
            a_registers[lane, 2, i], a_registers[lane, 3, i] = a[group, pair + 8 + i], a[group + 8, pair + 8 + i]
            b_registers[lane, 0, i], b_registers[lane, 1, i] = b[pair + i, group], b[pair + 8 + i, group]
            d_registers[lane, i], d_registers[lane, 2 + i] = d[group, pair + i], d[group + 8, pair + i]
    on_device = [x.to(layer.device) for x in (a_registers, b_registers, d_registers)]
    layer.call("self_test_mma", int(dtype == torch.float16), *on_device)
    got, want = on_device[2].cpu(), d.double() + a.double() @ b.double()
    for lane in range(32):
        group, pair = lane // 4, lane % 4 * 2
        expected = torch.stack(
            [want[group, pair], want[group, pair + 1], want[group + 8, pair], want[group + 8, pair + 1]]
        )
        torch.testing.assert_close(got[lane].double(), expected, rtol=1e-5, atol=1e-5)


def test_ldmatrix_distributes_rows_and_columns(layer: Layer) -> None:
    rows = torch.arange(256, dtype=torch.int16).view(32, 8)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    out = torch.full((3, 32, 4), -1, dtype=torch.int32, device=layer.device)
    layer.call("self_test_ldmatrix", rows.to(layer.device), order.to(layer.device), out)
    matrices = rows[order.long()].view(4, 8, 8)  # matrix m is made of the rows that lanes 8m .. 8m + 7 name
    got = out.cpu().view(torch.int16).view(3, 32, 4, 2)
    by_rows = matrices.view(4, 32, 2).transpose(0, 1)  # lane i: row i / 4, elements 2 (i % 4) and the next
    by_columns = matrices.mT.contiguous().view(4, 32, 2).transpose(0, 1)
    assert torch.equal(got[0], by_rows)
    assert torch.equal(got[1], by_columns)
    assert torch.equal(got[2, :, :2], by_rows[:, :2])


def test_threads_that_ended_do_not_hold_up_a_barrier(layer: Layer) -> None:
    out = torch.zeros(96, device=layer.device)
    layer.call("self_test_end_early", out, 1, 512)
    assert out.cpu()[:40].tolist() == [float(39 - i) for i in range(40)]


@pytest.mark.parametrize("blocks", [1, 2, 500])
def test_the_last_block_to_arrive_sees_what_all_have_written(layer: Layer, blocks: int) -> None:
    parts, out = torch.full((blocks, 4), torch.nan, device=layer.device), torch.zeros(5, device=layer.device)
    arrivals = torch.zeros(1, dtype=torch.int32, device=layer.device)
    for _ in range(3):  # as a graph's replays: the counter is ready again
        parts.fill_(torch.nan)
        out.zero_()
        layer.call("self_test_arrive", parts, arrivals, out, blocks, 0)
        want = torch.arange(blocks * 4, dtype=torch.float64).view(blocks, 4).sum(0)
        assert out.cpu().double().tolist() == [*want.tolist(), want[3].item()]
        assert arrivals.item() == 0


@pytest.mark.parametrize(
    ("disorder", "message"),
    [
        (1, "atomic_add without a fence of its own thread behind the barrier"),
        (2, "atomic_add without a fence of its own thread behind the barrier"),
        (3, "atomic_add before the block has met"),
        (4, "without a fence behind the atomic_add"),
        (5, "without a barrier behind the fence"),
    ],
    ids=["fence before the barrier", "no first fence", "no first barrier", "no last fence", "no last barrier"],
)
def test_blocks_that_hand_over_in_another_order_than_the_memory_model_asks_for_are_an_error(
    emulated: EmulatedLibrary, disorder: int, message: str
) -> None:
    parts, out, arrivals = torch.zeros(3, 4), torch.zeros(5), torch.zeros(1, dtype=torch.int32)
    pointers = (ctypes.c_void_p(x.data_ptr()) for x in (parts, arrivals, out))
    with pytest.raises(RuntimeError, match=message):
        emulated.call("self_test_arrive", *pointers, 3, disorder)


def run_neighbour(emulated: EmulatedLibrary, fault: str, threads: int = 96) -> torch.Tensor:
    """Each thread copies four floats to shared memory and reads what another thread copied; true where that arrived."""
    source = torch.arange(threads * 4, dtype=torch.float32)
    out = torch.zeros(threads)
    pointers = (ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    emulated.call("self_test_neighbour", *pointers, FAULTS.index(fault), threads, reachable=[source])
    want = source.view(threads, 4)[(torch.arange(threads) + 37) % threads, 0]
    assert (out.isnan() | (out == want)).all()  # what has not arrived is NaN, nothing plausible
    return out == want


@pytest.mark.parametrize("seed", range(8))
def test_copies_and_barriers_decide_what_is_seen(emulated: EmulatedLibrary, seed: int) -> None:
    emulated.seed(seed)
    assert run_neighbour(emulated, "none").all()
    assert not run_neighbour(emulated, "no_barrier").all()
    assert not run_neighbour(emulated, "no_wait").any()
    assert not run_neighbour(emulated, "late_group").any()
    with pytest.raises(RuntimeError, match="ended before it waited"):
        run_neighbour(emulated, "ended_before_wait")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("divergent_barrier", "divergent barrier: .*sync_block at self_test.cu:"),
        ("divergent_warp", "divergent warp: .*(shuffle|sync_warp) at self_test.cu:"),
        ("lanes_ended", "all 32 lanes"),
        ("shuffle_from_ended", "a lane that has exited"),
        ("ldmatrix_outside", "ldmatrix outside the block's shared memory, 1024 bytes"),
        ("ldmatrix_misaligned", "ldmatrix of a row that is not aligned"),
        ("store_outside", "store16 outside the block's shared memory, 1024 bytes"),
        ("global_outside", "load16 outside every registered range"),
        ("global_misaligned", "load16 at an address that is not aligned"),
        ("plain_write_before", "bytes outside the block's shared memory were written"),
        ("plain_write_after", "memory fault .* outside the block's shared memory"),
        ("wild_write", "memory fault at 0x10"),
        ("deep_stack", "memory fault"),
    ],
)
def test_what_a_device_would_not_forgive_is_an_error(emulated: EmulatedLibrary, fault: str, message: str) -> None:
    source, out = torch.zeros(64, 4), torch.zeros(64)
    pointers = (ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    with pytest.raises(RuntimeError, match=message):
        emulated.call("self_test_faulty", *pointers, FAULTS.index(fault), 64, 1024, reachable=[source])
    emulated.call("self_test_faulty", *pointers, 0, 64, 1024)  # an error does not stay


def test_what_lanes_copied_shows_after_a_barrier_of_the_warp(emulated: EmulatedLibrary) -> None:
    source, out = torch.ones(64, 4), torch.zeros(64)
    pointers = (ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(out.data_ptr()))
    emulated.call("self_test_faulty", *pointers, FAULTS.index("warp_barrier"), 64, 1024)
    assert (out == 1).all()
    emulated.call("self_test_faulty", *pointers, FAULTS.index("no_warp_barrier"), 64, 1024)
    assert out.isnan().all()


def test_shared_memory_starts_as_nan_in_every_block(emulated: EmulatedLibrary) -> None:
    out = torch.zeros(64)
    for _ in range(2):
        emulated.call("self_test_faulty", None, ctypes.c_void_p(out.data_ptr()), FAULTS.index("uninitialised"), 64, 256)
        assert out.isnan().all()


def test_launches_that_no_device_takes_are_refused(emulated: EmulatedLibrary) -> None:
    out = torch.full((96,), 5.0)
    pointer = ctypes.c_void_p(out.data_ptr())
    with pytest.raises(RuntimeError, match="bytes of shared memory"):
        emulated.call("self_test_end_early", pointer, 1, 300 * 1024)
    with pytest.raises(RuntimeError, match="grid is too large"):
        emulated.call("self_test_end_early", pointer, 70_000, 512)
    emulated.call("self_test_end_early", pointer, 0, 512)
    assert (out == 5.0).all()  # an empty grid ran nothing
