"""Compile every Triton kernel of the tree to cubin without a GPU, so that CI catches what only a GPU would otherwise
show.

Run: python tools/compile_triton.py [--exhaustive] [room ...], where a room is one of those listed in `ROOMS` (default:
all). Every kernel is compiled for every target, and every entry of a table for one of them, with --exhaustive for all.
Exits 1 and names the kernel when one does not compile, keeps more than it has registers or shared memory for, or has
not the parameters that its room's table says. Triton itself keeps what it compiled, by the hash of sources, options and
compilers.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOMS = (
    "engine.adapters",
    "engine.models.kernels",
    "engine.models.product_kernels",
    "engine.models.state_kernels",
    "engine.parallel.kernels",
    "engine.runner.kernels",
    "engine.sampling.kernels",
    "attention_backends.latent_kernels",
    "attention_backends.page_kernels",
)
"""Packages with a table `KERNELS` of what their module `device` holds."""
CAPABILITIES = (80, 90)
MOST_SHARED_BYTES = 99 << 10
"""that a program may have on GPUs of consumers"""


class Kernel(Protocol):
    """An entry of a table; each room has a class of its own for it, since leaves import nothing of the engine."""

    @property
    def name(self) -> str: ...

    @property
    def signature(self) -> Mapping[str, str]: ...

    @property
    def constexprs(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class Binary:
    size_bytes: int
    registers: int
    """of a thread"""
    spilled_bytes: int
    """of a thread, in local memory"""
    shared_bytes: int
    """of a program"""


def compile_kernel(function: triton.runtime.JITFunction, kernel: Kernel, capability: int) -> Binary:
    """One kernel for compute capability `capability` (90: Hopper), as its launcher would have it: with the launcher's
    options, and with pointers aligned to 16 bytes unless the kernel does not specialise on that."""
    free = {p.name for p in function.params if p.do_not_specialize or p.do_not_specialize_on_alignment}
    aligned = [i for i, (name, kind) in enumerate(kernel.signature.items()) if kind[0] == "*" and name not in free]
    source = ASTSource(
        fn=function,
        signature={**kernel.signature, **dict.fromkeys(kernel.constexprs, "constexpr")},
        constexprs=dict(kernel.constexprs),
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = dict(getattr(kernel, "options", {}))
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    cubin = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", printed)}
    return Binary(len(cubin), used["REG"], used["STACK"] + used["LOCAL"], compiled.metadata.shared)


def check_table(room: str, device: ModuleType, kernels: Iterable[Kernel]) -> None:
    """Raises RuntimeError for a kernel that the table lacks, or names other parameters of. Names of what only kernels
    call begin with an underscore."""
    jitted = {name: f.arg_names for name, f in vars(device).items() if isinstance(f, triton.runtime.JITFunction)}
    described = {kernel.name: [*kernel.signature, *kernel.constexprs] for kernel in kernels}
    for name in sorted(jitted.keys() | described.keys()):
        if name[0] != "_" and jitted.get(name) != described.get(name):
            raise RuntimeError(f"{room}: {name} takes {jitted.get(name)}, KERNELS says {described.get(name)}")


def targets(kernels: Iterable[Kernel], exhaustive: bool) -> Iterator[tuple[Kernel, int]]:
    """All entries on all targets; or of each name the first on all of them, and the others on one, in turn."""
    seen: Counter[str] = Counter()
    for kernel in kernels:
        place = seen[kernel.name]
        seen[kernel.name] += 1
        for capability in CAPABILITIES if exhaustive or not place else [CAPABILITIES[place % len(CAPABILITIES)]]:
            yield kernel, capability


def compile_room(room: str, exhaustive: bool) -> Iterator[str]:
    """Compile a room's table; one line per kernel and target. Raises what Triton raises, with the kernel's name, and
    RuntimeError for a kernel that spills registers."""
    device = importlib.import_module(f"{room}.device")
    kernels: Iterable[Kernel] = importlib.import_module(room).KERNELS
    check_table(room, device, kernels)
    for kernel, capability in targets(kernels, exhaustive):
        started = time.perf_counter()
        try:
            binary = compile_kernel(getattr(device, kernel.name), kernel, capability)
        except Exception as error:
            error.add_note(f"{room}: {kernel.name} does not compile for sm_{capability}")
            raise
        took = time.perf_counter() - started
        types = ",".join(dict.fromkeys(t for t in kernel.signature.values() if t.startswith("*")))
        if binary.spilled_bytes:
            raise RuntimeError(f"{room}: {kernel.name} spills {binary.spilled_bytes} bytes on sm_{capability}")
        if binary.shared_bytes > MOST_SHARED_BYTES:
            raise RuntimeError(f"{room}: {kernel.name} takes {binary.shared_bytes} bytes of shared memory")
        size = f"{binary.size_bytes} bytes, {binary.registers} registers"
        yield f"{kernel.name} sm_{capability} [{types}] {size} {took:.2f} s"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile every Triton kernel for GPUs that need not be there.")
    parser.add_argument("rooms", nargs="*", choices=[*ROOMS, []], metavar="room", help=f"of {', '.join(ROOMS)}")
    parser.add_argument("--exhaustive", action="store_true", help="every entry for every target")
    arguments = parser.parse_args(argv)
    for room in arguments.rooms or ROOMS:
        for line in compile_room(room, arguments.exhaustive):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
