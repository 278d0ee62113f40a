"""The page kernels in vectorised torch: the implementation without Triton, and its oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attention_backends.page_kernels import FP8, FP8_MAX


class HostKernels:
    """See `PageKernels`."""

    def gather_pages(
        self,
        block_tables: torch.Tensor,
        page_starts: torch.Tensor,
        first_pages: torch.Tensor,
        out: torch.Tensor,
        max_pages: int,
    ) -> None:
        # A rectangle of max_pages columns, of which each row's first few are kept.
        num_seqs = first_pages.shape[0]
        columns = torch.arange(max_pages, device=out.device)
        counts = page_starts[1:] - page_starts[:-1]
        kept = columns < counts[:, None]
        source = (first_pages[:, None] + columns).clamp(max=block_tables.shape[1] - 1).long()
        target = (page_starts[:-1, None] + columns).long()
        out[target[kept]] = block_tables[:num_seqs].gather(1, source)[kept]

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_scale: float,
        v_scale: float,
    ) -> None:
        real = slot_mapping >= 0
        slots, block_size = slot_mapping[real], kv_cache.shape[3]
        blocks, offsets = slots // block_size, slots % block_size
        for half, (tensor, scale) in enumerate(((k, k_scale), (v, v_scale))):
            values = tensor[: slot_mapping.shape[0]][real]
            if kv_cache.dtype == FP8:
                values = (values.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
                kv_cache.view(torch.uint8)[blocks, half, :, offsets] = values.view(torch.uint8)  # no fp8 index_put
            else:
                kv_cache[blocks, half, :, offsets] = values

    def copy_blocks(self, kv_caches: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
        for cache in kv_caches:
            raw = cache.view(torch.uint8) if cache.dtype == FP8 else cache
            raw[pairs[:, 1]] = raw[pairs[:, 0]]
