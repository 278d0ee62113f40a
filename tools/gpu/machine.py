"""What this machine is, and which of the packages that the suite uses it lacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil

from gpu.context import Context

REQUIRED = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "tqdm", "psutil")
"""of the engine in one process, beside what its modules import below"""
ALSO_IMPORTED = ("zmq", "gguf")
OPTIONAL = ("flashinfer", "pytest", "hypothesis")


def missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def run(context: Context) -> None:
    """Part `machine`."""
    context.figure("device", context.device.describe())
    versions = {}
    for name in (*REQUIRED, *ALSO_IMPORTED, "flashinfer-python"):
        try:
            versions[name] = importlib.metadata.version({"zmq": "pyzmq"}.get(name, name))
        except importlib.metadata.PackageNotFoundError:
            continue
    context.figure("versions", versions | {"python": platform.python_version()})
    context.figure("host", {"cores": os.cpu_count(), "nvcc": shutil.which("nvcc") is not None})
    context.figure("missing", {"required": missing((*REQUIRED, *ALSO_IMPORTED)), "optional": missing(OPTIONAL)})
