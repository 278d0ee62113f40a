"""The driver of nvcc, with a compiler that only writes down what it was asked; and the real one where there is one."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest
import torch

from attention_backends import cuda_build
from attention_backends.cuda import CudaBackend
from attention_backends.cuda_build import CudaKernels, build, find_cached, find_nvcc
from attention_backends.cuda_launchers import OpLaunchers
from attention_backends.toolchain import BuildError, find_compiler

BF16, F16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
HOPPER = CudaKernels(128, BF16, BF16, (9, 0))


class FakeCompilers:
    """nvcc and g++ that log their arguments and do `body`; $out is the file they should write."""

    def __init__(self, folder: Path, body: str = 'echo "$tool" > "$out"') -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log"
        self.nvcc, self.cxx = (self._script(folder, name, body) for name in ("nvcc", "g++"))

    def _script(self, folder: Path, name: str, body: str) -> str:
        path = folder / name
        path.write_text(
            "#!/bin/sh\n"
            f"tool={name}\n"
            f'[ "$1" = --version ] && {{ echo {name} 1.0; exit 0; }}\n'
            f'echo "{name} $*" >> "{self._log}"\n'
            'while [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done\n'
            f"{body}\n"
        )
        path.chmod(0o755)
        return str(path)

    def build(self, cache: Path, kernels: CudaKernels = HOPPER) -> cuda_build.KernelLibrary:
        return build(cache, kernels, self.nvcc, self.cxx)

    def commands(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


def test_nvcc_compiles_every_unit_for_the_device_and_the_cxx_compiler_the_binding(tmp_path: Path) -> None:
    fakes = FakeCompilers(tmp_path / "bin")
    library = fakes.build(tmp_path / "cache")
    commands = fakes.commands()
    units = [path.name for path in cuda_build.translation_units()]
    assert len(commands) == len(units) + 2
    for unit in units:
        (compiled,) = [command for command in commands if f"{unit} " in command]
        assert compiled.startswith("nvcc ")
        for part in ("compute_90a,code=sm_90a", "HEAD_DIM=128", "HALF=0", "KV_FP8=0", "-fPIC"):
            assert part in compiled
        assert str(Path(torch.__file__).parent) not in compiled, "nvcc sees no header of torch"
    (binding,) = [command for command in commands if command.startswith("g++")]
    assert f"PAGELOOM_OPS={library.namespace} " in binding
    assert "HEAD_DIM=128" in binding
    assert "-shared" in commands[-1]
    assert all(name in commands[-1] for name in ("binding.o", "-ltorch ", *(f"{Path(unit).stem}.o" for unit in units)))
    assert library.path.read_text() == "nvcc\n"


def test_each_kind_of_attention_has_its_own_library_and_is_built_once(tmp_path: Path) -> None:
    fakes = FakeCompilers(tmp_path / "bin")
    kinds = [
        HOPPER,
        CudaKernels(64, BF16, BF16, (9, 0)),
        CudaKernels(128, F16, F16, (9, 0)),
        CudaKernels(128, BF16, FP8, (9, 0)),
        CudaKernels(128, F16, FP8, (9, 0)),
        CudaKernels(128, BF16, BF16, (8, 6)),
    ]
    built = [fakes.build(tmp_path / "cache", kind) for kind in kinds]
    assert len({library.namespace for library in built}) == len(kinds)
    ran = len(fakes.commands())
    assert [fakes.build(tmp_path / "cache", kind) for kind in kinds] == built
    assert len(fakes.commands()) == ran, "a second build is a look-up"
    assert find_cached(tmp_path / "cache", kinds[3]) == [built[3]]
    assert set(find_cached(tmp_path / "cache")) == set(built)


def test_any_changed_file_below_the_sources_makes_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = FakeCompilers(tmp_path / "bin")
    first = fakes.build(tmp_path / "cache")
    shutil.copytree(cuda_build.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(cuda_build, "SOURCES", tmp_path / "csrc")
    assert find_cached(tmp_path / "cache") == [first], "where the sources lie does not matter"
    with (tmp_path / "csrc" / "device" / "pageloom_device.cuh").open("a") as header:
        header.write("// changed\n")
    assert find_cached(tmp_path / "cache") == []
    Path(fakes.nvcc).write_text(Path(fakes.nvcc).read_text().replace("nvcc 1.0", "nvcc 2.0"))
    second = fakes.build(tmp_path / "cache")
    assert second.path != first.path


def test_concurrent_cuda_builds_compile_once(tmp_path: Path) -> None:
    fakes = FakeCompilers(tmp_path / "bin", 'sleep 0.1; echo "$tool" > "$out"')
    threads = [threading.Thread(target=fakes.build, args=(tmp_path / "cache",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len([command for command in fakes.commands() if "-shared" in command]) == 1


def test_a_failing_nvcc_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    fakes = FakeCompilers(tmp_path / "bin", 'echo "error: no sm_90a here" >&2; exit 3')
    with pytest.raises(BuildError, match=r"failed \(3\)(.|\n)*no sm_90a here"):
        fakes.build(tmp_path / "cache")
    assert find_cached(tmp_path / "cache") == []
    assert [path.suffix for path in (tmp_path / "cache" / cuda_build.FOLDER).iterdir()] == [".lock"]


def test_without_nvcc_a_built_cuda_library_still_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = FakeCompilers(tmp_path / "bin").build(tmp_path / "full")
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: None)
    assert build(tmp_path / "full", HOPPER) == built
    with pytest.raises(BuildError, match=r"no CUDA compiler \(nvcc\)(.|\n)*sm90a_h64_bf16"):
        build(tmp_path / "full", CudaKernels(64, BF16, BF16, (9, 0)))


def test_a_gpu_without_nvcc_or_too_old_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert CudaBackend.unavailable(tmp_path) == "needs compute capability 8.0 or more; this device has 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("attention_backends.cuda.find_nvcc", lambda: None)
    assert "no CUDA compiler" in (CudaBackend.unavailable(tmp_path) or "")
    FakeCompilers(tmp_path / "bin").build(tmp_path)
    assert CudaBackend.unavailable(tmp_path) is None


def test_kinds_without_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        CudaKernels(64, torch.float32, torch.float32, (9, 0))
    with pytest.raises(ValueError, match="float16 cache"):
        CudaKernels(64, BF16, F16, (9, 0))


@pytest.mark.slow
def test_the_real_nvcc_builds_a_library_that_loads_without_a_gpu(tmp_path: Path) -> None:
    if find_nvcc() is None or find_compiler() is None:
        pytest.skip("no nvcc")
    kernels = CudaKernels(64, BF16, BF16, (8, 0))
    library = build(tmp_path, kernels)
    torch.ops.load_library(str(library.path))
    launchers = OpLaunchers(library.namespace)
    with pytest.raises(NotImplementedError, match="CPU"):
        launchers.copy_blocks(torch.zeros(1), torch.zeros(1), 16)
    assert find_cached(tmp_path, kernels) == [library]


@pytest.mark.gpu
def test_a_tensor_that_lies_elsewhere_is_refused_before_a_kernel_sees_it(tmp_path: Path) -> None:
    if find_nvcc() is None or not torch.cuda.is_available():
        pytest.skip("no CUDA device or compiler")
    library = build(tmp_path, CudaKernels(64, BF16, BF16, torch.cuda.get_device_capability()))
    torch.ops.load_library(str(library.path))
    launchers = OpLaunchers(library.namespace)
    cache = torch.zeros(2, 2, 1, 16, 64, dtype=BF16, device="cuda")
    tokens = torch.zeros(1, 1, 64, dtype=BF16, device="cuda")
    with pytest.raises(RuntimeError, match="slot_mapping is not on k's device"):
        launchers.write_kv(tokens, tokens, cache, torch.zeros(1, dtype=torch.int64), 1, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="cache addresses is not on pairs's device"):
        launchers.copy_blocks(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64).cuda(), 16)


@pytest.mark.parametrize(
    ("capability", "kib"), [((8, 0), 163), ((8, 6), 99), ((8, 9), 99), ((9, 0), 227), ((10, 3), 227), ((12, 0), 99)]
)
def test_tiles_are_cut_for_the_shared_memory_of_the_device(capability: tuple[int, int], kib: int) -> None:
    assert f"-DPAGELOOM_SHARED_KIB={kib}" in CudaKernels(128, BF16, BF16, capability).macros


def tool() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "compile_cuda.py"
    spec = importlib.util.spec_from_file_location("compile_cuda", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compile_cuda"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5scaleI5bf16E' for 'sm_80'
ptxas info    : Function properties for _Z5scaleI5bf16E
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'merge(Params)' for 'sm_90a'
ptxas info    : Function properties for merge(Params)
    128 bytes stack frame, 96 bytes spill stores, 104 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 128 bytes cumulative stack size, 2048 bytes smem
ptxas info    : Function properties for helper
    16 bytes stack frame, 8 bytes spill stores, 0 bytes spill loads
ptxas info    : Compile time = 34.005 ms
"""


def test_what_ptxas_says_is_read_with_the_spills_of_called_functions() -> None:
    compile_cuda = tool()
    first, second = compile_cuda.parse_ptxas(PTXAS)
    assert first == compile_cuda.KernelReport("_Z5scaleI5bf16E", "sm_80", 40, 0, 0, 0, 0)
    assert second == compile_cuda.KernelReport("merge(Params)", "sm_90a", 255, 2048, 144, 104, 104)
    assert second.spills == 104


def test_output_that_does_not_tell_of_spills_is_an_error() -> None:
    compile_cuda = tool()
    assert compile_cuda.parse_ptxas("nvcc: all is well") == []
    for missing in ("bytes stack frame", "Used"):
        kept = "\n".join(line for line in PTXAS.splitlines() if missing not in line)
        with pytest.raises(ValueError, match="tells neither"):
            compile_cuda.parse_ptxas(kept)


def test_a_budget_covers_its_kernel_and_head_size_only() -> None:
    compile_cuda = tool()
    budgets = (compile_cuda.Budget("prefill_kernel", 256, 64, "accumulators of two row tiles"),)
    assert compile_cuda.budget_of("void prefill_kernel<Shape>", 256, budgets) == 64
    assert compile_cuda.budget_of("void prefill_kernel<Shape>", 128, budgets) == 0
    assert compile_cuda.budget_of("decode_kernel", 256, budgets) == 0
