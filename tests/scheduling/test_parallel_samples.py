"""Several samples of one prompt: it is computed once, its blocks are shared, and each sample goes its own way."""

from __future__ import annotations

import pytest
from scheduler_loop import Loop
from toy_model import POISON, generate

from engine.errors import InvalidRequestError
from engine.scheduling.sequence import Status

PROMPT = [(i * i + 3) % 11 for i in range(50)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
def test_the_prompt_is_computed_once_and_all_samples_start_with_its_last_chunk(depth: int, caching: bool) -> None:
    loop = Loop(depth=depth, budget=16, caching=caching)
    names = ["a", "b", "c"]
    loop.add("a", PROMPT, 6, followers=names[1:])
    loop.run()
    assert loop.executor.computed_tokens == len(PROMPT) + 3 * 5
    first = next(plan for plan in loop.plans if any(row.samples for row in plan.rows.each()))
    assert (first.rows.query_lens.tolist(), first.rows.computed.tolist()) == ([2, 0, 0], [48, 50, 50])
    for name in names:
        assert loop.tokens[name] == generate(PROMPT, len(PROMPT) + 6, set())[0]
    assert loop.scheduler.stats().prompt_tokens == len(PROMPT)
    loop.assert_nothing_leaked()


@pytest.mark.parametrize("prompt_len", [48, 50])
def test_samples_hold_the_prompt_once_and_what_they_wrote(prompt_len: int) -> None:
    """The bound: one sequence's blocks, and for each other one its generated blocks and the one that it copied."""
    loop = Loop(budget=64, num_blocks=200, max_model_len=120)
    loop.add("0", PROMPT[:prompt_len], 20, followers=map(str, range(1, 6)))
    used = 0
    while loop.turn():
        used = max(used, loop.scheduler.stats().kv_blocks_used)
    one, generated = loop.kv.blocks_for(prompt_len + 19), loop.kv.blocks_for(19)
    assert used <= one + 5 * (generated + 1)
    copies = [copy for plan in loop.plans for copy in plan.block_copies]
    assert len(copies) == (5 if prompt_len % 4 else 0), "the last one that holds the partly filled block keeps it"
    assert len({source for source, _ in copies}) <= 1
    copying = [plan for plan in loop.plans if plan.block_copies]
    assert len(copying) <= 1, "one batch of copies"
    loop.assert_nothing_leaked()


def test_samples_without_a_row_wait_for_one() -> None:
    loop = Loop(rows=2, budget=64)
    names = list("abcde")
    loop.add("a", PROMPT, 4, followers=names[1:])
    assert loop.scheduler.stats().waiting == 5
    loop.turn()
    assert loop.scheduler.stats().waiting == 3
    loop.run()
    for name in names:
        assert loop.tokens[name] == generate(PROMPT, len(PROMPT) + 4, set())[0]
    assert loop.executor.computed_tokens < 2 * len(PROMPT), "those that waited found the prompt in the cache"
    loop.assert_nothing_leaked()


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("gone", [["a"], ["b"], ["a", "b"], ["a", "b", "c"], ["c"]])
def test_a_sample_that_is_aborted_leaves_the_others_alone(turns: int, gone: list[str]) -> None:
    loop = Loop(budget=20, num_blocks=40)
    loop.add("a", PROMPT, 4, followers=["b", "c", "d"])
    for _ in range(turns):
        loop.turn()
    loop.abort(gone)
    loop.run()
    for name in set("abcd") - set(gone):
        assert loop.tokens[name] == generate(PROMPT, len(PROMPT) + 4, set())[0]
    assert [loop.reason(name) for name in gone] == ["abort"] * len(gone)
    loop.assert_nothing_leaked()


def test_a_prompt_that_is_preempted_keeps_its_followers() -> None:
    loop = Loop(num_blocks=18, block_size=4, rows=6, budget=4, caching=False, policy="priority", max_model_len=60)
    loop.add("urgent", PROMPT[:22], 30)
    while not loop.tokens["urgent"]:
        loop.turn()
    loop.add("a", PROMPT[:40], 3, followers=["b", "c"], priority=1)
    loop.run()
    assert loop.scheduler.stats().preemptions > 0
    for name in "abc":
        assert loop.tokens[name] == generate(PROMPT[:40], 43, set())[0]
    loop.assert_nothing_leaked()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("alike", [False, True])
def test_samples_are_preempted_together_and_share_again_what_they_have_in_common(depth: int, alike: bool) -> None:
    loop = Loop(depth=depth, num_blocks=40, block_size=4, rows=6, budget=64, caching=False, max_model_len=100)
    loop.add("first", PROMPT[:20], 80)
    for _ in range(4):
        loop.turn()
    names = list("abcd")
    loop.add("a", PROMPT[:40], 25, followers=names[1:], alike=alike)
    running = []
    while loop.turn():
        running.append(sum(loop.sequences[name].status is Status.RUNNING for name in names))
    stats = loop.scheduler.stats()
    assert stats.preemptions == 4, "all of them, once"
    first_gone = running.index(0, running.index(4))
    assert running[first_gone - 1] == 4, "from all to none in one step"
    for index, name in enumerate(names):
        assert loop.tokens[name] == generate(PROMPT[:40], 65, set(), seed=0 if alike else index)[0]
    generated = 80 + 4 * 25
    again = loop.executor.computed_tokens - 20 - 40 - (generated - 5)
    assert again < 2 * 40 + 4 * 25, "the prompt was computed twice, not five times"
    loop.assert_nothing_leaked()


def test_a_fault_in_the_prompt_ends_every_sample() -> None:
    loop = Loop(budget=64)
    loop.add("a", [1, 2, POISON, 4], 5, followers=["b"])
    loop.run()
    assert [loop.reason(name) for name in "ab"] == ["error", "error"]
    loop.assert_nothing_leaked()


def test_a_follower_needs_an_id_of_its_own() -> None:
    loop = Loop()
    loop.add("a", [1], 5)
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        loop.add("b", [1], 5, followers=["a"])
    loop.run()
    loop.assert_nothing_leaked()
