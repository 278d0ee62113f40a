"""Products with matrices in any format on GPUs, and experts: each row by the matrices that it was given to.

The host knows how many rows there are, and never which expert has how many: grids are made for the most tiles that the
rows could fill, tiles beyond those end at once, and so a CUDA graph can hold it all. Rows are sorted by expert on the
device (`place_kernel`). Up to `FEW_TOKENS` tokens nothing is sorted: each choice streams its own expert's matrix, and
nothing else is read. Triton is imported only when a CUDA device asks for it.

A row's result depends on the tile that `tile_for` takes for that many rows, not on the other rows: sums along the
inputs have one order, and a token's experts are added in the order of its choices. Where it may not depend on how many
rows there are either (`fixed`), all are computed by one tile, and inputs are cut by the shape of the matrix alone: few
rows have a program for each part of the inputs, many have one that sums the parts in their order, to the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from engine.cpu_kernels.formats import Format
from engine.models.kernels import KernelSignature

DENSE = int(Format.BFLOAT16)
"""in the dtype of the rows"""
FORMATS = (
    *(int(each) for each in (Format.INT8, Format.Q4_0, Format.Q4_1, Format.Q8_0, Format.Q4_K, Format.Q6_K)),
    *(int(each) for each in (Format.INT4_GROUP, Format.FLOAT8)),
)
FEW_TOKENS = 8
FEW_ROWS = 16
"""up to which a dense layer's rows fill one tile, and its inputs may be split"""
GROUP = 32
"""inputs that lie together in quantised matrices"""
SORT_BLOCK = 1024
COMBINE_BLOCK = 1024
LINE_BLOCK = 1024
_LEAST_INPUTS = 512
"""of a split"""
_PROGRAMS = 264
"""two for each multiprocessor of an H100: as many splits as fill it"""


@dataclass(frozen=True)
class Matrix:
    """One, or those of all experts. `levels`: dense [..., n, k] (`transposed`: [..., k, n]), or uint8 or int8 [..., n,
    bytes of a row] with `scales` [..., n, numbers of a row], as `engine.weights.device_packing` lays them out."""

    levels: torch.Tensor
    scales: torch.Tensor | None
    format: int
    transposed: bool = False


@dataclass(frozen=True)
class Gate:
    """`kind` 0: none; 1: SiLU, 2: GELU by tanh, 3: the clamped SwiGLU."""

    kind: int = 0
    limit: float = 0.0
    alpha: float = 0.0


@dataclass(frozen=True)
class Tile:
    block_m: int
    """rows; 1: `row_kernel`"""
    block_n: int
    """lines of a matrix; what makes one output of two lines, or reads them crosswise, takes half as many outputs"""
    block_k: int
    warps: int
    stages: int

    def outputs(self, is_gated: bool, is_transposed: bool) -> int:
        return self.block_n // 2 if is_gated or is_transposed else self.block_n


ROW_TILES = {False: Tile(1, 8, 512, 4, 3), True: Tile(1, 8, 512, 4, 2)}
"""by whether the matrix is quantised"""
TILES = {
    False: (Tile(16, 128, 64, 4, 4), Tile(32, 128, 64, 4, 4), Tile(64, 128, 64, 4, 3), Tile(128, 128, 64, 8, 3)),
    True: (Tile(16, 64, 128, 4, 3), Tile(32, 64, 128, 4, 3), Tile(64, 128, 64, 4, 3), Tile(128, 64, 32, 8, 3)),
}
FIXED_TILES = {False: Tile(64, 128, 64, 4, 3), True: Tile(64, 64, 32, 4, 3)}
"""by whether the matrix is quantised: registers hold the sums of a part, and of all before it"""
FIXED_SMALL_TILE = Tile(64, 64, 32, 4, 3)
"""of float32, and of inputs that are not read 16 bytes at a time"""
FIXED_FEW_ROWS = 64
"""up to which parts of the inputs have programs of their own"""


def fixed_tile(k: int, quantised: bool, dtype: torch.dtype) -> Tile:
    return FIXED_SMALL_TILE if dtype == torch.float32 or k % 16 else FIXED_TILES[quantised]


def tile_for(rows: int, experts: int, quantised: bool) -> Tile:
    """For as many rows as an expert has on average."""
    return next((tile for tile in TILES[quantised] if rows <= tile.block_m * experts), TILES[quantised][-1])


def most_tiles(rows: int, experts: int, block_m: int) -> int:
    """That rows fill, however they are dealt out: each expert's last tile may have one row."""
    return (rows + min(rows, experts) * (block_m - 1)) // block_m


def splits_for(n: int, k: int, tile: Tile) -> int:
    """Of a dense layer's inputs for few rows: a power of two, by the shape alone."""
    splits = 1
    while -(-n // tile.block_n) * splits < _PROGRAMS and k // (2 * splits) >= _LEAST_INPUTS and splits < 8:
        splits *= 2
    return splits


@dataclass(frozen=True)
class RoutingRules:
    """As `engine.models.spec.RouterSpec` says; `kind` by its number in `engine.cpu_kernels.experts.Routing`."""

    kind: int
    top_k: int
    normalise: bool
    groups: int
    top_groups: int
    scale: float


class ProductKernels(Protocol):
    """On CUDA work is queued on the current stream, and nothing waits for it."""

    def linear(self, x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None, fixed: bool = False) -> torch.Tensor:
        """x [rows, k] times one matrix [n, k], bias [n] → [rows, n] in x's dtype. `fixed`: a row's bits do not depend
        on how many there are."""
        ...

    def lines(self, ids: torch.Tensor, matrix: Matrix, k: int, dtype: torch.dtype) -> torch.Tensor:
        """Of a quantised matrix [n, k], at int64 [rows] → [rows, k]."""
        ...

    def expert_linear(
        self, x: torch.Tensor, ids: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [rows, k], ids [rows], bias [experts, n] → [rows, n]: each row times its expert's matrix; zeros where the
        id is -1."""
        ...

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
        """x [tokens, hidden], ids and float32 factors [tokens, top_k]; matrices: gate rows and then up rows [experts,
        2 * inner, hidden], and down [experts, hidden, inner] → [tokens, hidden], to which `residual` is added. A choice
        of id -1 adds nothing. `fixed`: as `linear`."""
        ...

    def route(
        self, logits: torch.Tensor, correction: torch.Tensor | None, rules: RoutingRules
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [tokens, experts] → ids int32 and factors float32 [tokens, top_k], the best first, equal ones by
        index."""
        ...


@cache
def device_kernels() -> ProductKernels:
    """The Triton kernels; they hold no state."""
    from engine.models.product_kernels.device import TritonProducts

    return TritonProducts()


def levels_type(format: int, pointer: str = "*bf16") -> str:
    """Of a matrix's elements, as Triton names it; `pointer`: of rows."""
    if format == DENSE:
        return pointer
    return "*i8" if format in (Format.INT8, Format.Q8_0) else "*u8"


def scales_type(format: int, pointer: str = "*bf16") -> str:
    if format == DENSE:
        return pointer
    return "*fp32" if format in (Format.INT8, Format.FLOAT8) else "*i16"


def _product(
    tile: Tile, format: int, *, routed: bool, gate: int = 0, pointer: str = "*bf16", **flags: int
) -> KernelSignature:
    """`flags`: HAS_BIAS, TRANSPOSED, ALIGNED, and split."""
    out = "*fp32" if flags.pop("split", 0) else pointer
    matrix = {"levels": levels_type(format, pointer), "scales": scales_type(format, pointer)}
    ends = {"limit": "fp32", "alpha": "fp32"}
    constants = {"FORMAT": format, "ROUTED": int(routed), "TRANSPOSED": 0, "GATE": gate, "HAS_BIAS": 0, "ALIGNED": 1}
    constants |= flags
    block = {
        "BLOCK_N": tile.outputs(gate != 0, bool(flags.get("TRANSPOSED"))),
        "BLOCK_K": tile.block_k,
        "STAGES": tile.stages,
    }
    if tile.block_m == 1:
        name = "row_kernel"
        signature = {"x": pointer, "ids": "*i32", **matrix, "bias": pointer, "out": out}
        signature |= dict.fromkeys(("n", "k", "shared", "scale_groups"), "i32") | ends
    else:
        name = "tile_kernel"
        signature = {"x": pointer, "rows": "*i32", "experts": "*i32", **matrix, "bias": pointer, "out": out}
        signature |= dict.fromkeys(("m", "n", "k", "shared", "scale_groups", "split_blocks"), "i32") | ends
        block = {"BLOCK_M": tile.block_m} | block
    return KernelSignature(name, signature, constants | block, {"num_warps": tile.warps})


def _parts(tile: Tile, format: int, pointer: str, **flags: int) -> KernelSignature:
    signature = {"x": pointer, "levels": levels_type(format, pointer), "scales": scales_type(format, pointer)}
    signature |= {"bias": pointer, "out": pointer} | dict.fromkeys(
        ("m", "n", "k", "scale_groups", "split_blocks"), "i32"
    )
    constants = {"FORMAT": format, "TRANSPOSED": 0, "HAS_BIAS": 1, "ALIGNED": 1, "BLOCK_M": tile.block_m} | flags
    block = {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "STAGES": tile.stages}
    return KernelSignature("parts_kernel", signature, constants | block, {"num_warps": tile.warps})


def _routing() -> list[KernelSignature]:
    logits = {"logits": "*fp32", "correction": "*fp32", "ids": "*i32", "factors": "*fp32"}
    logits |= dict.fromkeys(("experts", "groups", "top_groups", "top_k"), "i32") | {"scale": "fp32"}
    found = [
        KernelSignature(
            "route_kernel",
            logits,
            {"KIND": kind, "NORMALISE": 1, "HAS_CORRECTION": int(kind == 2), "BLOCK_GROUPS": groups}
            | {"BLOCK_SIZE": 256 // groups, "BLOCK_CHOICES": 8},
            {"num_warps": 1},
        )
        for kind, groups in ((0, 1), (1, 1), (2, 8))
    ]
    counted = {"ids": "*i32", "counts": "*i32"}
    found.append(KernelSignature("count_kernel", counted | {"choices": "i32"}, {"BLOCK": SORT_BLOCK}))
    placed = counted | {"rows": "*i32", "experts_of": "*i32", "choices": "i32", "tiles": "i32"}
    found.append(KernelSignature("place_kernel", placed, {"LINES": 64, "BLOCK_EXPERTS": 128, "BLOCK": SORT_BLOCK}))
    summed = {"products": "*bf16", "ids": "*i32", "factors": "*fp32", "residual": "*bf16", "y": "*bf16"}
    summed |= {"n": "i32", "top_k": "i32"}
    found.append(KernelSignature("combine_kernel", summed, {"HAS_RESIDUAL": 1, "BLOCK": COMBINE_BLOCK}))
    return found


def _signatures() -> tuple[KernelSignature, ...]:
    found = _routing()
    for tile in (ROW_TILES[False], *TILES[False]):
        found.append(_product(tile, DENSE, routed=True, gate=1))
        found.append(_product(tile, DENSE, routed=True, HAS_BIAS=1, ALIGNED=0, TRANSPOSED=1, pointer="*fp16"))
    found += [_product(tile, DENSE, routed=True, gate=gate) for gate in (2, 3) for tile in TILES[False][2:3]]
    looked_up = {"ids": "*i64", "out": "*bf16", "k": "i32", "scale_groups": "i32"}
    for format in FORMATS:
        types = {"ids": "*i64", "levels": levels_type(format), "scales": scales_type(format), **looked_up}
        found.append(KernelSignature("line_kernel", types, {"FORMAT": format, "BLOCK_K": LINE_BLOCK}))
        found += [_product(tile, format, routed=False, split=int(tile.block_m == 16)) for tile in TILES[True]]
        found.append(_product(ROW_TILES[True], format, routed=False, HAS_BIAS=1))
    of_16_bits = ((format, FIXED_TILES[format != DENSE], "*bf16") for format in (DENSE, *FORMATS))
    for format, tile, pointer in (*of_16_bits, (DENSE, FIXED_SMALL_TILE, "*fp32")):
        found.append(_product(tile, format, routed=False, pointer=pointer, split=1))
        found.append(_product(tile, format, routed=False, pointer=pointer, HAS_BIAS=1))
        found.append(_parts(tile, format, pointer))
    found.append(_parts(FIXED_SMALL_TILE, DENSE, "*fp16", ALIGNED=0))
    found.append(_product(FIXED_SMALL_TILE, DENSE, routed=False, pointer="*fp16", ALIGNED=0, split=1))
    found += [_product(FIXED_TILES[True], int(format), routed=True, gate=1) for format in (Format.Q4_K, Format.INT8)]
    for tile in (ROW_TILES[True], *TILES[True]):
        found.append(_product(tile, int(Format.Q4_K), routed=True, gate=1))
        found.append(_product(tile, int(Format.Q6_K), routed=True, gate=1, pointer="*fp16"))
    return tuple(found)


KERNELS: tuple[KernelSignature, ...] = _signatures()
"""Discovery table: `tools/compile_triton.py` compiles every entry for the supported GPUs without one."""
