"""A sequence goes on with another one's history: what a beam does whose own one was dropped."""

from __future__ import annotations

from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.sequence_blocks import Growth, SequenceBlocks


def take_over(kv: KVCache, blocks: SequenceBlocks, source: SequenceBlocks) -> Growth:
    """`blocks` gives up its history for all of `source`'s, as `free` and `fork` would. What both have in common is not
    touched, and where both have as many tokens, a partly filled last block of its own is kept for a copy of the
    source's, but where groups keep states. Returns what changes where `blocks` was told already."""
    full, filled = divmod(source.num_tokens, kv.block_size)
    if filled and full and not kv.slides and kv.num_groups == 1 and blocks.num_tokens == source.num_tokens:
        growth = _take_last_full(kv, blocks, source, full)
        if growth is not None:
            return growth
    in_step = blocks.starts == source.starts
    common, keeps_last = (full if in_step else 0), filled > 0 and in_step and blocks.num_tokens == source.num_tokens
    if kv.states.groups:
        keeps_last = False  # a copy is told when `blocks` is next in a step, and the source's state may move on before
    counts = kv.pool.ref_counts
    for own, new, start in zip(blocks.tables, source.tables, blocks.starts):
        # What is in a block depends on all that comes before it: where both hold one, they are alike up to there.
        common = min(common, len(own))
        while common > start and own[common - 1] != new[common - 1]:
            common -= 1
        if common <= start:
            common = 0
        if keeps_last and not (len(own) == len(new) == full + 1 and counts[own[full]] == 1):
            keeps_last = False
    if not keeps_last:
        source.quiet_until = 0  # its last block may be shared now
    if not keeps_last or common < full:
        _exchange(kv, blocks, source, common, full if keeps_last else None)
        blocks.chain.become(source.chain, common, full)
    blocks.num_tokens, blocks.num_registered = source.num_tokens, source.num_registered
    blocks.settled, blocks.states_registered = source.settled, source.states_registered
    blocks.borders, blocks.passing = source.borders, None
    blocks.quiet_until = source.quiet_until
    blocks.counted = True
    if not keeps_last:
        return Growth(common, [table[common:] for table in blocks.tables], [])
    changed = [table[common:] for table in blocks.tables] if common < full else []
    return Growth(common, changed, [(new[full], own[full]) for own, new in zip(blocks.tables, source.tables)])


def _take_last_full(kv: KVCache, blocks: SequenceBlocks, source: SequenceBlocks, full: int) -> Growth | None:
    """`take_over` where nothing but the last one of ``full`` blocks differs, which is the usual case; else None."""
    own, new, pool = blocks.tables[0], source.tables[0], kv.pool
    last = full - 1
    if not len(own) == len(new) == full + 1 or pool.ref_counts[own[full]] > 1:
        return None
    if own[last] == new[last] or (last and own[last - 1] != new[last - 1]):
        return None
    pool.acquire(new[last])
    pool.release(own[last])
    own[last] = new[last]
    blocks.chain.become(source.chain, last, full)
    blocks.num_registered, blocks.quiet_until, blocks.counted = source.num_registered, source.quiet_until, True
    return Growth(last, [own[last:]], [(new[full], own[full])])


def _exchange(kv: KVCache, blocks: SequenceBlocks, source: SequenceBlocks, common: int, end: int | None) -> None:
    """Entries ``common`` to ``end`` for those of ``source``; None: to the end of either."""
    for group, (own, new) in enumerate(zip(blocks.tables, source.tables, strict=True)):
        kv.pool.acquire_all(new[max(source.starts[group], common) : end])
        kv.pool.release_all(reversed(own[max(blocks.starts[group], common) : end]))
        own[common:end] = new[common:end]
    blocks.starts = source.starts.copy()
