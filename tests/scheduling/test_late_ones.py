"""What those that run and are promised something say of who comes; and what waits in their way."""

from __future__ import annotations

from contextlib import suppress

import pytest
from msgspec.structs import replace as changed
from priced_server import PROMPT_S, ROW_S, STEP_S, Server
from priced_server import request_of as _request

from engine.core.wire import AddRequest, BeamParams, Follower
from engine.errors import QueueFullError
from engine.request import Tenant


def _close(server: Server, name: str) -> AddRequest:
    """It is let in, and has no time to lose."""
    needs = server.expected._margin.times * server.expected.seconds(_request(name, 100))
    return _request(name, 100, deadline_s=1.01 * needs)


@pytest.mark.parametrize(("slower", "least", "most"), [(1.0, 1.2, 1.25), (1.6, 1.5, 1.65), (9.0, 2.0, 2.0)])
def test_if_those_that_run_take_longer_than_was_expected_whoever_comes_is_held_to_it(
    slower: float, least: float, most: float
) -> None:
    server = Server()
    server.add(_close(server, "runs"))
    server.turns(2)
    ones, n, nn, s, ns = server.scheduler._costs._sums
    server.scheduler._costs._sums = ones, n, nn, slower * s, slower * ns
    with suppress(QueueFullError):
        server.add(_request("comes", 10, deadline_s=1000.0))
    assert least <= server.expected._margin.times <= most


def test_that_its_answer_is_longer_than_others_were_is_nobody_elses_fault() -> None:
    """Whoever wants others to be refused could make it so."""
    server = Server()
    for _ in range(400):
        server.expected.answers.ended("liar", 40, 400, by_itself=True)
    tenant = Tenant("liar")
    needs = server.expected.seconds(_request("x", 400, tenant=tenant))
    server.add(_request("runs", 400, deadline_s=1.26 * needs, tenant=tenant))
    for _ in range(100):
        server.turns(1)
        server.now += STEP_S + ROW_S
        with suppress(QueueFullError):
            server.expected.check(_request("comes", 10, deadline_s=1000.0))
        assert server.expected._margin.times <= 1.26


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_those_for_whom_there_is_a_row_run_beside_whoever_comes_though_they_have_not_begun(policy: str) -> None:
    server = Server(policy=policy)
    others, own = Tenant("others"), Tenant("own")
    for index in range(5):
        server.add(_request(f"r{index}", 100, tenant=others))
    seconds = server.expected.seconds(_request("x", 100, tenant=own, priority=-1))
    assert seconds == pytest.approx(100 * (STEP_S + 6 * ROW_S), rel=0.1)


def test_prompts_that_only_wait_make_none_late_that_runs() -> None:
    """Whoever sends them could leave again, and others would be refused for it."""
    server = Server(rows=2)
    server.add(_close(server, "runs"))
    server.turns(2)
    for name in "abc":
        server.add(_request(name, 1, prompt=1500))
    with suppress(QueueFullError):
        server.add(_request("comes", 10, deadline_s=1000.0))
    assert server.expected._margin.times <= 1.25


def test_many_samples_have_one_voice() -> None:
    """And each beam is promised what its request is."""
    server = Server(rows=8, num_blocks=65536)
    search = BeamParams(width=4, length_penalty=1.0)
    server.add(changed(_request("beams", 100, deadline_s=100.0), beams=search, followers=_followers("b", 3)))
    assert all(seq.promised is not None for seq in server.scheduler._live["beams"].siblings)
    server.scheduler.abort(["beams"])
    server.add(_request("alone", 100, deadline_s=60.0))
    server.turns(2)
    server.add(changed(_request("samples", 100, deadline_s=60.0), followers=_followers("s", 5)))
    server.turns(2)
    seen: list[int] = []
    server.expected._margin.look = lambda now, by, given, expected, takes: seen.append(int((expected > 0).sum()))  # type: ignore[method-assign]
    with suppress(QueueFullError):
        server.add(_request("comes", 10, deadline_s=1000.0))
        server.add(_request("comes in the same step", 10, deadline_s=1000.0))
    assert seen == [2], "and it is asked once a step"


def _followers(name: str, count: int) -> list[Follower]:
    return [Follower(request_id=f"{name} {index}", seed=index) for index in range(count)]


def test_of_samples_that_wait_each_is_one_of_those_that_share_a_prompt() -> None:
    """32 samples have one prompt, not 32."""
    server = Server()
    for index in range(8):
        server.add(_request(f"r{index}", 100))
    server.turns(3)
    short = server.expected.seconds(_request("x", 10))
    server.add(changed(_request("samples", 10, prompt=1500), followers=_followers("s", 31)))
    prompt_s, steps_s = 1500 * PROMPT_S, 32 * 10 / 8 * (STEP_S + 8 * ROW_S)
    assert server.expected.seconds(_request("x", 10)) - short == pytest.approx(prompt_s + steps_s, rel=0.3)


def test_whether_one_is_late_that_waits_counts_the_prompts_of_those_that_follow() -> None:
    """As far as a step has room for them."""
    server = Server(rows=2)
    server.add(_request("a", 1000))
    server.add(_request("b", 1000))
    server.turns(3)
    server.add(_request("waits", 10, deadline_s=1000.0))
    seq, bare = server.scheduler._live["waits"], 10 * (STEP_S + 3 * ROW_S)
    assert server.expected._service_s(seq) == pytest.approx(bare, rel=0.3)
    server.expected._prompts.mean = 100_000.0
    expected = server.expected._service_s(seq)
    assert expected == pytest.approx(bare + 10 * 64 * PROMPT_S, rel=0.3)
    for times, is_late in ((1.1, False), (0.9, True)):
        seq.deadline = server.now + times * expected
        assert server.expected.would_be_late(seq) is is_late


def test_one_that_had_time_to_lose_says_nothing() -> None:
    server = Server()
    server.add(_request("runs", 100, deadline_s=1000.0))
    server.turns(2)
    server.now += 900.0
    server.add(_request("comes", 10, deadline_s=1000.0))
    assert server.expected._margin.times == 1.25


def test_a_sample_that_waits_for_a_row_is_not_late_while_others_of_its_request_run() -> None:
    server = Server(rows=2)
    server.add(changed(_request("samples", 100, deadline_s=60.0), followers=_followers("s", 5)))
    server.turns(3)
    assert len(server.scheduler._waiting) == 4
    server.now += 1000.0
    server.turns(500)
    assert [delta.finish_reason for ends in server.loop.ends.values() for delta in ends] == 6 * ["length"]
