"""The machine's two ceilings, measured where they are used: a large copy, and a large bf16 matrix product."""

from __future__ import annotations

import torch

from gpu.context import Context
from gpu.device import Device
from gpu.timing import time_calls

COPY_BYTES = 4 << 30
MATMUL_SIZE = 8192


def copy_gb_per_s(device: Device) -> float:
    """Bytes read plus bytes written, of random data."""
    count = 1 << 16 if device.dry else COPY_BYTES // 2
    source = torch.empty(count, dtype=torch.bfloat16, device=device.torch_device).normal_()
    target = torch.full_like(source, float("nan"))
    timing = time_calls(device, lambda _: target.copy_(source))
    assert torch.equal(source[-1024:], target[-1024:])
    return 2 * source.nbytes / timing.median_us / 1e3


def matmul_tflop_per_s(device: Device) -> float:
    """bf16, random data."""
    size = 64 if device.dry else MATMUL_SIZE
    a, b = (torch.randn(size, size, device=device.torch_device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    timing = time_calls(device, lambda _: torch.mm(a, b, out=out))
    return 2 * size**3 / timing.median_us / 1e6


def run(context: Context) -> None:
    """Part `ceilings`."""
    context.figure("copy_gb_per_s", round(copy_gb_per_s(context.device), 1))
    context.figure("matmul_tflop_per_s", round(matmul_tflop_per_s(context.device), 1))
