"""Who finds more in the prefix cache starts before others that wait, but nobody is passed for long."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_loop import Loop

from engine.kv_cache.sequence_blocks import SequenceBlocks
from engine.request import Tenant
from engine.scheduling import admission
from engine.scheduling.admission import LOOKED_AT, MOST_PASSED
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.waiting_queue import WaitingQueue
from engine.step import RowParams

HEADS = [[10 * head + place for place in range(8)] for head in range(1, 9)]
"""two blocks each"""


def order_of(loop: Loop) -> list[str]:
    """Ids of requests as they started; `Loop`s of one row start one at a time."""
    started: list[str] = []
    starts = loop.scheduler._rows.enter

    def enter(seq: Sequence, computed: int) -> None:
        started.append(seq.request_id)
        starts(seq, computed)

    loop.scheduler._rows.enter = enter  # type: ignore[method-assign]
    loop.run()
    return started


def warmed(head: int = 0, **settings: object) -> Loop:
    """The cache has one head."""
    loop = Loop(rows=1, **settings)  # type: ignore[arg-type]
    loop.add("before", [*HEADS[head], 5], max_tokens=1)
    loop.run()
    return loop


def test_who_finds_more_starts_first_and_of_equals_the_first() -> None:
    loop = warmed()
    loop.add("cold", [*HEADS[1], 7])
    loop.add("half", [*HEADS[0][:4], 1, 2, 3])
    loop.add("warm", [*HEADS[0], 6])
    loop.add("warm too", [*HEADS[0], 7])
    loop.add("cold too", [*HEADS[2], 7])
    assert order_of(loop) == ["warm", "warm too", "half", "cold", "cold too"]
    assert [loop.cached(name) for name in ("warm", "warm too", "half", "cold")] == [8, 8, 4, 0]
    loop.assert_nothing_leaked()


def test_nobody_is_passed_more_often_than_that() -> None:
    loop = warmed()
    loop.add("cold", [*HEADS[1], 7], max_tokens=1)
    loop.add("cold too", [*HEADS[2], 7], max_tokens=1)
    names = [f"warm {index}" for index in range(3 * MOST_PASSED)]
    for name in names:
        loop.add(name, [*HEADS[0], 6], max_tokens=1)
    order = order_of(loop)
    assert order[: MOST_PASSED + 2] == [*names[:MOST_PASSED], "cold", "cold too"]
    assert [name for name in order if "warm" in name] == names


def test_only_so_many_are_looked_at() -> None:
    loop = warmed()
    for index in range(LOOKED_AT):
        loop.add(f"cold {index}", [100 + index] * 5, max_tokens=1)
    loop.add("warm", [*HEADS[0], 6], max_tokens=1)
    assert order_of(loop)[:2] == ["cold 0", "warm"]


def test_a_priority_comes_first_and_without_a_cache_all_is_as_it_was() -> None:
    loop = warmed(policy="priority")
    loop.add("warm", [*HEADS[0], 6], priority=1)
    loop.add("cold", [*HEADS[1], 6], priority=1)
    loop.add("urgent", [*HEADS[2], 6])
    assert order_of(loop) == ["urgent", "warm", "cold"]
    loop = warmed(caching=False)
    loop.add("cold", [*HEADS[1], 6])
    loop.add("warm", [*HEADS[0], 6])
    assert order_of(loop) == ["cold", "warm"]


def test_the_order_of_tenants_stays_fair() -> None:
    loop = warmed(policy="fair")
    for index in range(4):
        loop.add(f"a cold {index}", [*HEADS[index + 1], 6], max_tokens=1, tenant=Tenant("a"))
        loop.add(f"b warm {index}", [*HEADS[0], 6], max_tokens=1, tenant=Tenant("b"))
    loop.add("a warm", [*HEADS[0], 6], max_tokens=1, tenant=Tenant("a"))
    order = order_of(loop)
    assert order.index("a warm") < order.index("a cold 1") < order.index("a cold 2")
    served, fair = {"a": 0, "b": 0}, loop.scheduler._held.fair
    assert fair is not None
    for name in order[: order.index("b warm 3")]:  # while both wait
        served[name[0]] += len(loop.requests[name].prompt_token_ids) - loop.cached(name) + 2
        assert abs(served["a"] - served["b"]) <= 2 * (9 + 2) + fair._credit, "both have just come"


def test_who_was_preempted_is_passed_by_nobody() -> None:
    """Two grow until one of them gives way; it goes on before whoever waits, whatever the cache has."""
    loop = Loop(rows=2, num_blocks=9, depth=0)
    loop.add("before", [*HEADS[0], 5], max_tokens=1)
    loop.run()
    loop.add("first", [70, 71, 72], max_tokens=17)
    loop.add("second", [80, 81, 82], max_tokens=17)
    while not (second := loop.sequences["second"]).interrupted:
        assert loop.turn()
        if "warm" not in loop.requests and second.status is Status.RUNNING:
            loop.add("warm", [*HEADS[0], 6], max_tokens=1)
    assert second.status is Status.WAITING
    assert order_of(loop) == ["second", "warm"]


def test_who_would_be_late_goes_before_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = warmed()
    loop.add("runs", [70, 71, 72], max_tokens=3)
    loop.turn()
    loop.add("cold", [*HEADS[1], 6], max_tokens=1)
    loop.add("warm", [*HEADS[0], 6], max_tokens=1)
    late = loop.sequences["warm"]
    monkeypatch.setattr(loop.scheduler._expected, "would_be_late", lambda seq: seq is late)
    assert order_of(loop) == ["cold", "warm"]


def test_a_pass_is_one_where_somebody_started() -> None:
    """What does not fit is tried again and again, and has passed nobody."""
    loop = Loop(rows=3, num_blocks=8, depth=0)
    loop.add("before", [*HEADS[0], 5], max_tokens=1)
    loop.run()
    loop.add("runs", [70, 71, 72, 73, 74], max_tokens=12)
    loop.turn()
    loop.add("long", [*range(300, 324)], max_tokens=2)
    loop.add("warm but long", [*HEADS[0], *range(200, 220)], max_tokens=4)
    for _ in range(6):
        loop.turn()
    assert loop.sequences["long"].passed == 0 and loop.sequences["long"].status is Status.WAITING
    loop.run()


def test_what_does_not_fit_leaves_the_first_its_turn() -> None:
    loop = Loop(rows=3, num_blocks=8, depth=0)
    loop.add("before", [*HEADS[0], 5], max_tokens=1)
    loop.run()
    loop.add("runs", [70, 71, 72, 73, 74], max_tokens=8)
    loop.turn()
    loop.add("small", [90, 91], max_tokens=2)
    loop.add("warm but long", [*HEADS[0], *range(200, 220)], max_tokens=4)
    assert order_of(loop) == ["small", "warm but long"]
    loop.assert_nothing_leaked()


def test_prefixes_that_do_not_all_fit_are_used_while_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight heads, of which the pool holds three, and requests in any order: computed more than once for each only by
    who is one of the last."""

    def hits(looked_at: int) -> int:
        monkeypatch.setattr(admission, "LOOKED_AT", looked_at)
        loop, numbers = Loop(rows=1, num_blocks=10), [*range(8)] * 8
        random.Random(3).shuffle(numbers)
        for index, head in enumerate(numbers):
            loop.add(f"r{index}", [*HEADS[head], index], max_tokens=1)
        loop.run()
        loop.assert_nothing_leaked()
        return sum(loop.cached(name) for name in loop.requests)

    ideal = 8 * 7 * 8
    assert hits(1) < 0.6 * ideal < 0.85 * ideal < hits(LOOKED_AT)


def _sequence(number: int, priority: int) -> Sequence:
    blocks = SequenceBlocks.__new__(SequenceBlocks)  # nobody looks at them
    return Sequence(str(number), RowParams(seed=0), [1] * (1 + number % 7), (priority, number), 99, blocks)


@pytest.mark.parametrize("make", [WaitingQueue, FairQueue])
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["push", "push", "take", "end", "back"]), st.integers(0, 99)), max_size=60
    ),
    count=st.integers(1, 6),
)
def test_those_ahead_are_the_first_and_any_of_them_may_be_taken(
    make: Callable[[], WaitingQueue], moves: list[tuple[str, int]], count: int
) -> None:
    queue, waiting, gone = make(), list[Sequence](), list[Sequence]()
    for number, (move, which) in enumerate(moves):
        ahead = queue.ahead(count)
        first = queue.first()
        alike = [seq for seq in waiting if first is not None and seq.key[0] == first.key[0]]
        if isinstance(queue, FairQueue):
            alike = [seq for seq in alike if first is not None and seq.account is first.account]
        assert ahead == sorted(alike, key=lambda seq: seq.key)[:count] and ahead[:1] == [first][: len(ahead)]
        assert len(queue) == len(waiting) and queue.num_tokens == sum(seq.prompt_len for seq in waiting)
        assert queue.most_tokens == sum(seq.max_total - seq.prompt_len for seq in waiting)
        if move == "push":
            seq = _sequence(number, which % 2)
            if isinstance(queue, FairQueue):
                queue.join(seq, Tenant(str(which % 3)))
            waiting.append(seq)
            queue.push(seq)
        elif move == "take" and ahead:
            seq = ahead[which % len(ahead)]
            queue.take(seq)
            waiting.remove(seq)
            seq.status = Status.RUNNING
            gone.append(seq)
        elif move == "end" and waiting:
            seq = waiting.pop(which % len(waiting))
            seq.status = Status.FINISHED
            queue.discard(seq)
        elif move == "back" and gone:
            seq = gone.pop(which % len(gone))
            seq.status = Status.WAITING
            waiting.append(seq)
            queue.push(seq)
