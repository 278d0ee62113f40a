"""Samples of one prompt that start, or after a preemption start again, together: one of them leads and computes what
they have in common, the others follow and are forked from it."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from engine.kv_cache.kv_cache import KVCache
from engine.scheduling.sequence import Sequence, Status


def line_up(leader: Sequence, others: list[Sequence]) -> int:
    """All of them hold nothing: `others` follow `leader`, and so do those who followed them. Returns how many are new
    to following."""
    followers = {follower.key: follower for seq in (leader, *others) for follower in seq.followers}
    for other in others:
        other.followers = []
        followers[other.key] = other
    for follower in followers.values():
        follower.status, follower.leader = Status.FOLLOWING, leader
        follower.common = _common_prefix(leader.tokens, follower.tokens)
    leader.followers = [followers[key] for key in sorted(followers)]
    return len(others)


def start_of(follower: Sequence, leader: Sequence, block_size: int) -> int:
    """Tokens whose KV the follower takes over: where both have the same tokens all, for then it also samples from the
    leader's logits; else whole blocks, because the leader goes on in the last one its own way."""
    if is_twin(follower, leader):
        return len(follower.tokens)
    return min(follower.common, len(follower.tokens) - 1) // block_size * block_size


def is_twin(follower: Sequence, leader: Sequence) -> bool:
    return follower.common == len(follower.tokens) == len(leader.tokens)


def forks_of(leader: Sequence, kv: KVCache) -> set[int]:
    """Tokens behind which it is forked, where it would not keep its state anyway."""
    others = (follower for follower in leader.followers if not is_twin(follower, leader))
    found = {start_of(follower, leader, kv.block_size) for follower in others}
    return found - kv.states.prompt_borders(leader.prompt_len)


def own_blocks(follower: Sequence, leader: Sequence, kv: KVCache) -> int:
    """Blocks that it needs beside its leader's until it samples, or for what a twin computes next."""
    start = start_of(follower, leader, kv.block_size)
    return kv.blocks_beyond(start, max(len(follower.tokens), start + 1))


def prefix_limit(seq: Sequence, kv: KVCache) -> int:
    """Tokens that may come from the prefix cache: all but the last, and nothing that prompt log-probabilities still
    need (the query at p scores the token at p+1), nor what is pooled of every token. Where windows move on, nothing
    beyond a place at which a follower is to be forked, because what that one sees would be missing."""
    limits = [len(seq.tokens) - 1 if seq.params.pooling in (None, "last", "judge") else 0]
    if seq.params.prompt_logprobs is not None and seq.next_prompt_logprob < seq.prompt_len:
        limits.append(seq.next_prompt_logprob - 1)
    if kv.slides:
        limits += [start_of(follower, seq, kv.block_size) for follower in seq.followers]
    return min(limits)


def _common_prefix(one: Tokens[int], other: Tokens[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])
