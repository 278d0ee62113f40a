"""Page lists of a step in the form that a library plans with, built from lengths that the host knows.

Nothing here reads a device: the host has every length of a step before the step runs, so lists cost O(sequences) of
NumPy and no synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class PageLists:
    """Which pages each sequence reads under one window; int32 tensors on the host, slices of one pinned tensor.

    A window leaves pages behind, and their blocks may serve another sequence by now. Lists begin at the first page that
    some query of the step still sees: attention counts distances from the end of a sequence, so whole pages may be cut
    off at its beginning, and what the window has left is never named to the library.
    """

    page_starts: torch.Tensor
    """[sequences + 1]: where each list begins in the list of all"""
    first_pages: torch.Tensor
    """[sequences]: column of the block table where the list begins"""
    last_page_lens: torch.Tensor
    """[sequences]: tokens in the last page, 1 to block_size"""
    kv_lens: torch.Tensor
    """[sequences]: tokens in the pages of the list; 0 where nothing is read"""
    prefill_starts: torch.Tensor
    """[prefills + 1]: page_starts of the prefills, counted from the first of them"""
    query_starts: torch.Tensor
    """[prefills + 1]: tokens of the prefills, counted from the first of them"""
    for_gather: torch.Tensor
    """[2 * sequences + 1]: page_starts and first_pages"""
    num_pages: int
    max_pages: int


def page_lists(
    query_lens: np.ndarray, seq_lens: np.ndarray, num_decodes: int, window: int | None, block_size: int, pinned: bool
) -> PageLists:
    """The first num_decodes sequences are decodes. A sequence without queries, or of length 0, gets no pages."""
    count, prefills = len(seq_lens), len(seq_lens) - num_decodes
    first = np.zeros(count, np.int32)
    if window is not None:
        first = np.maximum(seq_lens - query_lens - window + 1, 0) // block_size
    reads = (query_lens > 0) & (seq_lens > 0)
    first = np.where(reads, first, 0)
    pages = np.where(reads, -(-seq_lens // block_size) - first, 0)
    host = torch.empty(4 * count + 2 * prefills + 3, dtype=torch.int32, pin_memory=pinned)
    sizes = [count + 1, count, count, count, prefills + 1, prefills + 1]
    starts, firsts, last, lens, prefill_starts, query_starts = torch.split(host, sizes)
    starts.numpy()[0] = 0
    starts.numpy()[1:] = np.cumsum(pages)
    firsts.numpy()[:] = first
    last.numpy()[:] = np.maximum(seq_lens - 1, 0) % block_size + 1
    lens.numpy()[:] = np.where(reads, seq_lens - first * block_size, 0)
    prefill_starts.numpy()[:] = starts.numpy()[num_decodes:] - starts.numpy()[num_decodes]
    query_starts.numpy()[0] = 0
    query_starts.numpy()[1:] = np.cumsum(query_lens[num_decodes:])
    return PageLists(
        page_starts=starts,
        first_pages=firsts,
        last_page_lens=last,
        kv_lens=lens,
        prefill_starts=prefill_starts,
        query_starts=query_starts,
        for_gather=host[: 2 * count + 1],
        num_pages=int(starts[-1]),
        max_pages=int(pages.max(initial=0)),
    )
