"""The page kernels in Triton. Importing this module needs Triton; `select_kernels` does so only for CUDA.

What changes from step to step (lengths, and where in a buffer a slice begins) is never specialised on, so nothing
compiles again after warm-up. What belongs to the model (strides, sizes of heads) may be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from attention_backends.page_kernels import FP8

_GATHER_BLOCK = 256
_WRITE_BLOCK = 1024
_COPY_BLOCK = 1024


@triton.jit(
    do_not_specialize=["tables_stride"],
    do_not_specialize_on_alignment=["tables", "page_starts", "first_pages", "out"],
)
def gather_pages_kernel(
    tables: tl.tensor,
    tables_stride: tl.tensor,
    page_starts: tl.tensor,
    first_pages: tl.tensor,
    out: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    seq = tl.program_id(0)
    begin = tl.load(page_starts + seq)
    count = tl.load(page_starts + seq + 1) - begin
    pages = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = pages < count
    source = tables + seq.to(tl.int64) * tables_stride + tl.load(first_pages + seq) + pages
    tl.store(out + begin.to(tl.int64) + pages, tl.load(source, mask=mask), mask=mask)


@triton.jit
def _e4m3_bits(values: tl.tensor, scale: tl.tensor) -> tl.tensor:
    # In integers, because Ampere has no conversion to e4m3. Subnormals (below 2^-6, steps of 2^-9) are rounded by
    # adding 2^14, whose last place is 2^-9; above, three bits of mantissa are kept and the exponent's bias goes from
    # 127 to 7.
    exact = tl.div_rn(values.to(tl.float32), scale)
    magnitude = tl.minimum(tl.abs(exact), 448.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    rounded = tl.where(magnitude < 0.015625, small, normal)
    sign = (exact.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(exact != exact, 0x7F, rounded) | sign).to(tl.uint8)


@triton.jit(do_not_specialize=["k_scale", "v_scale"], do_not_specialize_on_alignment=["slots"])
def write_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    cache: tl.tensor,
    slots: tl.tensor,
    block_stride: tl.tensor,
    k_token_stride: tl.tensor,
    v_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_head_stride: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        half = HEADS * PAGE * HEAD_DIM
        index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = index < HEADS * HEAD_DIM
        head = index // HEAD_DIM
        dim = index % HEAD_DIM
        keys = tl.load(k + token * k_token_stride + head * k_head_stride + dim, mask=mask)
        values = tl.load(v + token * v_token_stride + head * v_head_stride + dim, mask=mask)
        if FP8:
            keys = _e4m3_bits(keys, k_scale)
            values = _e4m3_bits(values, v_scale)
        target = cache + (slot // PAGE) * block_stride + head * (PAGE * HEAD_DIM) + (slot % PAGE) * HEAD_DIM + dim
        tl.store(target, keys, mask=mask)
        tl.store(target + half, values, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def copy_blocks_kernel(bases: tl.tensor, pairs: tl.tensor, words: tl.tensor, BLOCK: tl.constexpr) -> None:
    pair = pairs + tl.program_id(1) * 2
    base = tl.load(bases + tl.program_id(2)).to(tl.pointer_type(tl.int32))
    base = tl.multiple_of(base, 16)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < words
    source = tl.load(base + tl.load(pair) * words + offsets, mask=mask)
    tl.store(base + tl.load(pair + 1) * words + offsets, source, mask=mask)


class TritonKernels:
    """See `PageKernels`."""

    def __init__(self) -> None:
        self._bases: dict[tuple[int, ...], torch.Tensor] = {}

    def gather_pages(
        self,
        block_tables: torch.Tensor,
        page_starts: torch.Tensor,
        first_pages: torch.Tensor,
        out: torch.Tensor,
        max_pages: int,
    ) -> None:
        if max_pages == 0:
            return
        grid = (first_pages.shape[0], triton.cdiv(max_pages, _GATHER_BLOCK))
        gather_pages_kernel[grid](
            block_tables, block_tables.stride(0), page_starts, first_pages, out, BLOCK=_GATHER_BLOCK
        )

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: float,
        v_scale: float,
    ) -> None:
        if slot_mapping.shape[0] == 0:
            return
        _, _, heads, page, head_dim = kv_cache.shape
        fp8 = kv_cache.dtype == FP8
        write_kv_kernel[(slot_mapping.shape[0], triton.cdiv(heads * head_dim, _WRITE_BLOCK))](
            k,
            v,
            kv_cache.view(torch.uint8) if fp8 else kv_cache,
            slot_mapping,
            kv_cache.stride(0),
            k.stride(0),
            v.stride(0),
            k.stride(1),
            v.stride(1),
            float(k_scale),
            float(v_scale),
            HEADS=heads,
            HEAD_DIM=head_dim,
            PAGE=page,
            FP8=int(fp8),
            BLOCK=_WRITE_BLOCK,
        )

    def copy_blocks(self, kv_caches: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
        if not kv_caches or pairs.shape[0] == 0:
            return
        words = kv_caches[0].stride(0) * kv_caches[0].element_size() // 4
        grid = (triton.cdiv(words, _COPY_BLOCK), pairs.shape[0], len(kv_caches))
        copy_blocks_kernel[grid](self._addresses(kv_caches), pairs, words, BLOCK=_COPY_BLOCK)

    def _addresses(self, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """int64 [layers] on the device; kept, because the caches of a runner do not move."""
        addresses = tuple(cache.data_ptr() for cache in kv_caches)
        if addresses not in self._bases:
            device = kv_caches[0].device
            host = torch.tensor(addresses, dtype=torch.int64, pin_memory=device.type == "cuda")
            self._bases = {addresses: host.to(device, non_blocking=True)}
        return self._bases[addresses]
