"""LoRA adapters. `KERNELS`: `tools/compile_triton.py` compiles every entry for the supported GPUs without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class KernelSignature(NamedTuple):
    name: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, int]
    options: Mapping[str, int] = {}


def _signatures(pointer: str) -> tuple[KernelSignature, ...]:
    low = {"ranks": "*i32", "low": "*fp32", "most_rank": "i32"}
    shrink = {"x": pointer, "slots": "*i32", "a": pointer, **low, "inputs": "i32", "parts": "i32"}
    block = {"part": "i32", "begin": "i32", "end": "i32"}
    expand = {"y": pointer, "slots": "*i32", "b": pointer, **low, "outputs": "i32", "parts": "i32", **block}
    return (
        KernelSignature("shrink_kernel", shrink, {"BLOCK_RANK": 16, "BLOCK_INPUTS": 256}),
        KernelSignature("expand_kernel", expand, {"BLOCK_RANK": 16, "BLOCK_OUTPUTS": 128}),
    )


KERNELS = tuple(kernel for pointer in ("*bf16", "*fp16", "*fp32") for kernel in _signatures(pointer))
