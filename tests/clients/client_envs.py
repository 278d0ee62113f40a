"""Virtual environments, one for each client: what they require does not fit into one."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from attention_backends.toolchain import default_cache_dir

HERE = Path(__file__).parent
MODEL = "smollm2"
"""what the server calls the demo model"""
BORROWING = ("guidellm",)
"""These want torch, and use nothing of it that a GPU would do: they get the project's, behind packages of their own."""


def python_of(name: str) -> Path:
    """The interpreter of an environment with exactly what ``requirements/NAME.txt`` pins, made when it is first asked
    for, and kept beside other caches."""
    requirements = HERE / "requirements" / f"{name}.txt"
    told = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    home = default_cache_dir() / "clients" / f"{name}-{told}"
    python = home / "bin" / "python"
    if (home / "complete").exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "-r"]
    subprocess.run([*pip, str(requirements)], check=True, timeout=500)
    if name in BORROWING:
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.origin is not None
        (packages,) = home.glob("lib/python*/site-packages")
        (packages / "borrowed.pth").write_text(f"{Path(spec.origin).parents[1]}\n")
    (home / "complete").touch()
    return python
