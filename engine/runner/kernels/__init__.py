"""The four input kernels of a step, behind one interface: Triton on CUDA, one vectorised twin on CPU.

A step's inputs are built where the tables live, so the host sends a few integers per sequence and never a token. The
twin is the CPU implementation and the oracle of the Triton kernels at once. Triton is imported only when a CUDA device
asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class StepSizes:
    """What is real and what is padding in one step."""

    num_seqs: int
    num_tokens: int
    num_samples: int
    padded_seqs: int
    padded_tokens: int
    max_query_len: int
    """longest real query. Counts do not tell: a fork has none, so there may be fewer tokens than sequences"""
    padded_query_len: int = 0
    """query tokens of each padded sequence: 1 where every sequence has one (a full decode graph), else 0"""
    one_token_each: bool = False
    """every real sequence has one query token (a fork has none, so counts alone do not tell)"""


@dataclass(frozen=True)
class InputBuffers:
    """What `prepare_inputs` fills. Allocated once, so that addresses never change (captured graphs read them)."""

    input_ids: torch.Tensor
    """int64 [max_tokens]; 0 in the padding"""
    positions: torch.Tensor
    """int64 [max_tokens]; 0 in the padding"""
    slot_mapping: torch.Tensor
    """int64 [groups, max_tokens]; -1 in the padding"""
    seq_lens: torch.Tensor
    """int32 [max_seqs], this step's tokens included; 0 in the padding"""
    query_start_loc: torch.Tensor
    """int32 [max_seqs + 1]; the padding goes on in steps of `padded_query_len` from the number of tokens"""
    logits_indices: torch.Tensor
    """int64 [max_seqs]: the token whose hidden state each sampling sequence continues from; 0 in the padding"""
    sample_rows: torch.Tensor
    """int64 [max_seqs]: its row; 0 in the padding"""
    sample_positions: torch.Tensor
    """int64 [max_seqs]: the position of the token to be sampled; 0 in the padding"""
    block_tables: torch.Tensor
    """int32 [groups, max_seqs, max_blocks], gathered from the request table; entries past a sequence's blocks are
    stale"""


class InputKernels(Protocol):
    """Every function returns at once on CUDA: work is queued on the current stream."""

    def apply_staged_writes(
        self, table: torch.Tensor, writes: torch.Tensor, values: torch.Tensor, max_length: int
    ) -> None:
        """`table.view(-1)[dst : dst + n] = values[src : src + n]` for each write.

        table [rows, columns] contiguous; writes int64 [W, 3] of (dst, src, n), whose targets do not overlap and whose
        sources follow one another without gaps; values 1-D in the table's dtype; max_length >= every n.
        """
        ...

    def prepare_inputs(
        self,
        step: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        block_tables: torch.Tensor,
        out: InputBuffers,
        sizes: StepSizes,
        block_size: int,
    ) -> None:
        """Fill `out`, except its block tables, from what the host says of each sequence.

        step int32 [4, >= num_seqs + 1]: rows; computed, or where the host does not know it ~k: k tokens behind the last
        one that the row knows; query start (num_seqs + 1 entries, the last is num_tokens); index among the sampling
        sequences or -1. tokens int32 [rows, columns]; lengths int32 [rows]; block_tables int32 [groups, rows,
        max_blocks].
        """
        ...

    def gather_block_tables(
        self, block_tables: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, sizes: StepSizes, num_columns: int
    ) -> None:
        """`out[g, i, :num_columns] = block_tables[g, rows[i], :num_columns]`; zeros for padded sequences.

        block_tables int32 [groups, rows, max_blocks]; rows int32 [>= num_seqs]; out int32 [groups, max_seqs,
        max_blocks].
        """
        ...

    def post_update(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        known: torch.Tensor | None = None,
    ) -> None:
        """`tokens[rows[i], positions[i]] = token_ids[i]` and `lengths[rows[i]] = known[i]`, equal for all of a row;
        None: positions[i] + 1. tokens int32 [rows, columns]; lengths int32 [rows]; the others int64 [m]."""
        ...


@dataclass(frozen=True)
class KernelSignature:
    """What the ahead-of-time check compiles: one Triton kernel with the types that its launcher passes."""

    name: str
    """attribute of `engine.runner.kernels.device`"""
    signature: dict[str, str]
    constexprs: dict[str, int]


_PREPARE = {
    "step": "*i32",
    "step_stride": "i32",
    "tokens": "*i32",
    "tokens_stride": "i32",
    "lengths": "*i32",
    "tables": "*i32",
    "tables_group_stride": "i32",
    "tables_row_stride": "i32",
    "input_ids": "*i64",
    "positions": "*i64",
    "slots": "*i64",
    "slots_group_stride": "i32",
    "seq_lens": "*i32",
    "query_start_loc": "*i32",
    "logits_indices": "*i64",
    "sample_rows": "*i64",
    "sample_positions": "*i64",
    "num_seqs": "i32",
    "num_tokens": "i32",
    "num_samples": "i32",
    "padded_seqs": "i32",
    "padded_tokens": "i32",
    "padded_query_len": "i32",
    "block_size": "i32",
}
_GATHER = {
    "tables": "*i32",
    "tables_group_stride": "i32",
    "tables_row_stride": "i32",
    "rows": "*i32",
    "out": "*i32",
    "out_group_stride": "i32",
    "out_row_stride": "i32",
    "num_seqs": "i32",
    "num_columns": "i32",
}
_POST = {
    "tokens": "*i32",
    "tokens_stride": "i32",
    "lengths": "*i32",
    "rows": "*i64",
    "positions": "*i64",
    "token_ids": "*i64",
    "known": "*i64",
    "count": "i32",
}
_NGRAM_MATCH = {
    "tokens": "*i32",
    "tokens_stride": "i32",
    "rows": "*i64",
    "lengths": "*i32",
    "matches": "*i64",
    "longest": "i32",
    "shortest": "i32",
}
_NGRAM_DRAFT = {
    "tokens": "*i32",
    "tokens_stride": "i32",
    "columns": "i32",
    "rows": "*i64",
    "lengths": "*i32",
    "most": "*i32",
    "matches": "*i64",
    "counts": "*i32",
}

KERNELS: tuple[KernelSignature, ...] = (
    *(
        KernelSignature(
            name="apply_staged_writes_kernel",
            signature={"table": pointer, "writes": "*i64", "values": pointer},
            constexprs={"BLOCK": 1024},
        )
        for pointer in ("*i32", "*i64", "*fp32")
    ),
    *(
        KernelSignature(name="prepare_inputs_kernel", signature=_PREPARE, constexprs={"GROUPS": groups, "BLOCK": 1024})
        for groups in (1, 2, 6)
    ),
    KernelSignature(name="gather_block_tables_kernel", signature=_GATHER, constexprs={"BLOCK": 1024}),
    *(
        KernelSignature(name="post_update_kernel", signature=_POST, constexprs={"DRAFTS": drafts, "BLOCK": 256})
        for drafts in (0, 1)
    ),
    KernelSignature(name="ngram_match_kernel", signature=_NGRAM_MATCH, constexprs={"PARTS": 32, "BLOCK": 1024}),
    KernelSignature(name="ngram_draft_kernel", signature=_NGRAM_DRAFT, constexprs={"PARTS": 32, "BLOCK": 64}),
)
"""Discovery table: `tools/compile_triton.py` compiles every entry for the supported GPUs without one."""


def select_kernels(device: torch.device) -> InputKernels:
    """The implementation for `device`: Triton on CUDA, the twin elsewhere."""
    if device.type == "cuda":
        from engine.runner.kernels.device import TritonKernels

        return TritonKernels()
    from engine.runner.kernels.host import HostKernels

    return HostKernels()
