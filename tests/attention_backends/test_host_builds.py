"""A build for one CPU holds what that CPU takes and nothing else, and a whole library serves in its place."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from test_kernel_build import calls, fake_compiler

from attention_backends import native_build, toolchain
from attention_backends.native_build import NativeSources, Unit, build, build_for_this_cpu, cpu_isas, find_cached

ZEN4 = frozenset({"portable", "avx2", "avx512", "avx512vnni", "avx512bf16"})
SAPPHIRE_RAPIDS = ZEN4 | {"amx"}
HASWELL = frozenset({"portable", "avx2"})
SOURCE = Path("k.cpp")


@pytest.mark.parametrize(
    ("listed", "always", "has", "kept", "spare"),
    [
        (("portable", "avx2", "avx512", "avx512bf16"), (), ZEN4, ("portable", "avx512bf16"), ("portable",)),
        (("portable", "avx2", "avx512", "avx512vnni"), (), SAPPHIRE_RAPIDS, ("portable", "avx512vnni"), ("portable",)),
        (("portable", "avx2", "avx512"), ("avx2",), ZEN4, ("portable", "avx2", "avx512"), ("portable",)),
        (("portable", "avx2", "avx512"), (), HASWELL, ("portable", "avx2"), ("portable",)),
        (("portable", "avx2", "avx512"), ("avx2",), frozenset({"portable"}), ("portable",), ()),
        (("amx",), (), SAPPHIRE_RAPIDS, ("amx",), ()),
        (("amx",), (), ZEN4, (), ()),
    ],
)
def test_a_unit_is_built_for_amx_the_widest_other_and_portable(
    listed: tuple[str, ...], always: tuple[str, ...], has: frozenset[str], kept: tuple[str, ...], spare: tuple[str, ...]
) -> None:
    unit = Unit(SOURCE, listed, always=always).for_cpu(has)
    assert (unit.isas, unit.spare) == (kept, spare)


def test_a_unit_that_is_compiled_once_stays_as_it_is() -> None:
    assert Unit(SOURCE).for_cpu(ZEN4) == Unit(SOURCE)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NativeSources:
    monkeypatch.setattr(native_build, "cpu_isas", lambda: ZEN4)
    files = [tmp_path / name for name in ("kernel.cpp", "tiles.cpp", "binding.cpp")]
    for file in files:
        file.write_text("int x;\n")
    units = (Unit(files[0], ("portable", "avx2", "avx512bf16")), Unit(files[1], ("amx",)), Unit(files[2]))
    return NativeSources(folder="lib", prefix="p", units=units, headers=())


@pytest.mark.skipif(cpu_isas() is None, reason="instruction sets of x86")
def test_units_see_the_variants_that_are_built_and_spares_are_built_quickly(
    tmp_path: Path, sources: NativeSources
) -> None:
    log = tmp_path / "log"
    compiler = Path(fake_compiler(tmp_path, 'echo x > "$out"'))
    compiler.write_text(compiler.read_text().replace("while [", f'echo "$*" >> "{log}"\nwhile [', 1))
    build_for_this_cpu(sources, tmp_path / "cache", str(compiler))
    lines = log.read_text().splitlines()
    binding = next(line for line in lines if "binding.cpp" in line)
    assert "HAVE_PORTABLE" in binding and "HAVE_AVX512BF16" in binding
    assert "HAVE_AVX2" not in binding and "HAVE_AMX" not in binding
    kernels = [line for line in lines if "kernel.cpp" in line]
    assert {("-O1" in line, "ISA=portable" in line) for line in kernels} == {(True, True), (False, False)}
    assert not any("tiles.cpp" in line for line in lines)


def test_a_library_with_every_isa_serves_in_the_place_of_one_for_this_cpu(
    tmp_path: Path, sources: NativeSources
) -> None:
    compiler = fake_compiler(tmp_path, 'echo built > "$out"')
    small = build_for_this_cpu(sources, tmp_path / "one", compiler)
    assert find_cached(sources, tmp_path / "one") is None, "the reverse is not true"
    whole = build(sources, tmp_path / "both", compiler)
    before = calls(tmp_path)
    assert build_for_this_cpu(sources, tmp_path / "both", compiler) == whole != small
    assert calls(tmp_path) == before


def test_builds_at_once_share_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_COMPILERS", threading.BoundedSemaphore(2))
    monkeypatch.setattr(toolchain, "_CPUS", 4)
    lock, running, most = threading.Lock(), [0], [0]

    def run(command: list[str], timeout_s: float) -> str:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        threading.Event().wait(0.02)
        with lock:
            running[0] -= 1
        return ""

    monkeypatch.setattr(toolchain, "run", run)
    builds = [threading.Thread(target=toolchain.run_all, args=([["x"]] * 6, 1.0)) for _ in range(3)]
    for thread in builds:
        thread.start()
    for thread in builds:
        thread.join(20)
    assert most[0] == 2
