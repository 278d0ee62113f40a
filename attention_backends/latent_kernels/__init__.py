"""Attention over rows of latents on CUDA devices, in Triton, which is imported with `device` only.

A cache is [num_blocks, block_size, rank + common], with contiguous blocks. Queries have taken the keys' matrix in, so
all heads read the same row: as their key the whole of it, as their value its first `rank` elements.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROWS, FEW_ROWS = 32, 16
"""(query, head) pairs of a program, and where no sequence has more than so many"""
KEYS = {FEW_ROWS: 32, ROWS: 16}
"""that a program of so many rows multiplies at once: more do not fit into registers"""
WARPS = 8
"""of a program"""


@dataclass(frozen=True)
class KernelSignature:
    """What the ahead-of-time check compiles: one Triton kernel with the types that its launcher passes."""

    name: str
    """attribute of `attention_backends.latent_kernels.device`"""
    signature: dict[str, str]
    constexprs: dict[str, int]
    options: dict[str, int] = field(default_factory=dict)


def _attend(dtype: str, rank: int, rows: int) -> KernelSignature:
    pointers = {
        "queries": dtype,
        "commons": dtype,
        "cache": dtype,
        "found": dtype,
        "partials": "*fp32",
        "sums": "*fp32",
    }
    lists = {"query_start_loc": "*i32", "seq_lens": "*i32", "block_tables": "*i32"}
    strides = ("table_stride", "block_stride", "common_token_stride", "common_head_stride")
    counts = ("num_seqs", "num_tokens", "num_heads", "num_splits", "window")
    return KernelSignature(
        name="attend_kernel",
        signature={**pointers, **lists, **dict.fromkeys((*strides, *counts), "i32"), "scale": "fp32"},
        constexprs={
            "RANK": rank,
            "COMMON": 64,
            "PADDED_RANK": rank,
            "PADDED_COMMON": 64,
            "PAGE": 16,
            "ROWS": rows,
            "KEYS": KEYS[rows],
        },
        options={"num_warps": WARPS, "num_stages": 1},
    )


def _merge(dtype: str) -> KernelSignature:
    return KernelSignature(
        name="merge_kernel",
        signature={"partials": "*fp32", "sums": "*fp32", "found": dtype, "rows": "i32", "num_splits": "i32"},
        constexprs={"RANK": 512, "PADDED_RANK": 512},
    )


def _write(dtype: str) -> KernelSignature:
    strides = {"row_stride": "i32", "block_stride": "i32"}
    return KernelSignature(
        name="write_rows_kernel",
        signature={"rows": dtype, "cache": dtype, "slots": "*i64", **strides},
        constexprs={"SIZE": 576, "PADDED_SIZE": 1024, "PAGE": 16},
    )


_DTYPES = ("*bf16", "*fp16")
KERNELS: tuple[KernelSignature, ...] = (
    *(_attend(dtype, rank, rows) for dtype in _DTYPES for rank in (256, 512) for rows in (FEW_ROWS, ROWS)),
    *(_merge(dtype) for dtype in _DTYPES),
    *(_write(dtype) for dtype in _DTYPES),
)
"""Discovery table: every entry is compiled for the supported GPUs without one."""
