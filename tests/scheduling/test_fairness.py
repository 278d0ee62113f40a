"""The policy `fair`: the queue against brute force, the bound of virtual token counters, and who gives way to whom."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_loop import Loop

from engine.kv_cache.sequence_blocks import SequenceBlocks
from engine.request import Tenant
from engine.scheduling.fair_queue import OUTPUT_COST, PROMPT_COST, FairQueue
from engine.scheduling.sequence import Sequence, Status
from engine.step import RowParams


def _sequence(number: int, priority: int) -> Sequence:
    blocks = SequenceBlocks.__new__(SequenceBlocks)  # nobody looks at them
    return Sequence(str(number), RowParams(seed=0), [1] * (1 + number % 7), (priority, number), 99, blocks)


_Moves = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 5), st.integers(-1, 1)),
        st.tuples(st.just("pop"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("back"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("serve"), st.integers(0, 99), st.integers(1, 50)),
    ),
    max_size=80,
)


@given(_Moves, st.sampled_from([0, 16]))
def test_the_first_is_the_lowest_of_all(moves: list[tuple[str, int, int]], credit: int) -> None:
    """By priority, its tenant's order, and arrival."""
    queue, waiting, running = FairQueue(credit), list[Sequence](), list[Sequence]()
    for number, (move, which, more) in enumerate(moves):
        if move == "push":
            seq = _sequence(number, more)
            queue.join(seq, Tenant(str(which), 1.0 + which % 2))
            others = [each.account.order[0] for each in waiting if each.account is not None]
            assert seq.account is not None
            before, was_idle = seq.account.served, all(each.account is not seq.account for each in waiting)
            waiting.append(seq)
            queue.push(seq)
            if was_idle and others:
                assert seq.account.served == max(before, min(others)), "raised to the lowest of those that wait"
                assert seq.account.level == seq.account.served or before >= min(others)
            elif not was_idle:
                assert seq.account.served == before
        elif move == "pop" and waiting:
            seq = queue.first()
            assert seq is not None
            queue.pop()
            waiting.remove(seq)
            seq.status, seq.cached_tokens = Status.RUNNING, 0
            running.append(seq)
            queue.started(seq, which)
        elif move == "back" and running:
            seq = running.pop(which % len(running))
            seq.status = Status.WAITING
            waiting.append(seq)
            queue.push(seq)
        elif move == "abort" and waiting:
            seq = waiting.pop(which % len(waiting))
            seq.status = Status.FINISHED
            queue.discard(seq)
            queue.leave(seq)
        elif move == "serve" and running:
            queue.started(running[which % len(running)], more)
        expected = min(waiting, key=_place, default=None)
        assert queue.first() is expected and len(queue) == len(waiting)


def _place(seq: Sequence) -> tuple[int, tuple[float, bool], int]:
    assert seq.account is not None
    return seq.key[0], seq.account.order, seq.key[1]


def test_of_tenants_that_are_gone_little_is_kept() -> None:
    queue = FairQueue()
    for number in range(5000):
        seq = _sequence(number, 0)
        queue.join(seq, Tenant(f"user {number}"))
        queue.push(seq)
        assert queue.first() is seq
        queue.pop()
        queue.started(seq, 3)
        queue.leave(seq)
    assert len(queue._accounts) <= 200


@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_what_two_that_wait_are_given_differs_by_no_more_than_the_bound(data: st.DataObject) -> None:
    """Theorem 4.4 of the paper: while both have requests that wait, W_i/w_i and W_j/w_j differ by at most twice the
    larger of a prompt's cost and that of all tokens that the pool holds, over the smaller weight."""
    num_blocks, block_size = data.draw(st.integers(16, 40)), 4
    loop = Loop(num_blocks=num_blocks, block_size=block_size, rows=data.draw(st.integers(1, 8)), policy="fair")
    weights = {name: data.draw(st.sampled_from([1.0, 1.0, 2.0])) for name in "abc"}
    lasts = Counter[str]()
    for name, weight in weights.items():
        for index in range(data.draw(st.integers(3, 30))):
            prompt = data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=20))
            loop.add(f"{name}{index}", prompt, data.draw(st.integers(1, 12)), tenant=Tenant(name, weight))
    longest = PROMPT_COST * 20, OUTPUT_COST * num_blocks * block_size
    bound = 2 * max(longest) / min(weights.values())
    fair = loop.scheduler._held.fair
    assert fair is not None
    while loop.scheduler.has_work:
        assert loop.turn()
        waiting = [name for name in weights if any(account.name == name for account in fair._queues)]
        served = {name: _given(loop, name) / weights[name] for name in waiting}
        lasts.update(waiting)
        assert not served or max(served.values()) - min(served.values()) <= bound
    loop.assert_nothing_leaked()
    assert len(lasts) > 0


def _given(loop: Loop, tenant: str) -> float:
    """Counted here, by what clients have received and by what was computed of their prompts."""
    total = 0.0
    for name, request in loop.requests.items():
        seq = loop.sequences[name]
        if name.startswith(tenant) and seq.cached_tokens is not None:
            total += PROMPT_COST * (len(request.prompt_token_ids) - seq.cached_tokens)
            total += OUTPUT_COST * len(loop.tokens[name])
    return total


@pytest.mark.parametrize("credit", [True, False])
def test_who_comes_back_does_not_wait_for_a_flood_behind_its_own_prompt(credit: bool) -> None:
    """Its second request starts at once, as long as it was given no more than a step's tokens before the flood."""
    loop = Loop(policy="fair", rows=4, num_blocks=400, budget=64, max_model_len=300, depth=0)
    fair = loop.scheduler._held.fair
    assert fair is not None and fair._credit == 64
    fair._credit *= credit
    for index in range(20):
        loop.add(f"flood{index}", [index % 11, 1, 2], 200, tenant=Tenant("flood"))
    for _ in range(40):
        loop.turn()
    waits = [0, 0]
    for index in range(2):
        loop.add(f"honest{index}", [5 + index] * 50, 1, tenant=Tenant("honest"))
        while not loop.ends[f"honest{index}"]:
            loop.turn()
            waits[index] += 1
    assert waits[0] <= 2 and (waits[1] <= 2 if credit else waits[1] >= 5)
    loop.run()
    loop.assert_nothing_leaked()


@pytest.mark.parametrize("tight", ["rows", "blocks"])
def test_who_runs_more_gives_way_to_who_comes(tight: str) -> None:
    """All rows, or all blocks, are a flood's, whose sequences are long; another tenant's request starts at once."""
    shape = {"rows": 4, "num_blocks": 200} if tight == "rows" else {"rows": 16, "num_blocks": 32}
    loop = Loop(block_size=4, max_model_len=65, policy="fair", **shape)
    for index in range(40):
        loop.add(f"flood{index}", [index % 11, 1, 2], 60, tenant=Tenant("flood"))
    for _ in range(12):
        loop.turn()
    loop.add("honest", [5, 6, 7, 8], 4, tenant=Tenant("honest"))
    turns = 0
    while not loop.ends["honest"]:
        assert loop.turn()
        turns += 1
    assert turns <= 12, "it did not wait until one of the flood had ended"
    assert not any(loop.ends[f"flood{index}"] for index in range(40))
    loop.run()
    assert all(loop.reason(f"flood{index}") == "length" for index in range(40))
    loop.assert_nothing_leaked()


def test_a_flood_on_a_fresh_engine_hides_nothing_of_what_it_was_given() -> None:
    """Found by a newcomer: who comes back had a step's tokens of credit, on two cores those of ten seconds, and who had
    asked before the flood, and been given little, waited for that."""
    loop = Loop(policy="fair", rows=4, num_blocks=400, budget=2048, max_model_len=300, depth=0)
    for tenant in ("honest", "flood"):
        loop.add(f"{tenant} before", [1, 2, 3], 12, tenant=Tenant(tenant))
        while not loop.ends[f"{tenant} before"]:
            loop.turn()
    for index in range(16):
        loop.add(f"flood{index}", [index % 11, 1, 2], 100, tenant=Tenant("flood"))
    for _ in range(20):
        loop.turn()
    loop.add("honest", [5, 6, 7, 8], 12, tenant=Tenant("honest"))
    turns = 0
    while not loop.ends["honest"]:
        loop.turn()
        turns += 1
    assert turns <= 16 and not any(loop.ends[f"flood{index}"] for index in range(16))
    loop.run()
    loop.assert_nothing_leaked()


def test_who_runs_less_has_the_step_before_the_prompts_of_who_runs_more() -> None:
    loop = Loop(policy="fair", rows=8, num_blocks=400, budget=64, max_model_len=300, depth=0, min_shared_chunk=4)
    for index in range(3):
        loop.add(f"flood{index}", [index] * 200, 4, tenant=Tenant("flood"))
    loop.turn()
    loop.add("honest", [7] * 56, 4, tenant=Tenant("honest"))
    loop.turn()
    assert loop.tokens["honest"] and not loop.tokens["flood0"], "all of the step, but for an eighth"
    loop.run()
    loop.assert_nothing_leaked()


def test_who_starts_before_one_that_runs_less_has_a_token_of_the_step() -> None:
    """`b` was given more, so `a` is the first to start, though it runs more."""
    loop = Loop(policy="fair", rows=8, num_blocks=400, budget=16, max_model_len=300, depth=0, min_shared_chunk=4)
    for index in range(3):
        loop.add(f"a{index}", [index], 60, tenant=Tenant("a"))
    loop.add("b0", [7] * 200, 1, tenant=Tenant("b"))
    while not loop.ends["b0"]:
        loop.turn()
    loop.add("a3", [8] * 130, 4, tenant=Tenant("a"))
    loop.add("b1", [9] * 30, 4, tenant=Tenant("b"))
    loop.turn()
    assert sorted(loop.plans[-1].rows.query_lens.tolist()) == [1, 1, 1, 1, 12]
    loop.run()
    loop.assert_nothing_leaked()


def test_who_is_made_way_for_starts_though_those_that_run_need_blocks_in_the_same_step() -> None:
    """Eight that decode in step need a block each at the same token. What is freed for who comes does for them, too."""
    for turns in range(6, 14):  # more than the flood might be given as one who has just come
        loop = Loop(policy="fair", rows=16, num_blocks=64, block_size=4, max_model_len=65, depth=0, budget=200)
        for index in range(30):
            loop.add(f"flood{index}", [index % 11, 1, 2, 3], 60, tenant=Tenant("flood"))
        for _ in range(turns):
            loop.turn()
        loop.add("honest", [5] * 24, 4, tenant=Tenant("honest"))
        loop.turn()
        assert loop.tokens["honest"], f"behind {turns} steps"


def test_who_is_alone_has_everything_and_is_never_preempted_for_fairness() -> None:
    loop = Loop(rows=4, num_blocks=200, max_model_len=65, policy="fair")
    for index in range(12):
        loop.add(str(index), [index % 11, 1, 2], 40, tenant=Tenant("one"))
    loop.run()
    assert loop.scheduler.stats().preemptions == 0
    assert [plan.rows.row.size for plan in loop.plans].count(4) > 60


def test_shares_follow_weights() -> None:
    loop = Loop(rows=6, num_blocks=400, max_model_len=65, policy="fair")
    for index in range(60):
        for name, weight in (("one", 1.0), ("two", 2.0)):
            loop.add(f"{name}{index}", [index % 11, 1], 20, tenant=Tenant(name, weight))
    done: dict[str, int] = defaultdict(int)
    for _ in range(250):
        loop.turn()
    for name in ("one", "two"):
        done[name] = sum(bool(loop.ends[f"{name}{index}"]) for index in range(60))
    assert done["two"] == pytest.approx(2 * done["one"], rel=0.15) and done["one"] > 10


def test_a_priority_comes_before_shares() -> None:
    loop = Loop(rows=1, num_blocks=200, policy="fair")
    loop.add("first", [1], 4, tenant=Tenant("a"))
    loop.turn()
    loop.add("a", [1, 2], 4, tenant=Tenant("a"), priority=-1)
    loop.add("b", [1, 3], 4, tenant=Tenant("b"))
    loop.run()
    order = [
        name for plan in loop.plans for new in plan.added for name in loop.requests if _is(loop, name, new.token_ids)
    ]
    assert order == ["first", "a", "b"]


def _is(loop: Loop, name: str, token_ids: list[int]) -> bool:
    return loop.requests[name].prompt_token_ids == token_ids


@pytest.mark.parametrize("caching", [True, False])
def test_who_makes_way_is_not_preempted_again_and_again(caching: bool) -> None:
    """Rows and counters disagree: `a` runs three long answers and was given little, `b` was given much before."""
    shape = {"rows": 4, "num_blocks": 4000, "budget": 256, "max_model_len": 1200, "caching": caching}
    loop = Loop(policy="fair", depth=0, block_size=4, **shape)
    for index in range(3):
        loop.add(f"a{index}", [5 + index] * 200, 300, tenant=Tenant("a"))
    for _ in range(3):
        loop.turn()
    for index in range(8):
        loop.add(f"w{index}", [index] * 800, 1, tenant=Tenant("b"))
        while not loop.ends[f"w{index}"]:
            loop.turn()
    before = loop.scheduler.stats().preemptions
    loop.add("b0", [9] * 40, 100, tenant=Tenant("b"))
    loop.add("b1", [8] * 40, 4, tenant=Tenant("b"))
    loop.run()
    assert loop.scheduler.stats().preemptions - before <= 3
    loop.assert_nothing_leaked()
