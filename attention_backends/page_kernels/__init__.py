"""What a borrowed attention library does not bring: page lists, KV writes and block copies over a paged cache.

One interface: Triton on CUDA, vectorised torch elsewhere, which is the oracle of the Triton kernels at once. Triton is
imported only when a CUDA device asks for it. Caches here are [num_blocks, 2 (K, V), num_kv_heads, block_size, head_dim]
with contiguous blocks; those that are copied are contiguous as a whole, whatever is in their blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


class PageKernels(Protocol):
    """Every function returns at once on CUDA: work is queued on the current stream."""

    def gather_pages(
        self,
        block_tables: torch.Tensor,
        page_starts: torch.Tensor,
        first_pages: torch.Tensor,
        out: torch.Tensor,
        max_pages: int,
    ) -> None:
        """`out[page_starts[i] + j] = block_tables[i, first_pages[i] + j]` for each sequence i and page j of it.

        block_tables int32 [>= n, columns]; page_starts int32 [n + 1], rising; first_pages int32 [n]; out int32
        [>= page_starts[n]]; max_pages: an upper bound of `page_starts[i + 1] - page_starts[i]`, known on the host.
        """
        ...

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: float,
        v_scale: float,
    ) -> None:
        """Token t of k, v [tokens, num_kv_heads, head_dim] goes to slot slot_mapping[t] (int64 [n]; n <= tokens), a
        negative slot nowhere. A float8_e4m3fn cache takes k / k_scale and v / v_scale, rounded to nearest even, cut at
        +-448; a cache of another dtype takes the values as they are."""
        ...

    def copy_blocks(self, kv_caches: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
        """Block source -> destination in every cache; pairs int64 [n, 2] on the caches' device, all destinations
        distinct from all sources. The caches' blocks have one size, a multiple of 4 bytes."""
        ...


@dataclass(frozen=True)
class KernelSignature:
    """What the ahead-of-time check compiles: one Triton kernel with the types that its launcher passes."""

    name: str
    """attribute of `attention_backends.page_kernels.device`"""
    signature: dict[str, str]
    constexprs: dict[str, int]


def _write_kv(values: str, cache: str, head_dim: int, kv_heads: int) -> KernelSignature:
    return KernelSignature(
        name="write_kv_kernel",
        signature={
            "k": values,
            "v": values,
            "cache": cache,
            "slots": "*i64",
            "block_stride": "i32",
            "k_token_stride": "i32",
            "v_token_stride": "i32",
            "k_head_stride": "i32",
            "v_head_stride": "i32",
            "k_scale": "fp32",
            "v_scale": "fp32",
        },
        constexprs={
            "HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "PAGE": 16,
            "FP8": int(cache == "*u8"),
            "BLOCK": 1024,
        },
    )


KERNELS: tuple[KernelSignature, ...] = (
    KernelSignature(
        name="gather_pages_kernel",
        signature={
            "tables": "*i32",
            "tables_stride": "i32",
            "page_starts": "*i32",
            "first_pages": "*i32",
            "out": "*i32",
        },
        constexprs={"BLOCK": 256},
    ),
    *(_write_kv(dtype, dtype, head_dim, 8) for dtype in ("*bf16", "*fp16") for head_dim in (64, 128, 256)),
    *(_write_kv(dtype, "*u8", 128, 8) for dtype in ("*bf16", "*fp16")),
    KernelSignature(
        name="copy_blocks_kernel",
        signature={"bases": "*i64", "pairs": "*i64", "words": "i32"},
        constexprs={"BLOCK": 1024},
    ),
)
"""Discovery table: every entry is compiled for the supported GPUs without one."""


def select_kernels(device: torch.device) -> PageKernels:
    """The implementation for `device`: Triton on CUDA, the twin elsewhere."""
    if device.type == "cuda":
        from attention_backends.page_kernels.device import TritonKernels

        return TritonKernels()
    from attention_backends.page_kernels.host import HostKernels

    return HostKernels()
