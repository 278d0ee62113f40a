"""Drafts in Triton: programs that share a row look for matches, then one writes the drafts of the best."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_PARTS = 32
"""programs that share a row"""
_DRAFTS = 64
"""drafts that are written at a time"""


@triton.jit(
    do_not_specialize=["tokens_stride", "longest", "shortest"],
    do_not_specialize_on_alignment=["rows", "lengths"],
)
def ngram_match_kernel(
    tokens: tl.tensor,
    tokens_stride: tl.tensor,
    rows: tl.tensor,
    lengths: tl.tensor,
    matches: tl.tensor,
    longest: tl.tensor,
    shortest: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # matches[i, part]: (length, end) of the best match among the part's ends, as one integer; 0: none.
    row = tl.load(rows + tl.program_id(0))
    part = tl.program_id(1)
    last = tl.load(lengths + row) - 1
    tokens += row * tokens_stride
    best = tl.zeros([], tl.int64)
    for first in range(part * BLOCK, last, PARTS * BLOCK):
        ends = first + tl.arange(0, BLOCK)
        same = ends < last
        same &= tl.load(tokens + ends, mask=same, other=-1) == tl.load(tokens + last)
        length = tl.zeros([BLOCK], tl.int32)
        left = tl.sum(same.to(tl.int32), axis=0)
        step = 0
        while (left > 0) & (step < longest):
            length += same.to(tl.int32)
            step += 1
            same &= ends >= step
            wanted = tl.load(tokens + tl.maximum(last - step, 0))
            same &= tl.load(tokens + ends - step, mask=same, other=-1) == wanted
            left = tl.sum(same.to(tl.int32), axis=0)
        found = tl.where(length >= shortest, (length.to(tl.int64) << 32) | ends, 0)
        best = tl.maximum(best, tl.max(found, axis=0))
    tl.store(matches + tl.program_id(0) * PARTS + part, best)


@triton.jit(
    do_not_specialize=["tokens_stride", "columns"],
    do_not_specialize_on_alignment=["rows", "lengths", "most"],
)
def ngram_draft_kernel(
    tokens: tl.tensor,
    tokens_stride: tl.tensor,
    columns: tl.tensor,
    rows: tl.tensor,
    lengths: tl.tensor,
    most: tl.tensor,
    matches: tl.tensor,
    counts: tl.tensor,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # Program i writes the drafts of rows[i]: what follows its best match, over and over.
    index = tl.program_id(0)
    row = tl.load(rows + index)
    known = tl.load(lengths + row)
    best = tl.max(tl.load(matches + index * PARTS + tl.arange(0, PARTS)), axis=0)
    follows = (best & 0xFFFFFFFF).to(tl.int32) + 1
    period = tl.maximum(known - follows, 1)
    room = tl.maximum(tl.minimum(tl.load(most + index), columns - known), 0)
    count = tl.where(best > 0, room, 0)
    tl.store(counts + index, count)
    tokens += row * tokens_stride
    for first in range(0, count, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        drafts = tl.load(tokens + follows + offsets % period, mask=offsets < count, other=0)
        tl.store(tokens + known + offsets, drafts, mask=offsets < count)


class TritonDraftKernels:
    """See `DraftKernels`. `block`: ends that a program looks at together, `parts`: programs that share a row, powers of
    two; tests take small ones."""

    def __init__(self, block: int = _BLOCK, parts: int = _PARTS) -> None:
        self._block, self._parts = block, parts

    def propose_ngram(
        self,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        most: torch.Tensor,
        longest: int,
        shortest: int,
    ) -> torch.Tensor:
        m, stride = len(rows), tokens.stride(0)
        counts = torch.empty(m, dtype=torch.int32, device=tokens.device)
        if m == 0:
            return counts
        matches = torch.empty((m, self._parts), dtype=torch.int64, device=tokens.device)
        ngram_match_kernel[(m, self._parts)](
            tokens, stride, rows, lengths, matches, longest, shortest, PARTS=self._parts, BLOCK=self._block
        )
        ngram_draft_kernel[(m,)](
            tokens, stride, tokens.shape[1], rows, lengths, most, matches, counts, PARTS=self._parts, BLOCK=_DRAFTS
        )
        return counts
