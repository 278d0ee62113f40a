"""An exception anywhere in planning or completing one request ends that request, and every other stream is as it would
be without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from scheduler_loop import Loop

from engine.beam_search import BeamSearch
from engine.core.wire import BeamParams
from engine.kv_cache.kv_cache import KVCache
from engine.scheduling import beam_group, holdings
from engine.scheduling.admission import Admission
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.outcomes import Outcomes
from engine.scheduling.placement import Placement
from engine.scheduling.running_rows import RunningRows
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step_draft import StepDraft

POINTS: list[tuple[Any, str]] = [
    (KVCache, "cached_blocks"),
    (KVCache, "match_prefix"),
    (KVCache, "adopt"),
    (KVCache, "append"),
    (KVCache, "register"),
    (KVCache, "fork"),
    (Admission, "_find_room"),
    (Admission, "_swap_in"),
    (Scheduler, "_make_room"),
    (holdings, "try_swap_out"),
    (Placement, "place"),
    (StepDraft, "start_row"),
    (StepDraft, "tell"),
    (StepDraft, "add"),
    (RunningRows, "advance"),
    (RunningRows, "watch"),
    (BeamSearch, "advance"),
    (BeamGroup, "choose"),
    (BeamGroup, "follow"),
    (beam_group, "_take_over"),
    (Outcomes, "_advance"),
    (Outcomes, "_deliver"),
    (Sequence, "ends_with"),
]
VICTIM = "victim"


class InjectedError(Exception):
    pass


@pytest.fixture
def num_schedules(request: pytest.FixtureRequest) -> int:
    return 500 if request.config.getoption("exhaustive", False) else 24


def schedule(seed: int) -> tuple[Loop, Callable[[], None]]:
    """A loop, and what adds its requests and runs it to the end."""
    rng = random.Random(seed)
    loop = Loop(
        depth=rng.randrange(2),
        num_blocks=rng.choice((10, 10, 13, 40)),
        block_size=4,
        rows=rng.randint(4, 8),
        budget=rng.choice((8, 32)),
        max_model_len=24,
        num_host_blocks=rng.choice((0, 32)),
        preemption=rng.choice(("recompute", "swap", "auto")),
        swap_block_s=1e-4,
        min_shared_chunk=(1, 4, 256)[seed % 3],
    )
    if loop.scheduler._config.preemption == "swap" and loop.kv.host is None:
        loop.scheduler._held.costs._mode = "recompute"
    kinds, victim = [rng.choice(("plain", "plain", "samples", "beams")) for _ in range(5)], rng.randrange(5)

    def run() -> None:
        for index, kind in enumerate(kinds):
            name = VICTIM if index == victim else f"r{index}"
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
            loop.add(
                name,
                prompt,
                rng.randint(1, 11),
                stop=[rng.randrange(20)] if rng.random() < 0.5 else [],
                prompt_logprobs=0 if kind == "plain" and rng.random() < 0.3 else None,
                followers=[f"{name}.{i}" for i in range(rng.randint(1, 3))] if kind == "samples" else (),
                alike=rng.random() < 0.5,
                beams=BeamParams(width=2, length_penalty=rng.choice((-100.0, 1.0, 100.0))) if kind == "beams" else None,
            )
            for _ in range(rng.randrange(3)):
                loop.turn()
        loop.run()

    return loop, run


@contextmanager
def raising(owner: Any, name: str, loop: Loop, call: int) -> Iterator[list[int]]:
    """`name` of `owner` raises when it is called for the victim for the `call`-th time; yields how often it was."""
    real, calls = getattr(owner, name), [0]

    def concerns(value: Any) -> bool:
        victim = loop.sequences.get(VICTIM)
        if victim is None:
            return False
        members = victim.group.members if victim.group is not None else [victim, *victim.siblings]
        of_group = victim.group is not None and (value is victim.group or value is victim.group.search)
        values = value if isinstance(value, list) else [value]
        return of_group or any(each is member or each is member.blocks for member in members for each in values)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if any(concerns(value) for value in args):
            calls[0] += 1
            if calls[0] == call:
                raise InjectedError(name)
        return real(*args, **kwargs)

    setattr(owner, name, wrapper)
    try:
        yield calls
    finally:
        setattr(owner, name, real)


def others(loop: Loop) -> dict[str, tuple[list[int], str | None]]:
    return {name: (loop.tokens[name], loop.reason(name)) for name in loop.ends if not name.startswith(VICTIM)}


@pytest.mark.parametrize(("owner", "name"), POINTS, ids=[name for _, name in POINTS])
def test_an_exception_for_one_request_ends_it_alone(owner: Any, name: str, num_schedules: int) -> None:
    fired = 0
    for seed in range(num_schedules):
        undisturbed, run = schedule(seed)
        run()
        loop, run = schedule(seed)
        call = 1 + seed % 2
        with raising(owner, name, loop, call) as calls:
            run()
        assert others(loop) == others(undisturbed), seed
        # A token that was lost on the way is not counted: nobody asks about a sequence that has failed.
        loop.sequences = {each: seq for each, seq in loop.sequences.items() if not each.startswith(VICTIM)}
        loop.assert_nothing_leaked()
        if calls[0] >= call:
            fired += 1
            reasons = [loop.reason(each) for each in loop.ends if each.startswith(VICTIM)]
            assert set(reasons) <= {"error", "stop", "length"}, seed
            errors = [end for each in loop.ends if each.startswith(VICTIM) for end in loop.ends[each] if end.error]
            assert all(end.error_kind == "fault" and "InjectedError" in str(end.error) for end in errors)
    assert fired, "no schedule comes by this point"
