"""Directories whose files are loaded as code: by whom they may be written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from compilation.errors import CompileError


def trusted_directory(path: Path) -> Path:
    """Create `path` for this user only, or check that it is this user's or root's and that nobody else may write it.
    Raises CompileError if it is not so."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise CompileError(f"cache directory {path} cannot be used: {error}; set another cache_dir") from error
    if status.st_uid not in (os.geteuid(), 0):
        raise CompileError(f"cache directory {path} belongs to user {status.st_uid} and is not trusted; set cache_dir")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.filemode(status.st_mode)
        raise CompileError(f"cache directory {path} is writable by others ({mode}); chmod go-w it, or set cache_dir")
    return path


def trusted_tree(root: Path) -> None:
    """Check a cache directory, created where that is possible, and the directories in it, which hold one kind of files
    each. Where there is none nothing can be loaded from it, which is no error. Raises CompileError."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    trusted_directory(root)
    for entry in sorted(root.iterdir()):
        if entry.is_dir():
            trusted_directory(entry)
