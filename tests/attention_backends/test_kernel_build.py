from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from attention_backends import build as build_module
from attention_backends import native_build
from attention_backends.build import build, find_cached, sources
from attention_backends.cpu import CpuBackend
from attention_backends.native_build import NativeSources, Unit, prebuild
from attention_backends.toolchain import CSRC, TORCH_INCLUDE, BuildError, find_compiler, run


@pytest.fixture(autouse=True)
def nothing_came_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(native_build, "PREBUILT", tmp_path / "prebuilt")
    return tmp_path / "prebuilt"


def fake_compiler(folder: Path, body: str) -> str:
    """A compiler that answers --version and option probes, and then does `body`; $out is the file it should write."""
    path = folder / "cxx"
    path.write_text(
        "#!/bin/sh\n"
        f'echo run >> "{folder}/calls"\n'
        '[ "$1" = --version ] && { echo fake 1.0; exit 0; }\n'
        'case "$*" in *-fsyntax-only*) exit 0;; esac\n'
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done\n'
        f"{body}\n"
    )
    path.chmod(0o755)
    return str(path)


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def test_a_second_build_is_a_look_up(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, 'echo built > "$out"')
    first = build(tmp_path / "cache", compiler)
    after_first = calls(tmp_path)
    assert build(tmp_path / "cache", compiler) == first
    assert calls(tmp_path) == after_first + 1, "only --version may run again"
    assert first.path.read_text() == "built\n"
    assert first.namespace == f"pageloom_cpu_{first.path.stem}"
    assert find_cached(tmp_path / "cache") == first


def test_concurrent_builds_compile_once(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, f'echo unit >> "{tmp_path}/units"; sleep 0.2; echo built > "$out"')
    threads = [threading.Thread(target=build, args=(tmp_path / "cache", compiler)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    objects = sum(len(unit.isas or (None,)) for unit in sources().units)
    units = len((tmp_path / "units").read_text().splitlines())
    assert units <= objects + 2, "each object, the stand-in of torch and the link, once"
    assert len(list((tmp_path / "cache" / "attention-cpu").glob("*.so"))) == 1


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, 'echo "attention: no such thing" >&2; exit 4')
    with pytest.raises(BuildError, match=r"failed \(4\)(.|\n)*no such thing"):
        build(tmp_path / "cache", compiler)
    assert find_cached(tmp_path / "cache") is None
    assert [path.suffix for path in (tmp_path / "cache" / "attention-cpu").iterdir()] == [".lock"]


def test_without_a_compiler_a_built_library_still_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path / "full", fake_compiler(tmp_path, 'echo built > "$out"'))
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert build(tmp_path / "full") == built
    assert CpuBackend.unavailable(tmp_path / "full") is None
    reason = CpuBackend.unavailable(tmp_path / "empty")
    assert reason is not None
    assert "no C++ compiler" in reason
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build(tmp_path / "empty")


def test_changed_sources_and_another_compiler_make_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = fake_compiler(tmp_path, 'echo built > "$out"')
    first = build(tmp_path / "cache", compiler)
    (tmp_path / "cxx").write_text((tmp_path / "cxx").read_text().replace("fake 1.0", "fake 2.0"))
    second = build(tmp_path / "cache", compiler)
    sources = tmp_path / "csrc"
    sources.mkdir()
    for path in filter(Path.is_file, build_module.CSRC.iterdir()):
        (sources / path.name).write_bytes(path.read_bytes())
    with (sources / "simd.h").open("a") as header:
        header.write("// changed\n")
    monkeypatch.setattr(build_module, "CSRC", sources)
    assert find_cached(tmp_path / "cache") is None
    third = build(tmp_path / "cache", compiler)
    assert len({first.path, second.path, third.path}) == 3


def test_a_compiler_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="nowhere"):
        build(tmp_path, str(tmp_path / "nowhere"))


def tiny_sources(folder: Path, text: str) -> NativeSources:
    (folder / "one.cpp").write_text(text)
    return NativeSources(folder="tiny", prefix="tiny", units=(Unit(folder / "one.cpp"),), headers=())


def test_what_came_with_the_package_is_taken_before_cache_and_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_came_with_the_package: Path
) -> None:
    old = prebuild(tiny_sources(tmp_path, "int one() { return 1; }"))
    sources = tiny_sources(tmp_path, "int two() { return 2; }")
    library = prebuild(sources)
    assert list((nothing_came_with_the_package / "tiny").iterdir()) == [library.path] != [old.path]
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert native_build.build_for_this_cpu(sources, tmp_path / "cache") == library
    assert native_build.build(sources, tmp_path / "cache") == library
    assert not (tmp_path / "cache").exists()


def test_what_is_declared_of_torchs_abi_is_what_torch_declares(tmp_path: Path) -> None:
    """Two declarations of a C function that differ do not compile."""
    unit = tmp_path / "both.cpp"
    unit.write_text('#include <torch/csrc/stable/c/shim.h>\n#include "torch_string.h"\n')
    compiler = find_compiler()
    assert compiler is not None
    command = [compiler, "-std=c++20", "-fsyntax-only", "-DTORCH_TARGET_VERSION=0x020b000000000000", f"-I{CSRC}"]
    run([*command, *TORCH_INCLUDE, str(unit)], 120)
    headers = {"torch_abi.h": "torch_get_num_threads", "torch_string.h": "torch_string_length"}
    for changed, function in headers.items():
        for header in headers:
            text = (CSRC / header).read_text()
            other = text.replace(f"TorchError {function}(", f"int64_t {function}(")
            assert (other != text) == (header == changed)
            (tmp_path / header).write_text(other)
        with pytest.raises(BuildError, match=function):
            run([*command[:-1], f"-I{tmp_path}", *TORCH_INCLUDE, str(unit)], 120)


@pytest.mark.slow
@pytest.mark.exhaustive  # half a minute of a compiler
def test_a_library_for_this_cpu_has_the_widest_kernels_of_one_for_all(kernel_cache: Path, tmp_path: Path) -> None:
    whole, own = CpuBackend(), CpuBackend()
    whole.prepare(kernel_cache)
    built = native_build.build(sources().for_this_cpu(), kernel_cache).path  # where whoever starts an engine has it
    (tmp_path / built.parent.name).mkdir(mode=0o700)
    shutil.copy(built, tmp_path / built.parent.name)
    own.prepare(tmp_path)
    assert own.supported_isas[-1] == whole.supported_isas[-1]
