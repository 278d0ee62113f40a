"""The sum of what ranks have sent, on the device: in their order, in float32, rounded once, and the residual after it.

One interface: Triton on CUDA, plain torch elsewhere, which is the oracle of the Triton kernel at once. Triton is
imported only when a CUDA device asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


class SumRanks(Protocol):
    def __call__(self, parts: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """parts [ranks, elements], contiguous → [elements] of `dtype`, and with `residual` [elements] of that dtype
        their sum, rounded again. Returns at once on CUDA: work is queued on the current stream."""
        ...


def sum_on_host(parts: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See `SumRanks`."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    y = total.to(dtype)
    return y if residual is None else (residual.float() + y.float()).to(dtype)


def sum_for(device: torch.device) -> SumRanks:
    if device.type != "cuda":
        return sum_on_host
    from engine.parallel.kernels.device import sum_on_device

    return sum_on_device


@dataclass(frozen=True)
class KernelSignature:
    """What the ahead-of-time check compiles: one Triton kernel with the types that its launcher passes."""

    name: str
    """attribute of `engine.parallel.kernels.device`"""
    signature: dict[str, str]
    constexprs: dict[str, int]
    options: dict[str, int] = field(default_factory=dict)


BLOCK = 1024


def _sum(parts: str, y: str, size: int, residual: bool) -> KernelSignature:
    signature = {"parts": parts, "residual": y, "y": y, "count": "i32"}
    constexprs = {"SIZE": size, "HAS_RESIDUAL": int(residual), "BLOCK": BLOCK}
    return KernelSignature("sum_kernel", signature, constexprs)


KERNELS = tuple(
    _sum(parts, y, size, residual)
    for parts, y in (("*bf16", "*bf16"), ("*fp16", "*fp16"), ("*fp32", "*bf16"), ("*fp32", "*fp32"))
    for size, residual in ((2, True), (8, False))
)
