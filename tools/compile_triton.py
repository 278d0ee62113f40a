"""Compile every Triton kernel of the tree to cubin without a GPU, so that CI catches what only a GPU would otherwise
show.

Run: python tools/compile_triton.py. Exits 1 and names the kernel when one does not compile.
"""

from __future__ import annotations

import sys
import time

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.runner.kernels import KERNELS, KernelSignature, device

CAPABILITIES = (80, 90)


def compile_kernel(kernel: KernelSignature, capability: int) -> int:
    """Size in bytes of the cubin of one kernel for compute capability `capability` (90: Hopper)."""
    source = ASTSource(
        fn=getattr(device, kernel.name),
        signature={**kernel.signature, **dict.fromkeys(kernel.constexprs, "constexpr")},
        constexprs=dict(kernel.constexprs),
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return len(compiled.asm["cubin"])


def compile_all() -> list[str]:
    """Compile everything; returns one line per kernel and target. Raises what Triton raises."""
    lines = []
    for kernel in KERNELS:
        for capability in CAPABILITIES:
            started = time.perf_counter()
            size_bytes = compile_kernel(kernel, capability)
            took = time.perf_counter() - started
            types = ",".join(dict.fromkeys(t for t in kernel.signature.values() if t.startswith("*")))
            lines.append(f"{kernel.name} sm_{capability} [{types}] {size_bytes} bytes {took:.2f} s")
    return lines


def main() -> int:
    for line in compile_all():
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
