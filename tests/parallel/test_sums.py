"""The kernels of each instruction set that this CPU has, called as the library calls them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from attention_backends import native_build
from attention_backends.toolchain import CSRC as SHARED_CSRC
from attention_backends.toolchain import find_compiler, run
from engine.parallel.build import CSRC

ISAS = ("portable", "avx2", "avx512")
NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
GUARD = 7.0


@pytest.fixture(scope="module", params=ISAS)
def sum_parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    compiler, isa = find_compiler(), request.param
    if compiler is None or isa not in (native_build.cpu_isas() or ("portable",)):
        pytest.skip(f"no C++ compiler, or no {isa}")
    built = tmp_path_factory.mktemp("sums") / f"{isa}.so"
    flags = [*native_build._COMMON, *native_build._isa_flags()[isa], f"-DPAGELOOM_KERNELS=kernels_{isa}", "-O2"]
    flags = [flag for flag in flags if flag != "-fvisibility=hidden"]
    source = str(CSRC / "sums_kernel.cpp")
    run([compiler, *flags, f"-I{SHARED_CSRC}", "-shared", source, "-o", str(built)], 120)
    return kernel_of(built, isa)


def kernel_of(built: Path, isa: str) -> object:
    name = f"kernels_{isa}"
    address = ctypes.c_void_p.in_dll(ctypes.CDLL(str(built)), f"_ZN8pageloom{len(name)}{name}5kSumsE").value
    assert address is not None
    pointer, integer, kind = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    return ctypes.CFUNCTYPE(None, pointer, integer, kind, pointer, pointer, kind, integer)(address)


def call(kernel: object, parts: list[torch.Tensor], residual: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((len(parts[0]) + 1,), GUARD, dtype=dtype)
    pointers = (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))
    rest = None if residual is None else residual.data_ptr()
    count = len(parts[0])
    kernel(pointers, len(parts), NUMBERS[parts[0].dtype], rest, out.data_ptr(), NUMBERS[dtype], count)  # type: ignore[operator]
    assert out[-1] == GUARD, "written behind the end"
    return out[:-1]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype is torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("has_residual", [False, True])
def test_sums_round_as_torch_does(sum_parts: object, dtype: torch.dtype, has_residual: bool) -> None:
    random = torch.Generator().manual_seed(1)
    for part_dtype in {torch.float32, dtype}:
        for count in (0, 1, 3, 15, 16, 17, 1000, 4099):
            for num_parts in (1, 2, 3, 5):
                scale = 10.0 ** torch.randint(-42, 6, (count,), generator=random).float()  # subnormals; float16's end
                rows = torch.randn(num_parts + 1, count, generator=random) * scale
                parts = [row.to(part_dtype) for row in rows[:num_parts]]
                residual = rows[-1].to(dtype) if has_residual else None
                total = parts[0].float()
                for part in parts[1:]:
                    total = total + part.float()
                expected = total.to(dtype)
                if residual is not None:
                    expected = (expected.float() + residual.float()).to(dtype)
                got = call(sum_parts, parts, residual, dtype)
                either_nan = got.isnan() & expected.isnan()
                assert torch.equal(torch.where(either_nan, 0, bits(got)), torch.where(either_nan, 0, bits(expected)))


@pytest.mark.parametrize("dtype", NUMBERS)
def test_what_is_no_number_stays_none_and_zeros_keep_their_sign(sum_parts: object, dtype: torch.dtype) -> None:
    nan = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    x = torch.cat([nan, torch.tensor([float("inf"), float("-inf"), -0.0, 0.0])])
    got = call(sum_parts, [x, torch.cat([torch.zeros(3), x[3:]])], None, dtype)
    assert got[:3].isnan().all()
    assert bits(got[3:]).tolist() == bits(x[3:].to(dtype)).tolist()
    assert call(sum_parts, [torch.tensor([float("inf")]), torch.tensor([float("-inf")])], None, dtype).isnan().all()
