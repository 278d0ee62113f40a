"""Launches of the products and of what deals rows out to experts. Importing this module needs Triton; `device_kernels`
does so only for CUDA. No integer is specialised on its value, so nothing compiles again after warm-up.
"""

from __future__ import annotations

import torch
import triton

from engine.models.kernels.device import sum_splits_kernel as _sum_splits
from engine.models.product_kernels import (
    COMBINE_BLOCK,
    DENSE,
    FEW_ROWS,
    FEW_TOKENS,
    FIXED_FEW_ROWS,
    GROUP,
    LINE_BLOCK,
    ROW_TILES,
    SORT_BLOCK,
    Gate,
    Matrix,
    RoutingRules,
    Tile,
    fixed_tile,
    most_tiles,
    splits_for,
    tile_for,
)
from engine.models.product_kernels.device_products import line_kernel, parts_kernel, row_kernel, tile_kernel
from engine.models.product_kernels.device_routing import combine_kernel, count_kernel, place_kernel, route_kernel

_SUM_BLOCK = 512
_PLAIN = Gate()


class TritonProducts:
    """See `ProductKernels`."""

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, fixed: bool = False) -> torch.Tensor:
        x = _aligned_rows(x)
        rows, k = x.shape
        n, quantised = _outputs(matrix), matrix.format != DENSE
        if rows == 1 and not fixed:
            return _row_product(x, None, matrix, bias, (rows, n), 1, _PLAIN)
        tile = fixed_tile(k, quantised, x.dtype) if fixed else tile_for(rows, 1, quantised)
        splits = splits_for(n, k, tile) if fixed or rows <= FEW_ROWS else 1
        if rows > FIXED_FEW_ROWS and splits > 1:
            return _product_of_parts(x, matrix, bias, (rows, n), tile, splits)
        if splits == 1:
            return _tile_product(x, None, matrix, bias, (rows, n), 1, _PLAIN, tile)
        partials = torch.empty((splits, rows, n), dtype=torch.float32, device=x.device)
        _tile_product(x, None, matrix, None, (rows, n), 1, _PLAIN, tile, partials)
        y = x.new_empty((rows, n))
        added = y if bias is None else bias
        grid = (triton.cdiv(rows * n, _SUM_BLOCK),)
        _sum_splits[grid](partials, added, y, rows * n, n, splits, HAS_BIAS=int(bias is not None), BLOCK=_SUM_BLOCK)
        return y

    def lines(self, ids: torch.Tensor, matrix: Matrix, k: int, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty((ids.shape[0], k), dtype=dtype, device=ids.device)
        scales, scale_groups = _scales(matrix, k)
        line_kernel[(ids.shape[0], triton.cdiv(k, LINE_BLOCK))](
            ids.contiguous(), matrix.levels, scales, out, k, scale_groups, FORMAT=matrix.format, BLOCK_K=LINE_BLOCK
        )
        return out

    def expert_linear(
        self, x: torch.Tensor, ids: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        x, ids = _aligned_rows(x), ids.to(torch.int32).contiguous()
        shape = (x.shape[0], _outputs(matrix))
        if x.shape[0] <= FEW_TOKENS:
            products = _row_product(x, ids, matrix, bias, shape, 1, _PLAIN)
        else:
            tile = tile_for(x.shape[0], matrix.levels.shape[0], matrix.format != DENSE)
            placed = _placed(ids, matrix.levels.shape[0], tile)
            products = _tile_product(x, placed, matrix, bias, shape, 1, _PLAIN, tile)
        return products.masked_fill_(ids[:, None] < 0, 0.0)

    def experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        factors: torch.Tensor,
        matrices: tuple[Matrix, Matrix],
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        residual: torch.Tensor | None,
        gate: Gate,
        fixed: bool = False,
    ) -> torch.Tensor:
        x, flat = _aligned_rows(x), ids.to(torch.int32).contiguous().view(-1)
        (tokens, hidden), top_k, choices = x.shape, ids.shape[1], flat.shape[0]
        (first, second), count = matrices, matrices[0].levels.shape[0]
        inner = (choices, _outputs(first) // 2)
        quantised = any(each.format != DENSE for each in matrices)
        if tokens <= FEW_TOKENS and not fixed:
            between = _row_product(x, flat, first, biases[0], inner, top_k, gate)
            products = _row_product(between, flat, second, biases[1], (choices, hidden), 1, _PLAIN)
        else:
            # One tile for both, so that rows are dealt out once.
            tile = fixed_tile(hidden, quantised, x.dtype) if fixed else tile_for(choices, count, quantised)
            placed = _placed(flat, count, tile)
            between = _tile_product(x, placed, first, biases[0], inner, top_k, gate, tile)
            products = _tile_product(between, placed, second, biases[1], (choices, hidden), 1, _PLAIN, tile)
        y = torch.empty_like(x)
        combine_kernel[(tokens, triton.cdiv(hidden, COMBINE_BLOCK))](
            products,
            flat,
            factors.contiguous(),
            y if residual is None else _aligned_rows(residual),
            y,
            hidden,
            top_k,
            HAS_RESIDUAL=int(residual is not None),
            BLOCK=COMBINE_BLOCK,
        )
        return y

    def route(
        self, logits: torch.Tensor, correction: torch.Tensor | None, rules: RoutingRules
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.contiguous()
        tokens, experts = logits.shape
        ids = torch.empty((tokens, rules.top_k), dtype=torch.int32, device=logits.device)
        factors = torch.empty((tokens, rules.top_k), dtype=torch.float32, device=logits.device)
        groups = rules.groups if rules.top_groups < rules.groups else 1
        route_kernel[(tokens,)](
            logits,
            logits if correction is None else correction,
            ids,
            factors,
            experts,
            groups,
            rules.top_groups,
            rules.top_k,
            rules.scale,
            KIND=rules.kind,
            NORMALISE=int(rules.normalise),
            HAS_CORRECTION=int(correction is not None),
            BLOCK_GROUPS=triton.next_power_of_2(groups),
            BLOCK_SIZE=triton.next_power_of_2(experts // groups),
            BLOCK_CHOICES=triton.next_power_of_2(rules.top_k),
            num_warps=1,
        )
        return ids, factors


def _outputs(matrix: Matrix) -> int:
    return matrix.levels.shape[-1 if matrix.transposed else -2]


def _aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, from a multiple of 16 bytes on, as the compiled kernels assume."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _placed(ids: torch.Tensor, experts: int, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [tiles * block_m], [tiles]: see `place_kernel`."""
    choices = ids.shape[0]
    tiles = most_tiles(choices, experts, tile.block_m)
    counts, rows, of = (ids.new_empty(size) for size in (experts, tiles * tile.block_m, tiles))
    count_kernel[(experts,)](ids, counts, choices, BLOCK=SORT_BLOCK)
    block = triton.next_power_of_2(experts)
    place_kernel[(experts,)](
        ids, counts, rows, of, choices, tiles, LINES=tile.block_m, BLOCK_EXPERTS=block, BLOCK=SORT_BLOCK
    )
    return rows, of


def _constants(matrix: Matrix, k: int, bias: torch.Tensor | None, gate: Gate, routed: bool) -> dict[str, int]:
    flags = {"FORMAT": matrix.format, "ROUTED": int(routed), "TRANSPOSED": int(matrix.transposed), "GATE": gate.kind}
    return flags | {"HAS_BIAS": int(bias is not None), "ALIGNED": int(k % 16 == 0)}


def _scales(matrix: Matrix, k: int) -> tuple[torch.Tensor, int]:
    """What is read of them, and groups of inputs that share one."""
    if matrix.scales is None:
        return matrix.levels, 1
    return matrix.scales, max(1, k // GROUP // matrix.scales.shape[-1])


def _row_product(
    x: torch.Tensor,
    ids: torch.Tensor | None,
    matrix: Matrix,
    bias: torch.Tensor | None,
    shape: tuple[int, int],
    shared: int,
    gate: Gate,
) -> torch.Tensor:
    k, tile = x.shape[1], ROW_TILES[matrix.format != DENSE]
    out, block = x.new_empty(shape), tile.outputs(gate.kind != 0, matrix.transposed)
    scales, scale_groups = _scales(matrix, k)
    row_kernel[(triton.cdiv(shape[1], block), shape[0])](
        x,
        out if ids is None else ids,
        matrix.levels,
        scales,
        out if bias is None else bias,
        out,
        shape[1],
        k,
        shared,
        scale_groups,
        gate.limit,
        gate.alpha,
        **_constants(matrix, k, bias, gate, ids is not None),
        BLOCK_N=block,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out


def _tile_product(
    x: torch.Tensor,
    placed: tuple[torch.Tensor, torch.Tensor] | None,
    matrix: Matrix,
    bias: torch.Tensor | None,
    shape: tuple[int, int],
    shared: int,
    gate: Gate,
    tile: Tile,
    partials: torch.Tensor | None = None,
) -> torch.Tensor:
    """`partials`: float32 [splits, rows, n], which then is what is written."""
    k = x.shape[1]
    out = x.new_empty(shape) if partials is None else partials
    splits = 1 if partials is None else partials.shape[0]
    scales, scale_groups = _scales(matrix, k)
    tiles = triton.cdiv(shape[0], tile.block_m) if placed is None else placed[1].shape[0]
    rows, experts = (out, out) if placed is None else placed
    block = tile.outputs(gate.kind != 0, matrix.transposed)
    tile_kernel[(tiles, triton.cdiv(shape[1], block), splits)](
        x,
        rows,
        experts,
        matrix.levels,
        scales,
        out if bias is None else bias,
        out,
        shape[0],
        shape[1],
        k,
        shared,
        scale_groups,
        triton.cdiv(triton.cdiv(k, splits), tile.block_k),
        gate.limit,
        gate.alpha,
        **_constants(matrix, k, bias, gate, placed is not None),
        BLOCK_M=tile.block_m,
        BLOCK_N=block,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out


def _product_of_parts(
    x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, shape: tuple[int, int], tile: Tile, splits: int
) -> torch.Tensor:
    k, out = x.shape[1], x.new_empty(shape)
    scales, scale_groups = _scales(matrix, k)
    block = tile.outputs(False, matrix.transposed)
    parts_kernel[(triton.cdiv(shape[0], tile.block_m), triton.cdiv(shape[1], block))](
        x,
        matrix.levels,
        scales,
        out if bias is None else bias,
        out,
        shape[0],
        shape[1],
        k,
        scale_groups,
        triton.cdiv(triton.cdiv(k, splits), tile.block_k),
        FORMAT=matrix.format,
        TRANSPOSED=int(matrix.transposed),
        HAS_BIAS=int(bias is not None),
        ALIGNED=int(k % 16 == 0),
        BLOCK_M=tile.block_m,
        BLOCK_N=block,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return out
