"""Sequences that are planned all at once, beside searches, over many blocks, get what each would get alone."""

from __future__ import annotations

import pytest
from scheduler_loop import Loop
from toy_model import POISON, generate, search

from engine.config import Preemption
from engine.core.wire import BeamParams

PROMPTS = [[(i * i + 3 * i * name + name) % 11 for i in range(5 + name)] for name in range(24)]
SEARCHES, WIDTH, MAX_TOKENS = 9, 3, 70


def serve(loop: Loop) -> None:
    for index, prompt in enumerate(PROMPTS):
        beams = BeamParams(width=WIDTH) if index < SEARCHES else None
        names = [f"{index}.{i}" for i in range(1, WIDTH)] if beams else []
        loop.add(str(index), prompt, MAX_TOKENS, followers=names, beams=beams, stop=[3] if index % 4 == 3 else [])
    loop.run()


def assert_as_alone(loop: Loop) -> None:
    for index, prompt in enumerate(PROMPTS):
        max_total, stop = len(prompt) + MAX_TOKENS, {3} if index % 4 == 3 else set()
        if index >= SEARCHES:
            assert (loop.tokens[str(index)], loop.reason(str(index))) == generate(prompt, max_total, stop)
            continue
        found = search(prompt, max_total, stop, BeamParams(width=WIDTH))
        assert loop.tokens[str(index)] == found[0].token_ids
        assert [loop.tokens[f"{index}.{i}"] for i in range(1, WIDTH)] == [each.token_ids for each in found[1:WIDTH]]
        (end,) = loop.ends[str(index)]
        assert end.score == pytest.approx(found[0].score)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [700, 120])
def test_what_is_planned_at_once_is_what_each_would_get_alone(
    depth: int, preemption: Preemption, num_blocks: int
) -> None:
    loop = Loop(
        depth=depth,
        num_blocks=num_blocks,
        block_size=8,
        rows=48,
        budget=96,
        max_model_len=128,
        num_host_blocks=num_blocks if preemption == "swap" else 0,
        preemption=preemption,
    )
    serve(loop)
    assert_as_alone(loop)
    stats = loop.scheduler.stats()
    assert (stats.preemptions > 0) == (num_blocks < 700)
    assert (stats.preemptions_swapped > 0) == (num_blocks < 700 and preemption == "swap")
    assert max(loop.num_plain) > (0.7 * (len(PROMPTS) - SEARCHES) if num_blocks == 700 else 4)
    loop.assert_nothing_leaked()


def test_searches_can_be_aborted() -> None:
    loop = Loop(num_blocks=700, block_size=8, rows=48, budget=96, max_model_len=128)
    for index, prompt in enumerate(PROMPTS[:4]):
        loop.add(str(index), prompt, MAX_TOKENS, followers=[f"{index}.1"], beams=BeamParams(width=2))
    for _ in range(20):
        loop.turn()
    assert any(seq.group is not None for seq in loop.scheduler._running)
    loop.abort(["0", "2.1"])
    loop.run()
    assert [loop.reason(name) for name in ("0", "0.1", "2", "2.1")] == ["abort"] * 4
    for index in (1, 3):
        found = search(PROMPTS[index], len(PROMPTS[index]) + MAX_TOKENS, set(), BeamParams(width=2))
        assert [loop.tokens[str(index)], loop.tokens[f"{index}.1"]] == [each.token_ids for each in found[:2]]
    loop.assert_nothing_leaked()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("windows", [(None,), (None, None), (None, 9)])
@pytest.mark.parametrize("turns", [12, 40])
def test_a_fault_amid_decodes_ends_one_sequence(depth: int, windows: tuple[int | None, ...], turns: int) -> None:
    """Also where its last blocks were not told to anybody."""
    loop = Loop(depth=depth, windows=windows, num_blocks=300, block_size=2, max_model_len=128)
    for index, prompt in enumerate(PROMPTS[:4]):
        loop.add(str(index), prompt, MAX_TOKENS)
    for _ in range(turns):
        loop.turn()
    bad = loop.sequences["1"]
    assert max(loop.num_plain) >= 2
    loop.executor.rows[bad.row].tokens[-1] = POISON
    loop.run()
    (end,) = loop.ends["1"]
    assert (end.finish_reason, end.error_kind) == ("error", "fault")
    alone = {index: generate(PROMPTS[index], len(PROMPTS[index]) + MAX_TOKENS, set())[0] for index in range(4)}
    assert loop.tokens["1"] == alone[1][: len(loop.tokens["1"])] and len(loop.tokens["1"]) >= turns - 8
    assert all(loop.tokens[str(index)] == alone[index] for index in (0, 2, 3))
    loop.add("again", PROMPTS[1] + loop.tokens["1"], 2)
    loop.add("other", PROMPTS[2] + alone[2], 2)
    loop.run()
    assert loop.cached("again") == 0 and loop.cached("other") >= len(PROMPTS[2] + alone[2]) - 3
    loop.assert_nothing_leaked()
