"""The cache is believed only where it proves itself, moves with its directory, and saves the next process the work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from toy_llama import ToyLlama, batch, compiled, eager

from compilation import bounded, inductor
from compilation.behind import CompileStoppedError
from compilation.directory import trusted_directory, trusted_tree
from compilation.errors import CompileError
from compilation.inductor import inductor_directories, load_piece
from compilation.key import digest, environment_material
from compilation.split import Piece
from compilation.store import ArtifactStore

MATERIAL = {"graph": "a graph", "torch": "a version"}


def filled(root: Path) -> tuple[ArtifactStore, Path]:
    store = ArtifactStore(root)
    path = store.discard(MATERIAL)
    (path / "inductor").mkdir()
    (path / "artifact.bin").write_bytes(b"code" * 100)
    (path / "inductor" / "kernel.so").write_bytes(b"kernel" * 100)
    assert not store.is_valid(MATERIAL)
    store.publish(MATERIAL)
    assert store.is_valid(MATERIAL)
    return store, path


@pytest.mark.parametrize("name", ["artifact.bin", "inductor/kernel.so", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_entry_is_not_valid(tmp_path: Path, name: str, damage: str) -> None:
    store, path = filled(tmp_path / "cache")
    file = path / name
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-7])
    elif damage == "changed":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(bytes(content))
    else:
        file.unlink()
    assert not store.is_valid(MATERIAL)


def test_an_entry_of_other_material_under_this_name_is_not_valid(tmp_path: Path) -> None:
    store, path = filled(tmp_path / "cache")
    foreign = {**MATERIAL, "torch": "another version"}
    shutil.copytree(path, store.path(foreign))
    assert not store.is_valid(foreign)


def test_the_lock_admits_one_builder_at_a_time(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "cache")
    order: list[str] = []

    def second() -> None:
        with ArtifactStore(tmp_path / "cache").entry_lock(MATERIAL):
            order.append("second")

    with store.entry_lock(MATERIAL):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def test_directories_that_others_may_write_are_refused_and_new_ones_are_private(tmp_path: Path) -> None:
    created = trusted_directory(tmp_path / "new")
    assert created.stat().st_mode & 0o777 == 0o700
    created.chmod(0o777)
    with pytest.raises(CompileError, match="writable by others"):
        ArtifactStore(created)


def test_a_cache_is_as_trusted_as_each_directory_in_it(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    trusted_tree(cache)
    assert cache.stat().st_mode & 0o777 == 0o700
    kernels = trusted_directory(cache / "attention-cpu")
    (cache / "file").write_text("")
    trusted_tree(cache)
    for open_to_others in (kernels, cache):
        for mode in (0o720, 0o702):
            open_to_others.chmod(mode)
            with pytest.raises(CompileError, match="writable by others"):
                trusted_tree(cache)
        open_to_others.chmod(0o755)
    trusted_tree(cache)
    (tmp_path / "file").write_text("")
    trusted_tree(tmp_path / "file" / "nowhere")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    theirs = trusted_directory(tmp_path / "theirs")
    os.chown(theirs, 12345, -1)
    with pytest.raises(CompileError, match="belongs to user 12345"):
        ArtifactStore(theirs)


def test_the_key_changes_with_what_changes_code_and_holds_no_path() -> None:
    device = torch.device("cpu")
    base = environment_material(device, {"size_asserts": False})
    assert environment_material(device, {"size_asserts": False}) == base
    assert digest(environment_material(device, {"size_asserts": True})) != digest(base)
    with torch._inductor.config.patch({"cpp.simdlen": 256}):
        assert digest(environment_material(device, {"size_asserts": False})) != digest(base)
    text = json.dumps(base)
    assert str(Path.cwd()) not in text and sys.prefix not in text and str(Path.home()) + "/" not in text


SECOND_PROCESS = """
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast
import torch
from toy_llama import ToyLlama, batch, compiled
torch.set_num_threads(int(sys.argv[2]))
model = ToyLlama(layers=2, hidden=16, heads=2, seed=3)
program = compiled(model, Path(sys.argv[1]))
print(program.report.compiled, program.report.loaded, program.run(*batch(5)).double().sum().item())
"""


def test_another_process_loads_a_moved_cache_without_compiling_and_recompiles_what_is_damaged(
    native_cache: Path, tmp_path: Path
) -> None:
    model = ToyLlama(layers=2, hidden=16, heads=2, seed=3)
    first = compiled(model, tmp_path / "cache")
    moved = (tmp_path / "cache").rename(tmp_path / "moved")
    (moved / "toolchain").symlink_to(native_cache / "toolchain")
    kernels = sorted((moved / "pieces").rglob("*.so"))
    command = [sys.executable, "-c", SECOND_PROCESS, str(moved), str(torch.get_num_threads())]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    result = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    compiled_count, loaded_count, total = result.stdout.split()
    assert (compiled_count, loaded_count) == ("0", str(first.report.distinct_pieces))
    assert sorted((moved / "pieces").rglob("*.so")) == kernels, "loading ran the C++ compiler"
    assert float(total) == first.run(*batch(5)).double().sum().item()

    whole, damaged, *_ = sorted((moved / "pieces").glob("*/artifact.bin"))
    before = whole.stat()
    damaged.write_bytes(b"not an artifact")
    again = compiled(model, moved)
    assert (again.report.compiled, again.report.loaded) == (1, first.report.distinct_pieces - 1)
    assert (whole.stat().st_ino, whole.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    torch.testing.assert_close(again.run(*batch(5)), eager(model, 5), rtol=1e-5, atol=1e-5)
    assert compiled(model, moved).report.loaded == first.report.distinct_pieces


def test_asserts_are_another_artifact_and_the_same_result(cache_dir: Path) -> None:
    model = ToyLlama(layers=1, hidden=16, heads=2)
    checked = compiled(model, cache_dir, debug_asserts=True)
    assert checked.report.loaded == 0
    torch.testing.assert_close(checked.run(*batch(5)), eager(model, 5), rtol=1e-5, atol=1e-5)


def test_a_piece_whose_compiler_was_ended_is_a_stop_and_not_a_damaged_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    (tmp_path / "artifact.bin").write_bytes(b"nothing that torch would load")
    with inductor_directories(tmp_path / "inductor", tmp_path / "headers"):
        assert load_piece(tmp_path / "artifact.bin", {}, stop) is None
        assert "compiled again" in caplog.text
        caplog.clear()
        stop.set()
        with pytest.raises(CompileStoppedError):
            load_piece(tmp_path / "artifact.bin", {}, stop)
    assert not caplog.text


@pytest.mark.parametrize("largest", [None, 64])
def test_a_compiler_that_fails_is_quoted_in_short_and_one_that_was_ended_not_at_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, largest: int | None
) -> None:
    def fails(*_: object) -> None:
        noise = "\n".join(f"vec256.h:{line}: warning: overflow" for line in range(3000))
        raise RuntimeError(f"C++ compile error\nCommand:\n{noise}\npiece.cpp:7: error: no such thing")

    monkeypatch.setattr(inductor, "_compile", fails)
    monkeypatch.setattr(bounded, "Bounded", lambda *_: SimpleNamespace(module=None))
    stop, piece = threading.Event(), cast(Piece, SimpleNamespace(module=None))
    with pytest.raises(CompileError, match=r"C\+\+ compile error\npiece.cpp:7: error: no such thing") as failed:
        inductor.compile_piece(piece, {}, tmp_path / "a", largest, stop)
    assert len(str(failed.value).splitlines()) == 2 and caplog.text.count("\n") <= 2
    caplog.clear()
    stop.set()
    with pytest.raises(CompileStoppedError):
        inductor.compile_piece(piece, {}, tmp_path / "a", largest, stop)
    assert not caplog.text
