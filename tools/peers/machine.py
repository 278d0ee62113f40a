"""What a figure was measured on: recorded with it, never typed in by hand."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

INTERESTING_FLAGS = (
    "avx2",
    "f16c",
    "avx512f",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
)
PACKAGES = ("pageloom", "torch", "transformers", "numpy")


def facts() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    info = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = set(info.get("flags", "").split())
    return {
        "cpu": info.get("model name", platform.processor() or platform.machine()),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "isa": [flag for flag in INTERESTING_FLAGS if flag in flags],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def sentence(machine: dict[str, Any]) -> str:
    """One line for a results page."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {', '.join(machine['isa'])}; "
        f"{versions}, Python {machine['python']}; {machine['date']}"
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
