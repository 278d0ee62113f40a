"""Everything that changes the code of a compiled piece, and nothing else: no paths, no weights, no layer index, no
time.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from torch import fx

from compilation.structure import describe

FORMAT = 1
"""of an entry on disk; raise it when the layout of an entry changes"""

KeyMaterial = Mapping[str, str]


def digest(material: KeyMaterial) -> str:
    """The name under which an entry is stored: SHA-256 of the canonical JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(dict(material), sort_keys=True).encode()).hexdigest()


def environment_material(device: torch.device, inductor_options: Mapping[str, object]) -> dict[str, str]:
    """What is common to all pieces of one process: versions, device, numerics settings, compiler configuration."""
    material = {
        "format": str(FORMAT),
        "source": _own_source(),
        "python": f"{sys.implementation.cache_tag} {platform.machine()}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "options": json.dumps(dict(inductor_options), sort_keys=True),
        "inductor": _inductor_config(),
        "numerics": " ".join(
            map(
                str,
                (
                    torch.get_float32_matmul_precision(),
                    torch.get_default_dtype(),
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                ),
            )
        ),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        material["device"] = f"{properties.name} {torch.cuda.get_device_capability(device)} {torch.version.cuda}"
        material["device"] += f" {torch.version.hip} {_triton_version()}"
    else:
        material["device"] = f"{device.type} {cpu_identity()} {compiler_identity()}"
    return material


def piece_material(graph: fx.Graph, environment: KeyMaterial) -> dict[str, str]:
    """The full material of one piece: its structure (the text itself) and the environment."""
    return {**environment, "graph": describe(graph)}


@cache
def cpu_identity() -> str:
    """What `-march=native` sees: the vector level that torch uses and the processor's feature flags."""
    flags = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = " ".join(sorted(line.partition(":")[2].split()))
                break
    return f"{torch.backends.cpu.get_cpu_capability()} {hashlib.sha256(flags.encode()).hexdigest()[:16]}"


@cache
def compiler_identity() -> str:
    """Version and target of the C++ compiler that Inductor uses, without its path; "none" if there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        command = [get_cpp_compiler(), "-dumpfullversion", "-dumpversion", "-dumpmachine"]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (InvalidCxxCompiler, OSError, subprocess.SubprocessError):
        return "none"
    return f"{Path(command[0]).name} {' '.join(output.split())}"


@cache
def _own_source() -> str:
    """Hash of the files of this package: what they do to a graph is part of the code that comes out."""
    hasher = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        hasher.update(path.name.encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()


def _inductor_config() -> str:
    """Hash of Inductor's settings, which users may change; torch leaves paths and the like out of the portable form."""
    text = repr(sorted(torch._inductor.config.save_config_portable().items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)
