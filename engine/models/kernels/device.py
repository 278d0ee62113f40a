"""The small-batch linear layer in Triton. Importing this module needs Triton; `device_kernels` does so only for CUDA.

No integer is specialised on its value, so nothing compiles again after warm-up. That k is a multiple of 16, which makes
16-byte loads possible, is a constant of its own: ALIGNED, from which the compiler learns it by arithmetic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from engine.models.kernels import Plan, tile_constexprs

_SUM_BLOCK = 512


@triton.jit(do_not_specialize=["n", "k"], do_not_specialize_on_alignment=["bias"])
def matvec_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    HAS_BIAS: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    # Threads lie along K, eight weights (16 bytes) each, so a piece of x is loaded once for all rows of the block; the
    # eight products are summed in the thread, and threads are summed once, at the end.
    if ALIGNED:
        k = k // 16 * 16
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = weight + tl.minimum(outputs, n - 1).to(tl.int64) * k
    inputs = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for first in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        at = first + inputs
        if EVEN_K:
            w = tl.load(rows[:, None] + at[None, :], eviction_policy="evict_first")
            v = tl.load(x + at, eviction_policy="evict_last")
        else:
            mask = at < k
            w = tl.load(rows[:, None] + at[None, :], mask=mask[None, :], other=0.0, eviction_policy="evict_first")
            v = tl.load(x + at, mask=mask, other=0.0, eviction_policy="evict_last")
        products = w.to(tl.float32) * v.to(tl.float32)[None, :]
        sums += tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // 8, 8]), axis=2)
    total = tl.sum(sums, axis=1)
    inside = outputs < n
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + outputs, total.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["m", "n", "k", "split_blocks"], do_not_specialize_on_alignment=["bias"])
def matmul_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    split_blocks: tl.tensor,
    HAS_BIAS: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    # `out` is y [m, n], or with SPLIT float32 partial sums [splits, m, n], to which the bias is not yet added.
    if ALIGNED:
        k = k // 16 * 16
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    tokens = tl.arange(0, BLOCK_M)
    inputs = tl.arange(0, BLOCK_K)
    rows = weight + tl.minimum(outputs, n - 1).to(tl.int64) * k
    sources = x + tokens * k
    present = tokens < m
    begin = split * split_blocks * BLOCK_K
    end = tl.minimum(begin + split_blocks * BLOCK_K, k)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        at = first + inputs
        if EVEN_K:
            w = tl.load(rows[:, None] + at[None, :], eviction_policy="evict_first")
            v = tl.load(sources[:, None] + at[None, :], mask=present[:, None], other=0.0)
        else:
            mask = (at < k)[None, :]
            w = tl.load(rows[:, None] + at[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
            v = tl.load(sources[:, None] + at[None, :], mask=present[:, None] & mask, other=0.0)
        sums = tl.dot(v, tl.trans(w), sums)
    inside = outputs < n
    if HAS_BIAS and not SPLIT:
        sums += tl.load(bias + outputs, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = out + (split * m + tokens).to(tl.int64)[:, None] * n + outputs[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=present[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["count", "n", "splits"], do_not_specialize_on_alignment=["bias"])
def sum_splits_kernel(
    partials: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    count: tl.tensor,
    n: tl.tensor,
    splits: tl.tensor,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):  # in this order, whoever finished first
        total += tl.load(partials + split * count + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


class TritonKernels:
    """See `LinearKernels`."""

    failures: tuple[type[Exception], ...] = (TritonError,)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        x = _aligned_rows(x)
        (m, k), n, tile = x.shape, weight.shape[0], plan.tile
        y = torch.empty((m, n), dtype=x.dtype, device=x.device)
        added = y if bias is None else bias  # a pointer that is not read
        constexprs = tile_constexprs(tile, k, bias is not None, plan.splits > 1)
        blocks = triton.cdiv(n, tile.block_n)
        if tile.kind == "matvec":
            matvec_kernel[(blocks,)](x, weight, added, y, n, k, **constexprs, num_warps=tile.warps)
            return y
        split_blocks = triton.cdiv(triton.cdiv(k, plan.splits), tile.block_k)
        split = plan.splits > 1
        out = torch.empty((plan.splits, m, n), dtype=torch.float32, device=x.device) if split else y
        matmul_kernel[(blocks, plan.splits)](
            x, weight, added, out, m, n, k, split_blocks, **constexprs, num_warps=tile.warps
        )
        if split:
            sum_splits_kernel[(triton.cdiv(m * n, _SUM_BLOCK),)](
                out, added, y, m * n, n, plan.splits, HAS_BIAS=int(bias is not None), BLOCK=_SUM_BLOCK
            )
        return y


def _aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, from a multiple of 16 bytes on, as the compiled kernels assume; a copy is small."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
