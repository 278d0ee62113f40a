"""What this machine offers, read once at a door, so that `engine.resolve.resolve` can stay a pure function."""

from __future__ import annotations

import ctypes
import logging
import math
import os
from pathlib import Path

import msgspec
import psutil

from engine.config import Device
from engine.cuda_versions import driver_is_there, driver_problem, driver_version, runtime_version
from engine.parallel_config import LAUNCHER_VARIABLES

logger = logging.getLogger(__name__)


class CudaDevice(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    capability: tuple[int, int]
    memory_bytes: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    physical_cores: int
    """physical cores that this process may run on, cut to the container's CPU quota"""
    memory_bytes: int
    """main memory, cut to the container's limit"""
    cpus: frozenset[int] = frozenset()
    """logical ones that this process may run on; empty: nobody knows"""
    cuda: tuple[CudaDevice, ...] = ()
    """empty also when nobody asked for a GPU (`probe_machine("cpu")`)"""
    cuda_problem: str | None = None
    """why a driver that is there gives no device"""
    home: str
    """absolute; caches live below it"""
    working_directory: str
    """absolute; relative paths of the settings are taken from here"""
    launcher: dict[str, str] = {}
    """torchrun's variables, as far as they are set"""


def probe_machine(device: Device = "auto") -> Machine:
    """Read this machine. Torch is imported only where a GPU is possible: the import takes seconds, and 200 MB."""
    asked = device == "cuda" or (device == "auto" and driver_is_there())
    cuda = _cuda_devices() if asked else ()
    problem = driver_problem(driver_version(), runtime_version()) if asked and not cuda else None
    if problem is not None and device == "auto":
        logger.warning("device='auto' takes the CPU, because %s", problem)
    return Machine(
        physical_cores=_physical_cores(),
        memory_bytes=main_memory()[0],
        cpus=frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset(),
        cuda=cuda,
        cuda_problem=problem,
        home=str(Path.home()),
        working_directory=str(Path.cwd()),
        launcher=launcher_variables(),
    )


def launcher_variables() -> dict[str, str]:
    """See `Machine.launcher`."""
    return {name: os.environ[name] for name in LAUNCHER_VARIABLES if name in os.environ}


def _physical_cores() -> int:
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    # Two hyper-threads share one set of vector units: a second compute thread on a core only costs.
    cores = {_read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    quota = (_read("/sys/fs/cgroup/cpu.max") or "max").split()
    if len(quota) == 2 and quota[0] != "max":
        return max(1, min(len(cores), math.ceil(int(quota[0]) / int(quota[1]))))
    return len(cores)


def main_memory() -> tuple[int, int]:
    """(total, free) bytes that the machine, or the control group around this process, grants."""
    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit and limit.isdigit() and used and used.isdigit() and int(limit) < total:
        total, free = int(limit), min(free, max(int(limit) - int(used), 0))
    return total, free


def _cuda_devices() -> tuple[CudaDevice, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            CudaDevice(
                name=properties.name,
                capability=(properties.major, properties.minor),
                memory_bytes=properties.total_memory,
            )
        )
    return tuple(found)


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def release_free_memory() -> None:
    """Hand what the allocator keeps of freed memory back to the system, where it can (glibc): after a model was loaded,
    as much as its largest tensors."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
