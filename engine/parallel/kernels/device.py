"""The ranks' sum in Triton. Importing this module needs Triton; `sum_for` does so only for CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.parallel.kernels import BLOCK


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["residual"])
def sum_kernel(
    parts: tl.tensor,
    residual: tl.tensor,
    y: tl.tensor,
    count: tl.tensor,
    SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(parts + at, mask=inside).to(tl.float32)
    for rank in tl.static_range(1, SIZE):
        total += tl.load(parts + count.to(tl.int64) * rank + at, mask=inside).to(tl.float32)
    rounded = total.to(y.dtype.element_ty)
    if HAS_RESIDUAL:
        both = tl.load(residual + at, mask=inside).to(tl.float32) + rounded.to(tl.float32)
        rounded = both.to(y.dtype.element_ty)
    tl.store(y + at, rounded, mask=inside)


def sum_on_device(parts: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See `engine.parallel.kernels.SumRanks`."""
    size, count = parts.shape
    y = torch.empty(count, dtype=dtype, device=parts.device)
    grid = (triton.cdiv(count, BLOCK),)
    sum_kernel[grid](parts, y if residual is None else residual, y, count, size, residual is not None, BLOCK)
    return y
