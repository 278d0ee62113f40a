"""Beams in the scheduler: the search is that of one prompt alone, whatever runs beside it, and its KV is shared."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from itertools import pairwise
from typing import Literal

import pytest
from scheduler_loop import Loop
from toy_model import POISON, VOCAB, generate, search

from engine.beam_search import BeamSearch, rank_of
from engine.core.wire import BeamParams
from engine.errors import InvalidRequestError
from engine.layer_groups import State
from engine.scheduling.sequence import Status
from engine.step import TokenLogprobs

PROMPT = [(i * i + 3) % 11 for i in range(50)]
STATES = (None, State(3, 8))


def add(loop: Loop, name: str, width: int, prompt: list[int] = PROMPT, max_tokens: int = 12, **options: object) -> None:
    names = [f"{name}{i}" for i in range(1, options.pop("n", width))]  # type: ignore[call-overload]  # an int
    loop.add(name, prompt, max_tokens, followers=names, beams=BeamParams(width=width), **options)  # type: ignore[arg-type]


def assert_found(
    loop: Loop, name: str, width: int, prompt: list[int] = PROMPT, max_tokens: int = 12, **options: int
) -> None:
    found = search(
        prompt, len(prompt) + max_tokens, {options["stop"]} if "stop" in options else set(), BeamParams(width=width)
    )
    for i in range(options.get("n", width)):
        each = name if i == 0 else f"{name}{i}"
        assert loop.tokens[each] == found[i].token_ids
        (end,) = loop.ends[each]
        assert end.score == pytest.approx(found[i].score) and end.cumulative_logprob == pytest.approx(found[i].logprob)
        assert end.finish_reason == ("stop" if found[i].stopped else "length")


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("prompt_len", [48, 50, 1])
def test_a_search_finds_what_it_finds_alone(depth: int, width: int, prompt_len: int) -> None:
    loop = Loop(depth=depth, budget=16, num_blocks=80)
    add(loop, "a", width, PROMPT[:prompt_len], stop=[3])
    loop.run()
    assert_found(loop, "a", width, PROMPT[:prompt_len], stop=3)
    loop.assert_nothing_leaked()


def test_beams_share_the_prompt_and_hold_what_they_wrote() -> None:
    loop = Loop(budget=64, num_blocks=200, max_model_len=120)
    add(loop, "a", 4, max_tokens=20)
    used = 0
    while loop.turn():
        used = max(used, loop.scheduler.stats().kv_blocks_used)
    assert used <= loop.kv.blocks_for(50 + 19) + 3 * (loop.kv.blocks_for(19) + 1)
    assert loop.executor.computed_tokens == 50 + 4 * 19
    assert_found(loop, "a", 4, max_tokens=20)
    loop.assert_nothing_leaked()


def test_others_run_ahead_while_a_search_waits_for_its_candidates() -> None:
    loop = Loop(depth=1, budget=64, num_blocks=100)
    loop.add("plain", PROMPT[:5], 30)
    add(loop, "a", 3, max_tokens=10)
    loop.run()
    with_beams = [len(plan.rows) > 1 for plan in loop.plans]
    assert len(loop.plans) <= 32, "the plain request decodes in every step"
    assert with_beams.count(True) <= 10 and not any(a and b for a, b in pairwise(with_beams))
    assert loop.tokens["plain"] == generate(PROMPT[:5], 35, set())[0]
    assert_found(loop, "a", 3, max_tokens=10)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
def test_a_search_is_preempted_whole_and_resumes_from_what_its_beams_share(depth: int, caching: bool) -> None:
    loop = Loop(depth=depth, num_blocks=52, block_size=4, rows=6, budget=64, caching=caching, max_model_len=100)
    for name in ("first", "second"):
        loop.add(name, PROMPT[: 20 - len(name)], 80)
    for _ in range(30):
        loop.turn()
    add(loop, "a", 4, PROMPT[:40], 30)
    group = loop.sequences["a"].group
    assert group is not None
    counts = []
    while loop.turn():
        counts.append(sum(member.status is Status.RUNNING for member in group.members))
    assert loop.scheduler.stats().preemptions == 4, "all of them, once"
    assert set(counts) - {1} == {0, 4} and counts[counts.index(4) :].count(0) > 0, "from all to none in one step"
    assert_found(loop, "a", 4, PROMPT[:40], 30)
    assert loop.tokens["first"] == generate(PROMPT[:15], 95, set())[0]
    loop.assert_nothing_leaked()


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("gone", ["a", "a2"])
def test_aborting_any_of_its_ids_ends_a_search(turns: int, gone: str) -> None:
    loop = Loop(budget=20, num_blocks=80)
    add(loop, "a", 3)
    add(loop, "b", 2)
    for _ in range(turns):
        loop.turn()
    loop.abort([gone])
    loop.run()
    assert [loop.reason(name) for name in ("a", "a1", "a2")] == ["abort"] * 3
    assert_found(loop, "b", 2)
    loop.assert_nothing_leaked()


def test_a_fault_ends_a_search() -> None:
    loop = Loop(budget=64, num_blocks=80)
    add(loop, "a", 3, [1, POISON, 2])
    loop.run()
    assert [loop.reason(name) for name in ("a", "a1", "a2")] == ["error"] * 3
    loop.assert_nothing_leaked()


def test_more_beams_than_tokens_and_a_search_of_one_token() -> None:
    loop = Loop(rows=16, budget=64, num_blocks=80)
    add(loop, "a", 16, max_tokens=1, n=12)
    add(loop, "b", 16, max_tokens=3)
    loop.run()
    assert_found(loop, "b", 16, max_tokens=3)
    assert_found(loop, "a", 16, max_tokens=1, n=VOCAB)
    assert loop.tokens["a11"] == [] and loop.reason("a11") == "length"
    loop.assert_nothing_leaked()


def test_what_can_never_run_is_refused() -> None:
    loop = Loop(rows=4, num_blocks=20, block_size=4)
    with pytest.raises(InvalidRequestError, match="5 beams needs as many rows, but there are 4"):
        add(loop, "a", 5)
    with pytest.raises(InvalidRequestError, match="needs 30 KV blocks, but there are 20"):
        add(loop, "a", 4, PROMPT[:40], 18)
    assert not loop.scheduler.has_work


@pytest.mark.parametrize("penalty", [-100.0, -1.0, 0.0, 0.5, 100.0])
def test_sequences_are_ranked_by_their_scores_where_no_float_can_hold_them(penalty: float) -> None:
    found = [(logprob, length) for logprob in (-1e-3, -0.5, -7.0, -2500.0) for length in (1, 2, 3, 501, 2047, 10**6)]
    with localcontext() as context:
        context.prec = 60
        exact = sorted(found, key=lambda one: Decimal(one[0]) / Decimal(one[1]) ** Decimal(penalty))
    assert sorted(found, key=lambda one: rank_of(*one, penalty)) == exact


@pytest.mark.parametrize("penalty", [-100.0, 100.0])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_a_search_with_an_extreme_penalty_ends_with_scores_that_are_numbers(
    penalty: float, early_stopping: bool | Literal["never"]
) -> None:
    params = BeamParams(width=2, length_penalty=penalty, early_stopping=early_stopping)
    search = BeamSearch(params, frozenset({0}), 2048)
    found = TokenLogprobs(token_ids=[5, 5, 6, 0, 7], logprobs=[-0.1, -0.1, -0.2, -0.15, -3.0], rank=1)
    while search.advance([found] * len(search.scores), lambda beam: [5] * search.length) is not None:
        assert search.length < 2048
    assert search.finished and all(math.isfinite(one.score) and one.score <= 0 for one in search.finished)


def test_beams_that_keep_states_start_again_together_in_the_smallest_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted late, when they have hardly more in common than the prompt: each keeps states of its own, and the one
    that is computed again another one where each of the others leaves it."""
    advance = BeamSearch.advance

    def apart(self: BeamSearch, found: list[TokenLogprobs], generated: Callable[[int], list[int]]) -> object:
        if self.length + 1 == self.limit:
            return advance(self, found, generated)
        self.length, self.scores = self.length + 1, [-1.0, -2.0, -3.0]
        parents = {1: [0, 0, 0], 2: [0, 0, 2]}.get(self.length, [0, 1, 2])
        return [(parent, found[parent].token_ids[1 + place - parent]) for place, parent in enumerate(parents)]

    monkeypatch.setattr(BeamSearch, "advance", apart)
    preemptions = 0
    for beside in range(16, 44, 2):
        loop = next(found for blocks in range(60, 200) if (found := loop_that_serves_it(blocks)) is not None)
        loop.add("plain", [(i * 7) % 11 for i in range(beside)], 60)
        for _ in range(beside // 8):
            loop.turn()
        add(loop, "a", 3, PROMPT[:5], 40)
        loop.run()
        preemptions += loop.scheduler.stats().preemptions
        assert all(loop.ends[name] for name in ("plain", "a", "a1", "a2"))
        loop.assert_nothing_leaked()
    assert preemptions > 1


def loop_that_serves_it(blocks: int) -> Loop | None:
    def loop() -> Loop:
        return Loop(depth=0, num_blocks=blocks, block_size=2, rows=4, budget=8, windows=STATES, max_model_len=200)

    try:
        add(loop(), "a", 3, PROMPT[:5], 40)
    except InvalidRequestError:
        return None
    return loop()
