"""Everything that runs on a pretend GPU: Triton kernels under the interpreter, the in-tree CUDA kernels under the
emulator (behind their real binding), FlashInfer's wrappers by brute force, compiled pieces as code for the CPU."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from pretend_queues import Machine
from pretend_tensors import ON_DEVICE, active, on_device, put, require_on_device, tensors_in

TESTS = Path(__file__).parents[1]
for room in (TESTS, TESTS / "attention_backends"):
    if str(room) not in sys.path:
        sys.path.append(str(room))

FLASHINFER_VERSIONS = ("0.6.18", "0.7.2")


def launch(machine: Machine, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Queue a kernel of the device's; inside of one, only run it."""
    if not active():
        return function(*args, **kwargs)
    require_on_device(what, (args, kwargs))
    with on_device():
        result = put(function(*args, **kwargs), ON_DEVICE, machine)
        machine.queue(function, list(args), kwargs, result)
    return result


# Triton


def interpreted_launches(machine: Machine) -> list[tuple[Any, str, Any]]:
    """Launches by the interpreter."""
    from quick_interpreter import quicker
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__

    def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        return launch(machine, f"Triton kernel {executor.fn.__name__}", partial(run, executor), *args, **kwargs)

    return [(interpreter.GridExecutor, "__call__", call), *quicker()]


# the in-tree kernels


def emulated_library(nvcc: str, compiler: str, kernels: Any, namespace: str, scratch: Path) -> Path:
    """Stands for `cuda_build._compile`: the same kernel sources for the emulator, and the binding itself, which then
    dispatches for CPU tensors (pretend ones are)."""
    from emulated_cuda import EMULATOR, FLAGS, KERNELS, RUNTIME

    from attention_backends.cuda_build import binding_command, translation_units
    from attention_backends.toolchain import TORCH_LIBRARIES, run, run_all

    flags = [*FLAGS, "-I", str(EMULATOR), "-I", str(KERNELS), *kernels.macros]
    sources = [*translation_units(), *(EMULATOR / name for name in RUNTIME)]
    objects = [scratch / f"{source.stem}.o" for source in sources]
    commands = [
        [compiler, *flags, "-x", "c++", "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    objects.append(scratch / "binding.o")
    commands.append([*binding_command(compiler, objects[-1], kernels, namespace), "-DPAGELOOM_DISPATCH=CPU"])
    run_all(commands, 300)
    built = scratch / "library.so"
    libraries = ["-Wl,-Bsymbolic", "-Wl,--no-as-needed", *TORCH_LIBRARIES]
    run([compiler, "-shared", *map(str, objects), "-o", str(built), *libraries], 300)
    return built


# FlashInfer


class DeviceQueue:
    """What the fake wrappers push their work to."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def push(self, work: Callable[[], None]) -> None:
        if self._machine.recording is None:
            with on_device():
                work()
        else:
            self._machine.queue(work, [], {}, None)


def fake_flashinfer(machine: Machine) -> ModuleType:
    """A module `flashinfer` with the two wrappers."""
    from fake_flashinfer import FakeDecodeWrapper, FakePrefillWrapper

    queue = DeviceQueue(machine)
    module = ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    on_host = ("indptr", "last_page_len", "qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len", "seq_lens")

    def planned(plan: Callable[..., None]) -> Callable[..., None]:
        import inspect

        signature = inspect.signature(plan)

        @wraps(plan)
        def call(*args: Any, **kwargs: Any) -> None:
            if machine.recording is not None:
                raise RuntimeError("a plan inside a capture")
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                if isinstance(value, torch.Tensor) and (value.device.type == "cpu") != (name in on_host):
                    raise ValueError(f"plan: {name} lies on {value.device}")
            with on_device():
                plan(*args, **kwargs)

        return call

    def ran(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(run)
        def call(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            require_on_device("FlashInfer's run", (args, kwargs))
            with on_device():
                result: torch.Tensor = put(run(self, *args, **kwargs), ON_DEVICE, machine)
            return result

        return call

    def made(init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def call(self: Any, *args: Any, **kwargs: Any) -> None:
            require_on_device("a FlashInfer wrapper", (args, kwargs))
            with on_device():
                init(self, *args, **kwargs)

        return call

    for name, base in (
        ("BatchDecodeWithPagedKVCacheWrapper", FakeDecodeWrapper),
        ("BatchPrefillWithPagedKVCacheWrapper", FakePrefillWrapper),
    ):
        members = {
            "_stream": queue,
            "__init__": made(base.__init__),
            "plan": planned(base.plan),
            "run": ran(base.run),
            "reset_workspace_buffer": made(base.reset_workspace_buffer),
        }
        setattr(module, name, type(name, (base,), members))
    return module


def version_of(real: Callable[[str], str], flashinfer: str) -> Callable[[str], str]:
    return lambda name: flashinfer if name == "flashinfer-python" else real(name)


# linear layers and experts


@contextmanager
def linears_on_device() -> Iterator[None]:
    """The operators' CUDA implementations, for CPU tensors (pretend ones are)."""
    from engine.models import device_packed, expert_op
    from engine.models.linear_op import on_cuda

    library = torch.library.Library("pageloom", "IMPL")
    for name, function in {"linear": on_cuda, **expert_op.ON_DEVICE, **device_packed.ON_DEVICE}.items():
        library.impl(name, function, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


# compiled pieces


def piece_on_device(machine: Machine, function: Callable[[list[Any]], Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """A compiled piece, launched as one kernel. Takes a list that it empties, as pieces do."""

    def run(arguments: list[Any]) -> Sequence[Any]:
        return function(list(arguments))

    def call(arguments: list[Any]) -> Sequence[Any]:
        taken = list(arguments)
        arguments.clear()
        for tensor in tensors_in(taken):
            require_on_device("a compiled piece", tensor)
        result: Sequence[Any] = launch(machine, "a compiled piece", run, taken)
        return result

    return call


def eager_piece(piece: Any, options: Any, artifact: Path, *bounds: Any) -> Callable[[list[Any]], Sequence[Any]]:
    """Stands for `compile_piece` where Inductor's code is not the subject: the traced graph, called."""
    artifact.write_text("no code")

    def run(arguments: list[Any]) -> Sequence[Any]:
        taken = list(arguments)
        arguments.clear()
        result: Sequence[Any] = piece.module(*taken)
        return result

    return run
