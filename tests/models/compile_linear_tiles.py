"""Run by test_linear_kernels.py in a process of its own, with Triton's compiler (TRITON_INTERPRET=0), without a GPU.

Compiles every tile as its launcher would for a model whose k is a multiple of 16, for every other tile not one of its
block too, and prints one JSON line for each.
"""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.models.kernels import TILES, Tile, tile_constexprs
from engine.models.kernels import device as kernels


def compile_tile(tile: Tile, k: int, capability: int) -> dict[str, object]:
    function = kernels.matvec_kernel if tile.kind == "matvec" else kernels.matmul_kernel
    constexprs = tile_constexprs(tile, k, has_bias=False, split=False)
    names = [name for name in function.arg_names if name not in constexprs]
    pointers = [name for name in names if name in ("x", "weight", "bias", "y", "out")]
    source = ASTSource(
        fn=function,
        signature={n: "*bf16" if n in pointers else "i32" for n in names} | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers if name != "bias"},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": tile.warps})
    ptx = compiled.asm["ptx"]
    loads = re.findall(r"ld\.global\S*", ptx) + re.findall(r"cp\.async\.c[ga]\S* \[[^;]*", ptx)
    return {
        "tile": tile.name,
        "shared_bytes": compiled.metadata.shared,
        "copies_16": len(re.findall(r"cp\.async\.cg\S* \[[^;]*0x10", ptx)),
        "loads_16": len(re.findall(r"ld\.global\S*v4\.b32", ptx)),
        "loads": len(loads),
        "tensor_core": len(re.findall(r"mma\.sync\S*m16n8k16", ptx)),
    }


if __name__ == "__main__":
    target = int(sys.argv[1])
    for index, each in enumerate(TILES):
        print(json.dumps(compile_tile(each, 4096 + 16 * (index % 2), target)), flush=True)
