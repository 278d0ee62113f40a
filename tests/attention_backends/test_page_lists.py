"""Page lists against a brute force that walks over every key that every query sees."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_backends.page_kernels.host import HostKernels
from attention_backends.page_lists import page_lists

sequences = st.lists(
    st.integers(0, 70).flatmap(lambda length: st.tuples(st.integers(0, length), st.just(length))), max_size=8
)


def pages_seen(queries: int, length: int, window: int | None, block_size: int) -> list[int]:
    """Pages between the first and the last key that any query of the sequence sees."""
    seen = {
        key // block_size
        for position in range(length - queries, length)
        for key in range(position + 1)
        if window is None or key > position - window
    }
    return list(range(min(seen), max(seen) + 1)) if seen else []


@given(sequences, st.integers(0, 3), st.one_of(st.none(), st.integers(1, 80)), st.sampled_from([1, 4, 16]))
def test_lists_name_exactly_the_pages_that_queries_see(
    prefills: list[tuple[int, int]], decodes: int, window: int | None, block_size: int
) -> None:
    lengths = [*[(1, 11 * (i + 1)) for i in range(decodes)], *prefills]
    query = np.array([q for q, _ in lengths], np.int32)
    seq = np.array([n for _, n in lengths], np.int32)
    lists = page_lists(query, seq, decodes, window, block_size, pinned=False)
    want = [pages_seen(q, n, window, block_size) for q, n in lengths]
    starts = lists.page_starts.tolist()
    assert [list(range(f, f + e - b)) for f, b, e in zip(lists.first_pages.tolist(), starts, starts[1:])] == [
        pages or list(range(f, f)) for pages, f in zip(want, lists.first_pages.tolist())
    ]
    assert lists.num_pages == starts[-1] == sum(map(len, want))
    assert lists.max_pages == max(map(len, want), default=0)
    for (_, n), pages, last, kv_len in zip(lengths, want, lists.last_page_lens.tolist(), lists.kv_lens.tolist()):
        assert 1 <= last <= block_size
        if pages:
            assert kv_len == (len(pages) - 1) * block_size + last == n - pages[0] * block_size
        else:
            assert kv_len == 0
    assert lists.prefill_starts.tolist() == [start - starts[decodes] for start in starts[decodes:]]
    assert lists.query_starts.tolist() == [0, *np.cumsum([q for q, _ in prefills]).tolist()]
    check_gathered(lists.for_gather, want, lists.num_pages, lists.max_pages)


def check_gathered(for_gather: torch.Tensor, want: list[list[int]], num_pages: int, max_pages: int) -> None:
    """What the device gets is enough to gather the block of each page, and of no other."""
    tables = torch.full((len(want), 80), 2**30, dtype=torch.int32)
    blocks: list[int] = []
    for row, pages in enumerate(want):
        for page in pages:
            tables[row, page] = 100 * row + page
            blocks.append(100 * row + page)
    out = torch.full((num_pages,), -1, dtype=torch.int32)
    starts, firsts = for_gather[: len(want) + 1], for_gather[len(want) + 1 :]
    HostKernels().gather_pages(tables, starts, firsts, out, max_pages)
    assert out.tolist() == blocks
