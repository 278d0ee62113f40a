"""Compile every Triton kernel of the tree to cubin without a GPU, so that CI catches what only a GPU would otherwise
show.

Run: python tools/compile_triton.py [room ...], where a room is one of those listed in `ROOMS` (default: all). Exits 1
and names the kernel when one does not compile.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOMS = ("engine.runner.kernels", "engine.sampling.kernels", "attention_backends.page_kernels")
"""Packages with a table `KERNELS` of what their module `device` holds."""
CAPABILITIES = (80, 90)


class Kernel(Protocol):
    """An entry of a table; each room has a class of its own for it, since leaves import nothing of the engine."""

    @property
    def name(self) -> str: ...

    @property
    def signature(self) -> Mapping[str, str]: ...

    @property
    def constexprs(self) -> Mapping[str, int]: ...


def compile_kernel(function: object, kernel: Kernel, capability: int) -> int:
    """Size in bytes of the cubin of one kernel for compute capability `capability` (90: Hopper)."""
    source = ASTSource(
        fn=function,
        signature={**kernel.signature, **dict.fromkeys(kernel.constexprs, "constexpr")},
        constexprs=dict(kernel.constexprs),
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return len(compiled.asm["cubin"])


def compile_room(room: str) -> Iterator[str]:
    """Compile a room's table; one line per kernel and target. Raises what Triton raises, with the kernel's name."""
    device = importlib.import_module(f"{room}.device")
    kernels: Iterable[Kernel] = importlib.import_module(room).KERNELS
    for kernel in kernels:
        for capability in CAPABILITIES:
            started = time.perf_counter()
            try:
                size_bytes = compile_kernel(getattr(device, kernel.name), kernel, capability)
            except Exception as error:
                error.add_note(f"{room}: {kernel.name} does not compile for sm_{capability}")
                raise
            took = time.perf_counter() - started
            types = ",".join(dict.fromkeys(t for t in kernel.signature.values() if t.startswith("*")))
            yield f"{kernel.name} sm_{capability} [{types}] {size_bytes} bytes {took:.2f} s"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile every Triton kernel for GPUs that need not be there.")
    parser.add_argument("rooms", nargs="*", choices=[*ROOMS, []], metavar="room", help=f"of {', '.join(ROOMS)}")
    for room in parser.parse_args(argv).rooms or ROOMS:
        for line in compile_room(room):
            print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
