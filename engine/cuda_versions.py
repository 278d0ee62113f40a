"""What this machine's driver and this torch say of CUDA. Torch is imported where it is asked."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress

Version = tuple[int, int]


def driver_is_there() -> bool:
    """The library that torch loads for any GPU is on this machine. Asks no torch."""
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return True
    return False


def driver_version() -> Version | None:
    """The newest CUDA that the NVIDIA driver serves; None: there is no driver, or torch cannot ask."""
    import torch

    ask: Callable[[], int] | None = getattr(torch._C, "_cuda_getDriverVersion", None)
    version = 0 if ask is None else int(ask())
    return (version // 1000, version % 1000 // 10) if version else None


def runtime_version() -> Version | None:
    """The CUDA that torch was built for; None: it was built without."""
    import torch

    parts = (torch.version.cuda or "").split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 else None


def driver_problem(driver: Version | None, runtime: Version | None) -> str | None:
    """Why the driver cannot run torch at all. Within one major version of CUDA an older driver runs what a newer
    toolkit compiled (NVIDIA's minor version compatibility)."""
    if driver is None or runtime is None or driver[0] >= runtime[0]:
        return None
    return (
        f"the NVIDIA driver serves CUDA up to {dotted(driver)}, torch was built for {dotted(runtime)}: update the "
        f"driver, or install torch for CUDA {driver[0]}"
    )


def dotted(version: Version | None) -> str:
    return "unknown" if version is None else f"{version[0]}.{version[1]}"
