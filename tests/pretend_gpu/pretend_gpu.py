"""A GPU that is not there: `device="cuda"` runs on a CPU, line by line, through the code that a real one would run.

    with pretend_gpu() as machine:
        LLM(..., device="cuda")

Nothing of the engine is replaced above the device: resolving, loading, streams, staging, kernels' launches, attention
backends with their builds and plans, capture and replay are its own. What is replaced is below: `torch.cuda`, where
tensors say they are, and what kernels are compiled to. Set TRITON_INTERPRET=1 before Triton is first imported.

What it cannot show: races (work is done when it is queued; tests/runner has a checker for those), memory of a capture's
pool (tests/compilation has one), what nvcc, Triton's compiler or Inductor generate for a GPU, and any speed.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))

import pretend_kernels as kernels
from pretend_queues import DEVICE, Event, Graph, Machine, Stream
from pretend_tensors import (
    ON_DEVICE,
    DeviceMode,
    active,
    on_device,
    put_storage,
    started_where_active,
)

CHUNK = 512


@contextmanager
def pretend_gpu(
    total_bytes: int = 8 << 30, flashinfer: str | None = "0.7.2", inductor: bool = True
) -> Iterator[Machine]:
    """This thread, and those that it starts, see one GPU of `total_bytes`. `flashinfer`: the version that is installed;
    `inductor`: False runs pieces as traced, uncompiled."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("a pretend GPU interprets Triton: set TRITON_INTERPRET=1 before Triton is imported")
    with pretend_torch(total_bytes) as machine, ExitStack() as stack:
        _replace(stack, _kernels(machine, inductor))
        stack.enter_context(kernels.linears_on_device())
        if flashinfer is not None:
            sys.modules["flashinfer"] = kernels.fake_flashinfer(machine)
            stack.callback(sys.modules.pop, "flashinfer")
            version = kernels.version_of(importlib.metadata.version, flashinfer)
            stack.enter_context(patch.object(importlib.metadata, "version", version))
        yield machine


@contextmanager
def pretend_torch(total_bytes: int = 8 << 30) -> Iterator[Machine]:
    """torch's part alone: tensors, streams, events and graphs, no kernels."""
    machine = Machine(total_bytes)
    with ExitStack() as stack:
        start, run = started_where_active()
        stack.enter_context(patch.multiple(threading.Thread, start=start, run=run))
        _replace(stack, [*_queues(machine), *_torch(machine)])
        stack.enter_context(DeviceMode(machine))
        yield machine


def _replace(stack: ExitStack, replacements: Iterable[tuple[Any, str, Any]]) -> None:
    for target, name, value in replacements:
        stack.enter_context(patch.object(target, name, value, create=not hasattr(target, name)))


def _index(device: Any) -> None:
    """Any way to name the one device there is."""
    if device is None or device in (0, -1):
        return
    found = torch.device(device)
    if found.type != "cuda" or found.index not in (None, 0):
        raise AssertionError(f"Invalid device {device!r}")


def _queues(machine: Machine) -> list[tuple[Any, str, Any]]:
    class PretendStream(Stream):
        def __init__(self, device: Any = None, priority: int = 0) -> None:
            _index(device)
            super().__init__(machine)

    class PretendEvent(Event):
        def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
            super().__init__(machine, enable_timing)

    class PretendGraph(Graph):
        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__(machine)

    def set_stream(stream: Stream) -> None:
        machine.current_stream = stream

    cuda = torch.cuda
    return [
        (cuda, "Stream", PretendStream),
        (cuda, "Event", PretendEvent),
        (cuda, "CUDAGraph", PretendGraph),
        (cuda, "set_stream", set_stream),
        (cuda, "graph_pool_handle", lambda: (0, 1)),
        (cuda, "is_current_stream_capturing", lambda: machine.recording is not None),
    ]


def _torch(machine: Machine) -> list[tuple[Any, str, Any]]:
    def of_device(value: Callable[[], Any]) -> Callable[..., Any]:
        def call(device: Any = None) -> Any:
            if not active():
                raise AssertionError("Torch not compiled with CUDA enabled")
            _index(device)
            return value()

        return call

    def synchronize() -> None:
        if machine.recording is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing (synchronize)")
        machine.deliver()

    def set_sync_debug_mode(mode: int) -> None:
        if not isinstance(mode, int):
            raise TypeError(f"not a mode: {mode!r}")
        machine.sync_debug_mode = mode

    class PretendGenerator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return plain_generator()

    plain_storage: Callable[..., torch.UntypedStorage] = torch._C._construct_storage_from_data_pointer
    plain_generator = torch.Generator

    def storage_at(address: int, device: torch.device, size_bytes: int) -> torch.UntypedStorage:
        storage = plain_storage(address, torch.device("cpu"), size_bytes)
        if device.type == "cuda":
            before = machine.allocated_bytes
            put_storage(storage, ON_DEVICE, machine)
            machine.allocated_bytes = before
        return storage

    cuda, total = torch.cuda, machine.total_bytes
    return [
        (cuda, "is_available", active),
        (cuda, "is_initialized", active),
        (cuda, "_lazy_init", lambda: None),
        (cuda, "device_count", lambda: int(active())),
        (cuda, "current_device", lambda: 0),
        (cuda, "set_device", _index),
        (cuda, "get_device_properties", of_device(lambda: machine.properties)),
        (cuda, "synchronize", of_device(synchronize)),
        (cuda, "empty_cache", lambda: None),
        (cuda, "mem_get_info", of_device(lambda: (max(total - machine.allocated_bytes, 0), total))),
        (cuda, "memory_allocated", of_device(lambda: machine.allocated_bytes)),
        (cuda, "max_memory_allocated", of_device(lambda: machine.allocated_bytes)),
        (cuda, "reset_peak_memory_stats", of_device(lambda: None)),
        (cuda, "current_stream", of_device(lambda: machine.current_stream)),
        (cuda, "default_stream", of_device(lambda: machine.default_stream)),
        (torch._C, "_host_emptyCache", lambda: None),
        (torch._C, "_cuda_set_sync_debug_mode", set_sync_debug_mode),
        (torch._C, "_cuda_get_sync_debug_mode", lambda: machine.sync_debug_mode),
        (torch._C, "_construct_storage_from_data_pointer", storage_at),
        (torch, "set_num_threads", lambda count: None),  # the device's own work is done by whoever queues it
        (torch, "Generator", PretendGenerator),
    ]


def _kernels(machine: Machine, inductor: bool) -> list[tuple[Any, str, Any]]:
    import compilation.model as model
    from attention_backends import cuda, cuda_build, toolchain
    from engine import machine as probed
    from engine.models.product_kernels import device
    from engine.runner import preflight
    from engine.sampling.kernels.device import TritonKernels

    def as_host_work(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with on_device():
                return function(*args, **kwargs)

        return call

    def without_wrappers(*args: Any) -> Any:
        with on_device():
            return kernels.piece_on_device(machine, plain_without_wrappers(*args))

    plain_without_wrappers = model.without_wrappers
    pieces: list[tuple[Any, str, Any]] = [
        (model, "trace", as_host_work(model.trace)),
        (model, "compile_piece", as_host_work(model.compile_piece) if inductor else kernels.eager_piece),
        (model, "load_piece", as_host_work(model.load_piece) if inductor else lambda *artifact: None),
        (model, "without_wrappers", without_wrappers),
    ]
    # A program's tokens: the interpreter computes all of them for the 300 that there are.
    # Outputs of a row's: it takes as long for 128 of them as for 8.
    rows = (device, "ROW_TILES", {key: replace(tile, block_n=128) for key, tile in device.ROW_TILES.items()})
    sampling = (TritonKernels.__init__, "__defaults__", (CHUNK, *(TritonKernels.__init__.__defaults__ or ())[1:]))
    compilers = [(module, "find_nvcc", toolchain.find_compiler) for module in (cuda, cuda_build)]
    return [
        *kernels.interpreted_launches(machine),
        (cuda_build, "_compile", kernels.emulated_library),
        (probed, "driver_is_there", active),
        (preflight, "PROBES", replace(preflight.PROBES, nvcc=lambda device, cache_dir: None)),
        rows,
        sampling,
        *compilers,
        *pieces,
    ]


__all__ = ["DEVICE", "Machine", "pretend_gpu", "pretend_torch"]
