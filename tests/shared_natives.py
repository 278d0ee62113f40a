"""Cache directories of tests that start empty but for what all tests build alike: native code for CPUs, and tokenizers,
which are known by what their files hold."""

from __future__ import annotations

from pathlib import Path

from attention_backends.toolchain import default_cache_dir

FOLDERS = ("attention-cpu", "crew-cpu", "drafts-cpu", "linear-cpu", "parallel-cpu", "sampling-cpu", "tokenizers")


def cache_with_natives(path: Path) -> Path:
    """Builds go where the session's are, found by the hash of their sources: a minute and a half for each cache that
    had its own."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in FOLDERS:
        shared = default_cache_dir() / name
        shared.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (path / name).exists():
            (path / name).symlink_to(shared, target_is_directory=True)
    return path
