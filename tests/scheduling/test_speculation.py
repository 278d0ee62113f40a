"""Drafts: right ones make steps fewer, wrong ones change nothing, and as many are computed as pay."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scheduler_loop import Loop
from toy_grammars import ToyMatcher
from toy_model import POISON, generate

from engine.core.wire import BeamParams
from engine.layer_groups import State, Window
from engine.scheduling.speculation import Speculation
from engine.speculation_config import SpeculationConfig
from engine.step import Rows, ScheduledRow
from engine.step_costs import StepCosts

PROMPT = [3, 1, 4, 1, 5]


def drafted(loop: Loop) -> list[ScheduledRow]:
    return [row for plan in loop.plans for row in plan.rows.each() if row.samples > 1]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, 5), (None, State(2, 8))], ids=["all", "window", "states"])
@pytest.mark.parametrize(("pads", "exact"), [(False, False), (True, False), (True, True)])
def test_drafts_bring_the_same_tokens_in_fewer_steps(
    depth: int, windows: tuple[Window, ...], pads: bool, exact: bool
) -> None:
    loop = Loop(depth=depth, drafts=4, windows=windows, pads=pads, exact=exact)
    loop.add("a", PROMPT, 40, stop=[12])
    loop.run()
    assert loop.tokens["a"] == generate(PROMPT, 45, {12})[0]
    stats = loop.scheduler.stats()
    assert stats.generated_tokens == 40
    assert len(loop.plans) == 40 - stats.accepted_tokens == 40 - sum(d.accepted_tokens for d in loop.deltas["a"])
    assert len(loop.plans) - depth <= 40 - stats.accepted_tokens <= len(loop.plans)
    assert stats.drafted_tokens > stats.accepted_tokens == sum(stats.accepted_at) > 5
    assert stats.accepted_at == sorted(stats.accepted_at, reverse=True)
    loop.assert_nothing_leaked()


def test_what_ends_among_drafts_ends_there() -> None:
    """A stop token, and the last token that was asked for, with drafts behind them that were right."""
    tokens = generate(PROMPT, 45, set())[0]
    for last in range(1, 20):
        loop = Loop(depth=0, drafts=8)
        first = tokens.index(tokens[last])
        loop.add("stop", PROMPT, 40, stop=[tokens[last]])
        loop.add("length", PROMPT, last)
        loop.run()
        assert loop.tokens["stop"] == tokens[: first + 1] and loop.reason("stop") == "stop"
        assert loop.tokens["length"] == tokens[:last] and loop.reason("length") == "length"
        assert loop.ends["stop"][0].stop_token_id == tokens[last]
        loop.assert_nothing_leaked()


def test_drafts_take_the_last_block_but_preempt_nobody() -> None:
    loop = Loop(depth=0, drafts=8, num_blocks=12, block_size=2, caching=False)
    loop.add("a", PROMPT, 7)
    loop.add("b", PROMPT[::-1], 7)
    loop.run()
    assert drafted(loop) and loop.scheduler.stats().preemptions == 0
    for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1])):
        assert loop.tokens[name] == generate(prompt, 12, set())[0]
    loop.assert_nothing_leaked()


def test_drafts_push_out_nobody_s_certain_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the smallest pool in which nobody is preempted without drafts nobody is with wrong ones."""
    monkeypatch.setattr(StepCosts, "relative", lambda self: (1.0, 0.0001))

    def run(drafts: int, num_blocks: int, seed: int) -> int:
        rng = random.Random(seed)
        loop = Loop(
            num_blocks=num_blocks, rows=8, budget=256, max_model_len=128, drafts=drafts, pads=True, caching=False
        )
        loop.executor._guess = lambda state, most: [99] * most  # type: ignore[method-assign]
        for index in range(4):
            prompt = [rng.randrange(11) for _ in range(rng.randint(3, 9))]
            loop.add(str(index), prompt, 100, stop=[rng.randrange(11)], min_tokens=rng.randint(10, 40))
            for _ in range(rng.randint(1, 6)):
                loop.turn()
        loop.run()
        return loop.scheduler.stats().preemptions

    for seed in range(12):
        enough = next(num_blocks for num_blocks in range(33, 99) if not run(0, num_blocks, seed))
        assert run(32, enough, seed) == 0


def test_a_step_has_no_more_drafts_than_its_budget_and_its_places() -> None:
    loop = Loop(depth=0, drafts=8, rows=3, budget=7, num_blocks=200)
    for index in range(3):
        loop.add(str(index), [index, 5], 40)
    loop.run()
    assert max(plan.num_tokens for plan in loop.plans) <= 7
    assert any(row.samples > 1 for row in drafted(loop))


def test_beams_have_no_drafts() -> None:
    loop = Loop(depth=0, drafts=4)
    loop.add("beams", PROMPT, 10, beams=BeamParams(width=2))
    loop.run()
    assert not drafted(loop)


def test_drafts_take_no_token_from_those_who_decode() -> None:
    def steps(drafts: int) -> int:
        loop = Loop(depth=0, rows=8, budget=8, drafts=drafts, num_blocks=400)
        for index in range(8):
            loop.add(str(index), [index], 50)
        loop.run()
        return len(loop.plans)

    assert steps(4) <= steps(0)


def test_what_a_grammar_fails_at_among_drafts_is_not_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = ToyMatcher.advance

    def broken(self: ToyMatcher, token: int) -> None:
        if self.count == 6:
            raise ValueError("it broke")
        advance(self, token)

    tokens = generate(PROMPT, 35, set(), grammar="a:0:0")[0]
    monkeypatch.setattr(ToyMatcher, "advance", broken)
    for start in range(4):  # the failure is at another place among the drafts
        loop = Loop(depth=0, drafts=3)

        def guess(state: object, most: int, start: int = start, loop: Loop = loop) -> list[int]:
            known = len(loop.sequences["a"].tokens) - len(PROMPT)
            return tokens[known + 1 :][:most] if known >= start else []

        loop.executor._guess = guess  # type: ignore[method-assign]
        monkeypatch.setattr(ToyMatcher, "forced", lambda self: [])
        loop.add("a", PROMPT, 30, grammar="a:0:0")
        loop.add("free", PROMPT, 30)
        loop.run()
        assert loop.tokens["a"] == tokens[:6] and loop.reason("a") == "error"
        assert loop.tokens["free"] == generate(PROMPT, 35, set())[0]
        loop.assert_nothing_leaked()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("length", [9, 0])
def test_what_a_grammar_forces_is_drafted_without_any_setting(length: int, depth: int) -> None:
    loop, grammar = Loop(depth=depth), f"a:{length}:0"
    loop.add("a", PROMPT, 30, grammar=grammar, followers=["b"], alike=False)
    loop.add("free", PROMPT, 30)
    loop.run()
    assert drafted(loop) and loop.scheduler.stats().accepted_tokens > 0
    for name, seed in (("a", 0), ("b", 1)):
        assert (loop.tokens[name], loop.reason(name)) == generate(PROMPT, 35, set(), seed=seed, grammar=grammar)
    assert loop.tokens["free"] == generate(PROMPT, 35, set())[0]
    loop.assert_nothing_leaked()


def test_a_fault_among_drafts_ends_one_sequence() -> None:
    loop = Loop(depth=0, drafts=4)
    for index in range(3):
        loop.add(str(index), [*PROMPT, index], 30)
    while not drafted(loop):
        loop.turn()
    row = loop.sequences["1"].row
    loop.executor.rows[row].tokens[len(loop.sequences["1"].tokens) - 1] = POISON
    loop.run()
    assert loop.reason("1") == "error"
    for index in (0, 2):
        assert loop.tokens[str(index)] == generate([*PROMPT, index], 36, set())[0]
    loop.assert_nothing_leaked()


def test_costs_are_those_of_the_steps_seen() -> None:
    costs = StepCosts()
    a, b = costs.relative()
    assert a + b == pytest.approx(1) and 0 < b < 0.2
    for n in [1, 2, 4, 8] * 50:
        costs.observe(Rows.of([ScheduledRow(0, 9, n, n)]), n - 1, 0.010 + 0.002 * n)
    a, b = costs.relative()
    assert (a, b) == (pytest.approx(10 / 12, rel=0.05), pytest.approx(2 / 12, rel=0.05))


@pytest.mark.parametrize("disturbed", [2, 30])
def test_one_slow_step_makes_drafts_neither_free_nor_dear(disturbed: int) -> None:
    costs = StepCosts()
    for index, n in enumerate([1, 2, 4, 8] * 30):
        costs.observe(Rows.of([ScheduledRow(0, 9, n, n)]), n - 1, 0.006 + 0.001 * n)
        if index == 60:
            costs.observe(Rows.of([ScheduledRow(0, 9, disturbed, disturbed)]), disturbed - 1, 1.0)
        assert index < 70 or 0.03 < costs.relative()[1] < 0.4


def test_prompts_beside_drafts_cost_what_their_own_tokens_do() -> None:
    costs, decode = StepCosts(), ScheduledRow(0, 9, 64, 64)
    costs.observe(Rows.of([ScheduledRow(0, 9, 1, 1)]), 0, 0.01)
    costs.observe(Rows.of([decode, ScheduledRow(1, 0, 100, 1)]), 0, 0.02)
    assert costs.prompt_token_s == pytest.approx(1e-4)


def test_who_finds_nothing_is_left_alone_for_a_while() -> None:
    loop = Loop(depth=0, drafts=4, num_blocks=200, max_model_len=200)
    loop.executor._guess = lambda state, most: []  # type: ignore[method-assign]
    loop.add("a", PROMPT, 100)
    loop.run()
    assert 0 < len(drafted(loop)) < 50 and loop.scheduler.stats().drafts == 0


@pytest.mark.parametrize(("slope", "most"), [(1.0, 0), (0.0, 8)])
def test_as_many_are_computed_as_pay(slope: float, most: int) -> None:
    loop, costs = Loop(drafts=8), StepCosts()
    config = SpeculationConfig(method="ngram", num_speculative_tokens=8)
    speculation = Speculation(loop.scheduler._held, config, 64, costs)
    for n in [1, 2, 4, 8] * 50:
        costs.observe(Rows.of([ScheduledRow(0, 9, n, n)]), n - 1, (1 - slope) + slope * n)
    assert speculation._are_worth(1) == (most > 0)
    chosen = speculation._best(np.array([8, 8]), np.array([0.9, 0.3]), 2, 64)
    assert (most == 0 and not chosen.any()) or (chosen[0] == most and chosen[1] <= chosen[0])


def test_who_has_wrong_drafts_computes_fewer_and_fewer() -> None:
    loop = Loop(depth=0, drafts=4, num_blocks=200, max_model_len=200)
    loop.executor._guess = lambda state, most: [(state.tokens[len(state.tokens) - 1] + 5) % 11] * most  # type: ignore[method-assign]
    loop.add("a", PROMPT, 150)
    loop.run()
    drafts = [sum(row.samples - 1 for row in plan.rows.each() if row.samples) for plan in loop.plans]
    right = loop.scheduler.stats().accepted_tokens
    assert sum(drafts[:5]) > 0 and right < sum(drafts) / 3
    assert sum(drafts[50:]) < 0.5 * 4 * len(drafts[50:])


def test_drafts_of_who_has_ended_hold_up_nobody() -> None:
    """A request ends while drafts of it are in flight; later two others need all blocks, and one must go."""
    loop = Loop(num_blocks=26, block_size=1, rows=3, budget=11, max_model_len=23, caching=False, min_shared_chunk=1)
    loop.add("forced", [0] * 5, 3, grammar="b:1:0")
    for name in ("short", "as short"):
        loop.add(name, [1] * 5, 1)
    loop.run()
    assert drafted(loop)
    for name in ("first", "second"):
        loop.add(name, [0] * 5, 10)
    loop.run()
    assert loop.scheduler.stats().preemptions
    assert [loop.tokens[name] for name in ("first", "second")] == [generate([0] * 5, 15, set())[0]] * 2
