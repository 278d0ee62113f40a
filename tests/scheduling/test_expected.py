"""Who is refused because a deadline would be missed: its own, or another's that runs; and how careful that is."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count

import pytest
from msgspec.structs import replace as changed
from priced_server import PROMPT_S, ROW_S, STEP_S, Server
from priced_server import request_of as _request

from engine.errors import QueueFullError
from engine.request import Tenant
from engine.scheduling.sequence import Sequence
from engine.step import StepResult


def test_it_is_told_how_long_its_steps_take_beside_those_that_run() -> None:
    server = Server()
    alone = server.expected.seconds(_request("x", 100))
    assert alone == pytest.approx(100 * (STEP_S + ROW_S), rel=0.1)
    for index in range(3):
        server.add(_request(f"r{index}", 100))
    server.turns(3)
    beside = server.expected.seconds(_request("x", 100))
    assert 100 * (STEP_S + 3.5 * ROW_S) < beside < 100 * (STEP_S + 4.5 * ROW_S)
    short = server.expected.seconds(_request("x", 10))
    assert short < 0.2 * beside


def test_who_cannot_be_in_time_is_refused_told_when_to_ask_again_and_leaves_nothing() -> None:
    server = Server(rows=1)
    server.add(_request("runs", 200))
    server.turns(2)
    server.add(_request("waits", 200))
    needs = server.expected._margin.times * server.expected.seconds(_request("x", 100))
    assert needs > 1.25 * 0.8 * 500 * (STEP_S + ROW_S)
    with pytest.raises(QueueFullError, match="too short: by what waits and runs") as error:
        server.add(_request("x", 100, deadline_s=needs - 1))
    assert error.value.retry_after_s == pytest.approx(1)
    server.add(_request("in time", 100, deadline_s=needs + 1))
    server.add(_request("has time", 100))
    server.loop.receive(server.scheduler.abort(["runs", "waits", "in time", "has time"]))
    server.loop.run()
    server.loop.assert_nothing_leaked()
    assert server.scheduler._held.waiting.num_tokens == 0


def test_many_that_ask_for_a_token_each_are_let_in_whatever_others_asked_for() -> None:
    server = Server()
    server.add(_request("runs", 200))
    server.turns(2)
    for index in range(200):
        server.add(_request(f"short {index}", 1, deadline_s=8.0))
    with pytest.raises(QueueFullError, match="too short"):
        for index in range(200):
            server.add(_request(f"long {index}", 300, deadline_s=8.0))


def test_who_would_make_others_late_is_refused_though_it_would_be_in_time_itself() -> None:
    server = Server()
    server.add(_request("runs", 100, deadline_s=3.0))
    server.turns(2)
    heavy = _request("x", 100, deadline_s=60.0, prompt=1500)
    with pytest.raises(QueueFullError, match="what runs would miss its deadlines") as error:
        server.add(heavy)
    assert error.value.retry_after_s == pytest.approx(100 * (STEP_S + ROW_S), rel=0.15)
    server.add(_request("light", 20, deadline_s=60.0))
    server.add(changed(heavy, request_id="has no deadline", deadline_s=None))


def test_who_was_let_in_for_a_deadline_that_cannot_be_kept_keeps_nobody_out() -> None:
    """It came while nothing ran."""
    server = Server()
    server.add(_request("runs", 100, deadline_s=1.6))  # 1.5 s alone, and the margin
    server.turns(2)
    server.add(_request("x", 100, deadline_s=60.0, prompt=1500))


def test_the_more_urgent_comes_in_whomever_it_makes_late() -> None:
    server = Server(policy="priority")
    server.add(_request("runs", 100, deadline_s=3.0, priority=3))
    server.turns(2)
    heavy = _request("x", 100, deadline_s=60.0, prompt=1500, priority=3)
    with pytest.raises(QueueFullError, match="what runs"):
        server.add(heavy)
    server.add(changed(heavy, priority=2))


def test_who_asks_for_little_is_let_in_beside_one_that_has_hardly_time() -> None:
    server = Server()
    server.add(_request("runs", 100, deadline_s=2.1))
    server.turns(2)
    with pytest.raises(QueueFullError, match="what runs"):
        server.add(_request("x", 100, deadline_s=60.0))
    server.add(_request("y", 5, deadline_s=60.0))


def test_those_that_are_late_whoever_comes_keep_nobody_out() -> None:
    server = Server()
    server.add(_request("runs", 100, deadline_s=3.0))
    server.turns(2)
    server.now += 2.9
    server.add(_request("x", 100, deadline_s=60.0, prompt=1500))


def test_a_tenants_many_rows_do_not_keep_another_one_out() -> None:
    server = Server(policy="fair")
    flood, honest = Tenant("flood"), Tenant("honest")
    for index in range(3):
        server.add(_request(f"r{index}", 100, deadline_s=3.6, tenant=flood))
    server.turns(4)
    heavy = _request("x", 100, deadline_s=60.0, prompt=1500, tenant=flood)
    with pytest.raises(QueueFullError, match="what runs"):
        server.add(heavy)
    server.add(changed(heavy, request_id="y", tenant=honest))


def test_of_a_flood_that_waits_another_tenant_waits_for_its_share_alone() -> None:
    server = Server(rows=1, policy="fair")
    server.add(_request("runs", 20, tenant=Tenant("flood")))
    server.turns(2)
    for index in range(30):
        server.add(_request(f"w{index}", 100, tenant=Tenant("flood")))
    assert server.expected.seconds(_request("x", 100, tenant=Tenant("flood"))) > 30
    assert server.expected.seconds(_request("x", 100, tenant=Tenant("honest"))) < 10


def test_the_more_urgent_does_not_wait_for_the_line() -> None:
    server = Server(rows=1, policy="priority")
    server.add(_request("runs", 20))
    server.turns(2)
    for index in range(10):
        server.add(_request(f"w{index}", 100))
    assert server.expected.seconds(_request("x", 100, priority=-1)) < 0.3 * server.expected.seconds(_request("x", 100))


def test_whatever_was_seen_who_comes_while_nothing_runs_is_let_in() -> None:
    """Or nobody would ever learn that the server is fast again."""
    server = Server()
    request = _request("x", 1000, deadline_s=0.5)
    server.expected.check(request)
    server.add(_request("runs", 100))
    server.turns(2)
    with pytest.raises(QueueFullError):
        server.expected.check(request)


def test_one_that_waits_and_could_not_end_in_time_any_more_is_told_so() -> None:
    server = Server(rows=1)
    server.add(_request("runs", 1000))
    server.turns(2)
    server.add(_request("x", 100, deadline_s=1000.0))
    seq = server.scheduler._live["x"]
    assert server.expected.is_late(seq) is None
    server.now += 998
    error = server.expected.is_late(seq)
    again = server.expected.is_late(seq)
    assert error is not None and again is not None and 0 < error.retry_after_s + 0.5 < again.retry_after_s
    (end,) = [delta for delta in server.scheduler.end_failed() if delta.request_id == "x"] or [None]
    assert end is None, "only its turn tells"


def test_as_many_fit_as_run_while_others_wait() -> None:
    server = Server(num_blocks=100)
    for index in range(3):
        server.add(_request(f"r{index}", 100, prompt=160))
    assert server.expected._rows_that_fit() == 8
    server.turns(1)
    assert server.expected._rows_that_fit() == 8, "it waits for its turn"
    server.turns(15)
    assert len(server.scheduler._held.waiting) == 1
    assert server.expected._rows_that_fit() == 2
    server.loop.receive(server.scheduler.abort(["r2"]))
    assert server.expected._rows_that_fit() == 8


def test_who_waits_for_the_next_step_alone_says_nothing_of_how_many_fit() -> None:
    """Steps that compute no prompt end while others come."""
    server = Server()
    for index in range(3):
        server.add(_request(f"r{index}", 60))
    server.turns(5)
    collect, came = server.loop.executor.collect, count()

    def comes_meanwhile() -> StepResult:
        server.add(_request(f"comes {next(came)}", 1))
        assert len(server.scheduler._held.waiting) == 1
        return collect()

    server.loop.executor.collect = comes_meanwhile  # type: ignore[method-assign]
    server.turns(40)
    assert next(came) == 40
    assert server.expected._rows_that_fit() == 8 and not server.expected._fitted.mean


def test_where_once_few_fitted_those_count_that_run_now() -> None:
    server = Server(num_blocks=100)
    _fill_with_long_ones(server)
    server.loop.receive(server.scheduler.abort([f"long {index}" for index in range(3)]))
    for index in range(12):
        server.add(_request(f"short {index}", 200, prompt=20))
    assert server.expected._rows_that_fit() == 8, "nothing runs"
    server.turns(1)
    assert server.expected._rows_that_fit() == max(2, len(server.scheduler._running)) < 8
    server.turns(11)
    assert len(server.scheduler._held.waiting) == 4
    assert server.expected._rows_that_fit() == len(server.scheduler._running) == 8
    assert server.expected._forecast(_request("x", 1)).waiting == 4


def test_where_once_many_fitted_those_count_that_are_in_the_way_now() -> None:
    server = Server(num_blocks=100)
    for index in range(12):
        server.add(_request(f"short {index}", 200))
    server.turns(40)
    assert server.expected._rows_that_fit() == round(server.expected._fitted.mean) == 8
    server.loop.receive(server.scheduler.abort([f"short {index}" for index in range(12)]))
    _fill_with_long_ones(server)
    assert round(server.expected._fitted.mean) > 2


def _fill_with_long_ones(server: Server) -> None:
    """Two of three fit."""
    for index in range(3):
        server.add(_request(f"long {index}", 100, prompt=160))
    server.turns(20)
    assert len(server.scheduler._held.waiting) == 1
    assert server.expected._rows_that_fit() == 2


def test_if_few_come_their_prompts_are_not_what_steps_are_made_of() -> None:
    server = Server()
    server.add(_request("runs", 1000))
    server.turns(2)
    server.expected._prompts.mean = 1000.0
    needs = []
    for seconds_apart in (0.1, 100.0):
        for _ in range(40):
            server.now += seconds_apart
            server.expected.check(_request("x", 1))
        needs.append(server.expected.seconds(_request("x", 100)))
    assert needs[1] == pytest.approx(100 * (STEP_S + 2 * ROW_S), rel=0.2)
    assert needs[0] > 1.5 * needs[1]


def _sequence(server: Server, tokens: int = 1) -> Sequence:
    running = _request("s", 100)
    server.add(running)
    seq = server.scheduler._live["s"]
    server.scheduler.abort(["s"])
    seq.tokens += [1] * tokens
    seq.arrived_at = seq.started_at = server.now
    return seq


def test_of_a_prompt_counts_what_no_cache_had() -> None:
    server = Server()
    server.add(_request("runs", 1000))
    server.turns(2)
    before = server.expected.seconds(_request("x", 1, prompt=1000))
    for _ in range(200):
        seq = _sequence(server)
        seq.cached_tokens = seq.prompt_len * 3 // 4
        server.expected.started(seq)
    assert server.expected.seconds(_request("x", 1, prompt=1000)) < 0.4 * before


def test_where_stages_take_turns_each_step_has_a_part_of_the_rows() -> None:
    servers = [Server(), Server()]
    servers[1].expected._stages = 2
    for server in servers:
        for index in range(7):
            server.add(_request(f"r{index}", 500))
        server.turns(8)
    one, two = (server.expected.seconds(_request("x", 100)) for server in servers)
    assert one == pytest.approx(100 * (STEP_S + 8 * ROW_S), rel=0.1)
    assert two == pytest.approx(100 * (STEP_S + 4 * ROW_S), rel=0.1)


def test_drafts_that_are_right_make_answers_shorter() -> None:
    server = Server()
    before = server.expected.seconds(_request("x", 100))
    for _ in range(100):
        seq = _sequence(server, tokens=90)
        seq.first_step, server.expected.steps = 1, 31
        server.expected.ended(seq, by_itself=True)
        seq.first_step, server.expected.steps = 0, 10**6  # begun by another core: nothing is known
        server.expected.ended(seq, by_itself=True)
    assert server.expected.seconds(_request("x", 100)) == pytest.approx(before / 3, rel=0.1)


def _tries(server: Server, clients: int, told: Callable[[float], float]) -> list[int]:
    """How often each has to ask that comes at once with all others, and then when it was told to (at a second's
    border, as `Retry-After` has it), in order of their ends."""
    coming = [(server.now, index, 1) for index in range(clients)]
    live: dict[str, int] = {}
    tries: list[int] = []
    while coming or live:
        coming.sort()
        while coming and coming[0][0] <= server.now:
            _, index, asked = coming.pop(0)
            assert asked < 50
            try:
                server.add(_request(f"c{index}", 100, deadline_s=6.0))
            except QueueFullError as error:
                coming.append((server.now + told(error.retry_after_s), index, asked + 1))
            else:
                live[f"c{index}"] = asked
        if live:
            server.turns(1)
            server.now += STEP_S + ROW_S * len(server.scheduler._running)
            for name in [name for name in live if server.loop.ends[name]]:
                end, asked = server.loop.ends.pop(name)[0], live.pop(name)
                if end.finish_reason == "length":
                    tries.append(asked)
                else:
                    coming.append((server.now + told(end.retry_after_s), int(name[1:]), asked + 1))
        else:
            server.now = coming[0][0]
    return tries


@pytest.mark.parametrize(("clients", "most"), [(60, 3), (200, 5)])
def test_those_that_are_refused_at_once_do_not_come_again_at_once(clients: int, most: int) -> None:
    """Were all told the same, 60 would ask 1,200 times, and one of them 41 times."""
    server = Server(rows=16)
    tries = _tries(server, clients, lambda seconds: math.ceil(max(seconds, 1)))
    assert len(tries) == clients
    assert max(tries) <= most and sum(tries) <= 3 * clients, tries
    took = server.now - 1000.0  # eight at a time are in time
    assert took < 1.3 * clients * (100 * (ROW_S + STEP_S / 8) + 4 * PROMPT_S), took
