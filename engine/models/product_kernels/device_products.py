"""Products of rows and matrices in any format, in Triton: of one layer's matrix, or of each row's own expert.

    out[r] = x[r // shared] · W[expert of r]ᵀ + bias, or gate(of its first half) · its second half

`levels` and `scales` are a matrix, or those of all experts one after another (`device_formats`). Sums are float32 in an
order that depends on the tile alone. A product and its bias are rounded to x's dtype, an activation is, and its product
with the other half. (Branches by constants end in an `else`: what stands behind a `return` is compiled, too.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.models.product_kernels.device_formats import DENSE, dense_tile, halves


@triton.jit
def _rounded(values: tl.tensor, like: tl.tensor) -> tl.tensor:
    """float32 that holds what the dtype of `like` points to can hold."""
    return values.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _times_sigmoid(x: tl.tensor, t: tl.tensor) -> tl.tensor:
    return x / (1.0 + tl.exp(-t))


@triton.jit
def _gated(
    gate: tl.tensor, up: tl.tensor, out: tl.tensor, limit: tl.tensor, alpha: tl.tensor, GATE: tl.constexpr
) -> tl.tensor:
    # 1: SiLU, 2: GELU by tanh, 3: the clamped SwiGLU of GPT-OSS
    gate, up = _rounded(gate, out), _rounded(up, out)
    if GATE == 3:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        up, inner = _rounded(up + 1.0, out), alpha * gate
    elif GATE == 2:
        inner = gate * (1.5957691216057308 + 0.07135481627136 * (gate * gate))
    else:
        inner = gate
    return _rounded(_times_sigmoid(gate, inner), out) * up


@triton.jit
def _bias(bias: tl.tensor, lines: tl.tensor, inside: tl.tensor) -> tl.tensor:
    return tl.load(bias + lines, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n", "k", "shared", "scale_groups"], do_not_specialize_on_alignment=["ids", "bias"])
def row_kernel(
    x: tl.tensor,
    ids: tl.tensor,
    levels: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    shared: tl.tensor,
    scale_groups: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    FORMAT: tl.constexpr,
    ROUTED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    # One row by a block of outputs: nothing is read but what this row's expert has, and nothing written of expert -1.
    # `n`: of out.
    if ALIGNED:
        k = k // 16 * 16
    row = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outputs < n
    lines = n if GATE == 0 else 2 * n
    expert = tl.load(ids + row).to(tl.int64) if ROUTED else tl.zeros([], tl.int64)
    if ROUTED:  # noqa: SIM102 - known when it is compiled
        if expert < 0:
            return
    base = expert * lines
    first = base + tl.minimum(outputs, n - 1)
    source = x + (row // shared).to(tl.int64) * k
    matrix = levels, scales, base, lines, k, scale_groups
    total = _row_sums(source, matrix, first, FORMAT, TRANSPOSED, BLOCK_N, BLOCK_K, STAGES)
    if HAS_BIAS:
        total += _bias(bias, first, inside)
    if GATE != 0:
        up = _row_sums(source, matrix, first + n, FORMAT, TRANSPOSED, BLOCK_N, BLOCK_K, STAGES)
        if HAS_BIAS:
            up += _bias(bias, first + n, inside)
        total = _gated(total, up, out, limit, alpha, GATE)
    tl.store(out + row.to(tl.int64) * n + outputs, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _row_sums(
    source: tl.tensor,
    matrix: tl.tuple,
    first: tl.tensor,
    FORMAT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    # Of the row at `source` and lines `first` of a matrix of `lines` that begins at line `base`: float32 [BLOCK_N].
    levels, scales, base, lines, k, scale_groups = matrix
    if FORMAT == DENSE:
        sums = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
        for begin in tl.range(0, k, BLOCK_K, num_stages=STAGES):
            at = begin + tl.arange(0, BLOCK_K)
            v = tl.load(source + at, mask=at < k, other=0.0).to(tl.float32)[None, :]
            w = tl.trans(dense_tile(levels, base, first, at, lines, k, TRANSPOSED)).to(tl.float32)
            sums += tl.sum(tl.reshape(w * v, [BLOCK_N, BLOCK_K // 8, 8]), axis=2)
    else:
        sums = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
        for begin in tl.range(0, k, BLOCK_K, num_stages=STAGES):
            groups = begin // 32 + tl.arange(0, BLOCK_K // 32)
            at = groups[:, None] * 32 + tl.arange(0, 16)[None, :]
            present = groups[:, None] < k // 32
            low = tl.load(source + at, mask=present, other=0.0).to(tl.float32)[None, :, :]
            high = tl.load(source + at + 16, mask=present, other=0.0).to(tl.float32)[None, :, :]
            a, b = halves(levels, scales, first, begin // 32, k // 32, scale_groups, FORMAT, BLOCK_N, BLOCK_K // 32)
            sums += tl.sum(a * low + b * high, axis=2)
    return tl.sum(sums, axis=1)


@triton.jit(
    do_not_specialize=["m", "n", "k", "shared", "scale_groups", "split_blocks"],
    do_not_specialize_on_alignment=["rows", "experts", "bias"],
)
def tile_kernel(
    x: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    levels: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    shared: tl.tensor,
    scale_groups: tl.tensor,
    split_blocks: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    FORMAT: tl.constexpr,
    ROUTED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    # Tiles of rows of one expert, as `place_kernel` makes them, by blocks of outputs. Without ROUTED rows are as they
    # lie, and k may be split: then `out` is float32 partial sums [splits, m, n], to which the bias is not yet added.
    if ALIGNED:
        k = k // 16 * 16
    tile, split, lines = tl.program_id(0), tl.program_id(2), n if GATE == 0 else 2 * n
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.load(experts + tile).to(tl.int64) if ROUTED else tl.zeros([], tl.int64)
    if ROUTED:
        if expert < 0:
            return
        places = tl.load(rows + places)
    present, inside, base = (places < m)[:, None], outputs < n, expert * lines
    first = base + tl.minimum(outputs, n - 1)
    source = (x + (places // shared).to(tl.int64) * k)[:, None]
    matrix = levels, scales, base, lines, k, scale_groups
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    others = sums
    begin = split * split_blocks * BLOCK_K
    for at in tl.range(begin, tl.minimum(begin + split_blocks * BLOCK_K, k), BLOCK_K, num_stages=STAGES):
        low, high = _rows(source, present, at, k, FORMAT, BLOCK_K)
        sums = _added(sums, low, high, matrix, first, at, FORMAT, TRANSPOSED, BLOCK_N, BLOCK_K)
        if GATE != 0:
            others = _added(others, low, high, matrix, first + n, at, FORMAT, TRANSPOSED, BLOCK_N, BLOCK_K)
    if HAS_BIAS:
        sums += _bias(bias, first, inside)[None, :]
    if GATE != 0:
        if HAS_BIAS:
            others += _bias(bias, first + n, inside)[None, :]
        sums = _gated(sums, others, out, limit, alpha, GATE)
    target = out + (split * m + places).to(tl.int64)[:, None] * n + outputs[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=present & inside[None, :])


@triton.jit(do_not_specialize=["m", "n", "k", "scale_groups", "split_blocks"], do_not_specialize_on_alignment=["bias"])
def parts_kernel(
    x: tl.tensor,
    levels: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    scale_groups: tl.tensor,
    split_blocks: tl.tensor,
    FORMAT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    # One matrix. What `tile_kernel` makes in as many programs as k has parts, and `sum_splits_kernel` of those, to the
    # same bits: a program sums the parts one after the other.
    if ALIGNED:
        k = k // 16 * 16
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    places = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    present, inside, first = (places < m)[:, None], outputs < n, tl.minimum(outputs, n - 1).to(tl.int64)
    source = (x + places.to(tl.int64) * k)[:, None]
    matrix = levels, scales, tl.zeros([], tl.int64), n, k, scale_groups
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    part = split_blocks * BLOCK_K
    for begin in tl.range(0, k, part):
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for at in tl.range(begin, tl.minimum(begin + part, k), BLOCK_K, num_stages=STAGES):
            low, high = _rows(source, present, at, k, FORMAT, BLOCK_K)
            sums = _added(sums, low, high, matrix, first, at, FORMAT, TRANSPOSED, BLOCK_N, BLOCK_K)
        total += sums
    if HAS_BIAS:
        total += _bias(bias, first, inside)[None, :]
    target = out + places.to(tl.int64)[:, None] * n + outputs[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=present & inside[None, :])


@triton.jit
def _rows(
    source: tl.tensor,
    present: tl.tensor,
    first: tl.tensor,
    k: tl.tensor,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    # Inputs of rows as the format wants them: as they lie (and nothing else), or in the two parts of `halves`.
    if FORMAT == DENSE:
        at = (first + tl.arange(0, BLOCK_K))[None, :]
        low = tl.load(source + at, mask=present & (at < k), other=0.0)
        high = low
    else:
        lane = tl.arange(0, BLOCK_K // 2)
        at = (first + lane // 16 * 32 + lane % 16)[None, :]
        low = tl.load(source + at, mask=present & (at < k), other=0.0)
        high = tl.load(source + at + 16, mask=present & (at < k), other=0.0)
    return low, high


@triton.jit
def _added(
    sums: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    matrix: tl.tuple,
    first: tl.tensor,
    at: tl.tensor,
    FORMAT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    # Inputs from `at` on of rows, as `_rows` has them, and of lines `first`. float32 is multiplied as such, not cut.
    levels, scales, base, lines, k, scale_groups = matrix
    if FORMAT == DENSE:
        w = dense_tile(levels, base, first, at + tl.arange(0, BLOCK_K), lines, k, TRANSPOSED)
        sums = tl.dot(low, w, sums, input_precision="ieee")
    else:
        a, b = halves(levels, scales, first, at // 32, k // 32, scale_groups, FORMAT, BLOCK_N, BLOCK_K // 32)
        a = tl.trans(tl.reshape(a, [BLOCK_N, BLOCK_K // 2])).to(low.dtype)
        b = tl.trans(tl.reshape(b, [BLOCK_N, BLOCK_K // 2])).to(low.dtype)
        sums = tl.dot(low, a, sums, input_precision="ieee")
        sums = tl.dot(high, b, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["k", "scale_groups"], do_not_specialize_on_alignment=["ids"])
def line_kernel(
    ids: tl.tensor,
    levels: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    k: tl.tensor,
    scale_groups: tl.tensor,
    FORMAT: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    # A line of a quantised matrix, as the dtype of `out`: what an embedding looks up.
    row, first = tl.program_id(0), tl.program_id(1) * (BLOCK_K // 32)
    line = tl.load(ids + row).to(tl.int64) + tl.zeros([1], tl.int64)
    low, high = halves(levels, scales, line, first, k // 32, scale_groups, FORMAT, 1, BLOCK_K // 32)
    groups = (first + tl.arange(0, BLOCK_K // 32))[None, :, None]
    target = out + row.to(tl.int64) * k + groups * 32 + tl.arange(0, 16)[None, None, :]
    tl.store(target, low.to(out.dtype.element_ty), mask=groups < k // 32)
    tl.store(target + 16, high.to(out.dtype.element_ty), mask=groups < k // 32)
