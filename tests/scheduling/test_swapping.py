"""What was swapped out comes back, though the pool has no more room than one request needs."""

from __future__ import annotations

import pytest
from scheduler_loop import Loop
from toy_model import generate, search

from engine.core.wire import BeamParams
from engine.request import Tenant
from engine.scheduling import admission
from engine.scheduling.preemption import PreemptionCosts
from engine.step import Rows, ScheduledRow
from engine.step_costs import StepCosts


@pytest.mark.parametrize("num_blocks", [8, 9])
def test_a_half_computed_prompt_with_a_window_comes_back_to_a_pool_that_just_holds_it(num_blocks: int) -> None:
    """It takes what it holds at most, not what it held and all that follows."""
    loop = Loop(
        depth=0, num_blocks=num_blocks, block_size=1, budget=2, windows=(5,), num_host_blocks=16, preemption="swap"
    )
    loop.add("early", [0], 8)
    loop.add("late", [1] * 10, 2)
    loop.run()
    assert loop.scheduler.stats().preemptions_swapped > 0
    assert loop.tokens["late"] == generate([1] * 10, 12, set())[0]
    loop.assert_nothing_leaked()


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5])
def test_beams_come_back_to_a_pool_that_just_holds_them(width: int, prompt_len: int) -> None:
    """Only a last block that they share is copied for each."""
    swapped = 0
    for tokens, others in ((tokens, others) for tokens in range(2, 8) for others in range(2, 12)):
        probe = Loop(block_size=4).kv
        own = probe.blocks_beyond(prompt_len, prompt_len + tokens - 1)
        loop = Loop(
            depth=0,
            num_blocks=max(probe.blocks_for(prompt_len + tokens - 1) + (width - 1) * own, probe.blocks_for(others)),
            block_size=4,
            num_host_blocks=64,
            preemption="swap",
            caching=False,
        )
        loop.add("early", [0], others)
        prompt, beams = [1] * prompt_len, BeamParams(width=width)
        loop.add("late", prompt, tokens, beams=beams)
        loop.run()
        swapped += loop.scheduler.stats().preemptions_swapped
        assert loop.tokens["late"] == search(prompt, prompt_len + tokens, set(), beams)[0].token_ids
        loop.assert_nothing_leaked()
    assert swapped > 0, "the test must swap"


@pytest.mark.parametrize("beams", [None, BeamParams(width=2)])
def test_what_seems_never_to_fit_is_computed_again(monkeypatch: pytest.MonkeyPatch, beams: BeamParams | None) -> None:
    """An estimate of the room that is too high costs time, not the request."""
    loop = Loop(depth=0, num_blocks=9, block_size=4, num_host_blocks=64, preemption="swap", caching=False)
    monkeypatch.setattr(admission, "blocks_to_go_on", lambda kv, host, group: 1 + kv.pool.num_blocks)
    loop.add("early", [0] * 8, 16)
    loop.add("late", [1] * 6, 12, beams=beams)
    loop.run()
    assert loop.scheduler.stats().preemptions_swapped > 0
    assert loop.scheduler.stats().blocks_swapped_in == 0
    alone = search([1] * 6, 18, set(), beams)[0].token_ids if beams else generate([1] * 6, 18, set())[0]
    assert loop.tokens["late"] == alone
    loop.assert_nothing_leaked()


def test_samples_that_lack_rows_alone_come_back_as_any_that_does_not_fit() -> None:
    """They come back together: who has more than its share gives way, and nothing is looked up while they wait."""
    loop = Loop(
        depth=0, num_blocks=200, rows=4, max_model_len=256, policy="fair", num_host_blocks=200, preemption="swap"
    )
    loop.add("a", [1] * 8, 60, followers=["b", "c"], alike=False, tenant=Tenant("few"))
    loop.add("x", [2] * 8, 120, tenant=Tenant("many"))
    for _ in range(12):
        loop.turn()
    held = loop.scheduler._held
    held.preempt(loop.sequences["a"], {})
    loop.add("y", [2] * 100, 120, tenant=Tenant("many"))
    turns = 0
    while not held.running or loop.sequences["a"] not in held.running:
        assert loop.turn() and turns < 12
        turns += 1
    assert {seq.request_id for seq in held.running} >= {"a", "b", "c"}
    loop.run()
    loop.assert_nothing_leaked()


@pytest.mark.parametrize("others, mixed_s, swaps", [(0, 0.1, True), (8, 0.1, True), (8, 0.03, False), (8, 0.01, False)])
def test_a_prompt_costs_what_a_step_takes_longer_for_it(others: int, mixed_s: float, swaps: bool) -> None:
    """Beside sequences that decode: they take 0.02 s anyway. 10 blocks are swapped in 0.05 s."""
    steps = StepCosts()
    costs = PreemptionCosts("auto", 0.005, steps)
    decodes = [ScheduledRow(i, 9, 1, samples=True) for i in range(others)]
    prompt = [ScheduledRow(others, 0, 100, samples=True)]
    assert not costs.prefers_swap(100, 10), "nothing is known"
    for _ in range(3):
        if others:
            steps.observe(Rows.of(decodes), 0, 0.02)
        steps.observe(Rows.of(decodes + prompt), 0, mixed_s)
    assert costs.prefers_swap(100, 10) is swaps
