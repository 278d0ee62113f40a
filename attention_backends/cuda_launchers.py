"""What the CUDA backend asks of its kernels: `csrc/cuda/launch.h` on tensors.

A protocol, so that the same backend (metadata, grids, buffers) runs over the real ops and, in tests, over the same
kernel sources compiled for a CPU. One `attend` per layer is one op call: Python pays for it once, not three times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

MAX_DECODE_ROWS = 64
"""query tokens x GQA group that the decode kernel takes of one sequence"""


def schedule_words(max_items: int, num_seqs: int) -> int:
    """int32 words of a schedule: header [2], items [max_items, 2], item_start [num_seqs + 1], in this order."""
    return 2 + 2 * max_items + num_seqs + 1


def partial_floats(max_items: int, num_kv_heads: int, max_rows: int, head_dim: int) -> int:
    """float32 words of partials: out [max_items, num_kv_heads, max_rows, head_dim], then lse [max_items, num_kv_heads,
    max_rows]."""
    return max_items * num_kv_heads * max_rows * (head_dim + 1)


def arrival_words(num_seqs: int, num_kv_heads: int, max_rows: int) -> int:
    """int32 words of arrivals [num_seqs, num_kv_heads, ceil(max_rows / 16)]: chunks of each sequence that are done."""
    return num_seqs * num_kv_heads * -(-max_rows // 16)


class Launchers(Protocol):
    """Every call queues work on the current stream and returns; none synchronises. Raises RuntimeError for tensors that
    do not fit. `kv_cache` is [num_blocks, 2, num_kv_heads, block_size, head_dim], its blocks contiguous."""

    def schedule_decode(
        self,
        query_start_loc: torch.Tensor,  # int32, indexed by sequence of the step
        seq_lens: torch.Tensor,  # int32, likewise
        schedule: torch.Tensor,  # int32 [>= schedule_words(max_items, num_seqs)], written
        first_seq: int,
        num_seqs: int,
        max_query_len: int,
        max_items: int,
        window: int,  # `AttentionLayer.signed_window`
        /,
    ) -> None: ...

    def attend(
        self,
        q: torch.Tensor,  # [tokens, num_heads, head_dim]
        k: torch.Tensor,  # [tokens, num_kv_heads, head_dim]
        v: torch.Tensor,
        out: torch.Tensor,  # like q
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,  # int64 [>= num_tokens]
        query_start_loc: torch.Tensor,  # int32 [> last sequence + 1]
        seq_lens: torch.Tensor,  # int32
        block_tables: torch.Tensor,  # int32 [sequences, max_blocks], rows contiguous
        schedule: torch.Tensor | None,  # as written by schedule_decode; None when num_decodes is 0
        partials: torch.Tensor | None,  # float32 [>= partial_floats(...)], scratch
        arrivals: torch.Tensor | None,  # int32 [>= arrival_words(...)], zero before and after
        sinks: torch.Tensor | None,  # float32 [num_heads]
        num_tokens: int,  # first: write K and V of tokens [0, num_tokens); 0: nothing to write
        first_decode: int,  # then: decode sequences [first_decode, first_decode + num_decodes)
        num_decodes: int,
        max_query_len: int,  # of these
        max_items: int,
        first_prefill: int,  # then: prefill sequences [first_prefill, first_prefill + num_prefills)
        num_prefills: int,
        prefill_tokens: int,  # of these, or an upper bound
        window: int,  # `AttentionLayer.signed_window`
        scale: float,
        soft_cap: float,  # 0: none
        k_scale: float,
        v_scale: float,
        /,
    ) -> None: ...

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        num_tokens: int,
        k_scale: float,
        v_scale: float,
        /,
    ) -> None: ...

    def copy_blocks(
        self,
        bases: torch.Tensor,  # int64 [layers] on the device: address of each layer's cache
        pairs: torch.Tensor,  # int64 [pairs, 2] on the device: from, to
        block_bytes: int,
        /,
    ) -> None: ...

    def gather_blocks(
        self,
        bases: torch.Tensor,
        ids: torch.Tensor,  # int64 [ids] on the device
        staging: torch.Tensor,  # uint8 [>= ids * layers * block_bytes] on the device, written
        block_bytes: int,
        /,
    ) -> None: ...

    def scatter_blocks(
        self, bases: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor, block_bytes: int, /
    ) -> None: ...


class OpLaunchers:
    """The ops of a loaded kernel library: `torch.ops.<namespace>.*`, called without a Python frame between."""

    def __init__(self, namespace: str) -> None:
        ops = getattr(torch.ops, namespace)
        self.schedule_decode: Callable[..., None] = ops.schedule_decode.default
        self.attend: Callable[..., None] = ops.attend.default
        self.write_kv: Callable[..., None] = ops.write_kv.default
        self.copy_blocks: Callable[..., None] = ops.copy_blocks.default
        self.gather_blocks: Callable[..., None] = ops.gather_blocks.default
        self.scatter_blocks: Callable[..., None] = ops.scatter_blocks.default
