"""The linear layer for at most 16 rows, where all that counts is how fast the weights stream in.

y [m, n] = x [m, k] Wᵀ (+ bias), W [n, k] row-major, float32 sums, rounded once. A GPU's library reaches 60 to 90 % of
its bandwidth here, depending on n and k; these kernels are its competitors, and `engine.models.linear_choice` measures
who serves which shape. Triton is imported only when a CUDA device asks for it.

By Little's law an H200 (132 multiprocessors, 4.8 TB/s, about 1.1 µs under load) needs 40 KB in flight on each
multiprocessor. Every tile keeps `Tile.bytes_in_flight` of weights under way by asynchronous 16-byte copies into shared
memory, which cost no registers, so two or three programs per multiprocessor are enough. Tiles are small so that even
n = 1024 gives programs to all multiprocessors; all of them are resident at once and share the bandwidth evenly, so a
grid that does not divide by 132 leaves no tail. What few rows of tiles cannot fill is split along k.

- *matvec* (one row): every thread sums its own products; no padded rows, nothing but weights in flight.
- *matmul* (up to 16 rows): tensor cores on 16 padded rows. They idle either way: 16 rows at 4.8 TB/s are 77 TFLOP/s.

A row's result depends on the tile and the number of splits, not on the other rows or on how many there are: partial
sums are added in one order. It does differ in its last bit between tiles, and from the library's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, Protocol

import torch

MAX_ROWS = 16
BUCKETS = (1, 2, 4, 8, 16)
"""numbers of rows for which a choice is made; others take the next larger one's"""
SPLITS = (1, 2, 4, 8)
_HALF = 2
"""bytes of a weight"""
_CODE_BITS = 8
_SPLIT_BITS = 2


@dataclass(frozen=True)
class Tile:
    """How one program walks over its block of weights [block_n, k]."""

    kind: Literal["matvec", "matmul"]
    block_n: int
    block_k: int
    warps: int
    stages: int
    """of the pipeline; 1: loads go to registers, as many at once as the compiler finds room for"""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.block_n}x{self.block_k} w{self.warps} s{self.stages}"

    @property
    def bytes_in_flight(self) -> int:
        """Weights, per program."""
        return max(1, self.stages - 1) * self.block_n * self.block_k * _HALF

    @property
    def max_rows(self) -> int:
        """Beyond, rows of x take too much of what the L2 delivers: they come once per program."""
        return 1 if self.kind == "matvec" else min(MAX_ROWS, self.block_n // 2)


TILES: tuple[Tile, ...] = (
    Tile("matvec", 8, 1024, 4, 3),
    Tile("matvec", 4, 1024, 4, 4),
    Tile("matvec", 16, 512, 4, 4),
    Tile("matvec", 8, 512, 4, 5),
    Tile("matvec", 8, 1024, 4, 1),
    Tile("matmul", 16, 256, 2, 5),
    Tile("matmul", 32, 128, 4, 6),
    Tile("matmul", 32, 256, 4, 4),
    Tile("matmul", 64, 128, 4, 4),
    Tile("matmul", 128, 64, 4, 5),
)


@dataclass(frozen=True)
class Plan:
    """How one shape is computed for one number of rows."""

    tile: Tile
    splits: int = 1
    """along k; partial sums are float32 and added in the order of k"""

    def __str__(self) -> str:
        return f"{self.tile.name} k/{self.splits}"


class LinearKernels(Protocol):
    failures: tuple[type[Exception], ...]
    """what `linear` raises for a tile that this device cannot run"""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        """x [m, k], 1 <= m <= 16 (1 for a matvec tile); weight [n, k] contiguous; bias [n]; all of one half type and
        on one device. Returns y [m, n]. On CUDA work is queued on the current stream."""
        ...


def plans_for(n: int, k: int, rows: int, multiprocessors: int) -> list[Plan]:
    """What is worth timing for weights [n, k] and up to `rows` rows; empty where 16-byte loads are impossible."""
    if k % 16 or rows > MAX_ROWS:
        return []
    plans = []
    for tile in TILES:
        if tile.kind == "matvec" and rows == 1:
            plans.append(Plan(tile))
        elif tile.kind == "matmul" and rows <= tile.max_rows:
            programs = -(-n // tile.block_n)
            # Splits, where half as many leave a multiprocessor less than two programs.
            plans += [
                Plan(tile, splits)
                for splits in SPLITS
                if splits == 1 or (programs * splits // 2 < 2 * multiprocessors and k // splits >= 2 * tile.block_k)
            ]
    return plans


def encode(plans: Mapping[int, Plan | None]) -> int:
    """One integer for a plan per bucket (None or absent: the library), so that an operator can carry it. 0: the library
    for all."""
    code = 0
    for index, rows in enumerate(BUCKETS):
        plan = plans.get(rows)
        if plan is not None:
            part = (TILES.index(plan.tile) + 1) << _SPLIT_BITS | (plan.splits.bit_length() - 1)
            code |= part << (index * _CODE_BITS)
    return code


@cache
def decode(code: int) -> Sequence[Plan | None]:
    """The plan for each number of rows, 0 to MAX_ROWS."""
    by_bucket: list[Plan | None] = []
    for index in range(len(BUCKETS)):
        part = code >> (index * _CODE_BITS) & (1 << _CODE_BITS) - 1
        tile = part >> _SPLIT_BITS
        by_bucket.append(Plan(TILES[tile - 1], 1 << (part & (1 << _SPLIT_BITS) - 1)) if tile else None)
    return (None, *(by_bucket[bucket_of(rows)] for rows in range(1, MAX_ROWS + 1)))


def bucket_of(rows: int) -> int:
    """Index into BUCKETS of the smallest that holds `rows`, 1 to MAX_ROWS."""
    return (rows - 1).bit_length()


@dataclass(frozen=True)
class KernelSignature:
    """What the ahead-of-time check compiles: one Triton kernel with the types that its launcher passes."""

    name: str
    """attribute of `engine.models.kernels.device`"""
    signature: dict[str, str]
    constexprs: dict[str, int]
    options: dict[str, int] = field(default_factory=dict)
    """of the launch"""


def tile_constexprs(tile: Tile, k: int, has_bias: bool, split: bool) -> dict[str, int]:
    """What the kernel of a tile is specialised on."""
    common = {"HAS_BIAS": int(has_bias), "ALIGNED": int(k % 16 == 0), "EVEN_K": int(k % tile.block_k == 0)}
    block = {"BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "STAGES": tile.stages}
    if tile.kind == "matvec":
        return common | block
    return common | {"SPLIT": int(split), "BLOCK_M": MAX_ROWS} | block


def _signature(tile: Tile, k: int, pointer: str, has_bias: bool = False, split: bool = False) -> KernelSignature:
    pointers = {"x": pointer, "weight": pointer, "bias": pointer}
    if tile.kind == "matvec":
        name, rest = "matvec_kernel", {"y": pointer, "n": "i32", "k": "i32"}
    else:
        name, rest = "matmul_kernel", {"out": "*fp32" if split else pointer}
        rest |= {"m": "i32", "n": "i32", "k": "i32", "split_blocks": "i32"}
    return KernelSignature(name, pointers | rest, tile_constexprs(tile, k, has_bias, split), {"num_warps": tile.warps})


def _signatures() -> tuple[KernelSignature, ...]:
    even, uneven = 4096, 4096 + 16
    found = [_signature(tile, even, "*bf16") for tile in TILES]
    for kind in ("matvec", "matmul"):
        tile = next(tile for tile in TILES if tile.kind == kind)
        found += [_signature(tile, uneven, pointer, has_bias=True) for pointer in ("*bf16", "*fp16")]
    found.append(_signature(tile, even, "*bf16", split=True))
    reduction = {"partials": "*fp32", "bias": "*bf16", "y": "*bf16", "count": "i32", "n": "i32", "splits": "i32"}
    found.append(KernelSignature("sum_splits_kernel", reduction, {"HAS_BIAS": 1, "BLOCK": 512}))
    return tuple(found)


KERNELS: tuple[KernelSignature, ...] = _signatures()
"""Discovery table: `tools/compile_triton.py` compiles every entry for the supported GPUs without one."""


@cache
def device_kernels() -> LinearKernels:
    """The Triton kernels; they hold no state."""
    from engine.models.kernels.device import TritonKernels

    return TritonKernels()
