"""Compiled pieces on disk: complete and verified, or built anew; never half, stale or foreign.

`root/pieces/<digest>/` holds one entry: what torch wrote (`artifact.bin`, `inductor/` with the kernels) and
`manifest.json`, which is written last and holds the full key material and the SHA-256 of every file. An entry without a
manifest that fits does not exist. Builders hold a file lock, so that processes starting together compile a piece once.
Loading runs the code that an entry holds, so the store refuses a directory that anybody else may write.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compilation.directory import trusted_directory
from compilation.key import KeyMaterial, digest

MANIFEST = "manifest.json"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` + ".lock" among processes; the kernel drops it with its holder."""
    with open(path.with_name(path.name + ".lock"), "a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class ArtifactStore:
    """Entries of one cache directory. Hold `entry_lock` from the check of an entry to its use or publication."""

    def __init__(self, cache_dir: Path) -> None:
        self.root = trusted_directory(cache_dir.absolute())  # compilers run in directories of their own
        self._pieces = trusted_directory(self.root / "pieces")

    def path(self, material: KeyMaterial) -> Path:
        return self._pieces / digest(material)

    @contextmanager
    def entry_lock(self, material: KeyMaterial) -> Iterator[Path]:
        """The entry's directory, locked against other processes."""
        path = self.path(material)
        with locked(path):
            yield path

    def is_valid(self, material: KeyMaterial) -> bool:
        """Whether the entry exists, was made from exactly this material, and has every file as it was written."""
        path = self.path(material)
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            files = manifest["files"]
            if manifest["material"] != dict(material) or not files:
                return False
            return all(_sha256(path / name) == checksum for name, checksum in files.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def discard(self, material: KeyMaterial) -> Path:
        """Remove whatever is at the entry's place and leave an empty directory to build in."""
        path = self.path(material)
        if path.exists():
            shutil.rmtree(path)
        return trusted_directory(path)

    def publish(self, material: KeyMaterial) -> None:
        """Declare the entry complete: hash its files, then put the manifest in place at one stroke."""
        path = self.path(material)
        files = {str(f.relative_to(path)): _sha256(f) for f in sorted(path.rglob("*")) if _is_content(f)}
        write_atomically(path / MANIFEST, json.dumps({"material": dict(material), "files": files}, indent=1))


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old content or the new one, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _is_content(path: Path) -> bool:
    return path.is_file() and path.suffix != ".lock" and "__pycache__" not in path.parts


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
