"""Random lives of a fleet: requests, aborts, replicas that come, go and die. Every sequence gets exactly its tokens."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from fleet_life import READY, Life, added
from hypothesis import example, given, settings
from hypothesis import strategies as st
from replica_fakes import LittleCore, tokens_of

from engine.core.wire import (
    AbortRequests,
    AddRequest,
    BeamParams,
    CoreStats,
    Delta,
    Follower,
    Resumed,
    SequenceDelta,
    StepOutputs,
    TokenDeltas,
    UnpinPrefix,
    Vocabulary,
    Wake,
    each_delta,
)
from engine.errors import CoreDiedError, EngineError, QueueFullError
from engine.replicas.deliveries import STEPS, Deliveries
from engine.replicas.fleet import Fleet
from engine.replicas.replica import Replica
from engine.replicas.router import Router
from engine.speculation_config import SpeculationConfig
from engine.step import RowParams, TokenLogprobs


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from("rrrrnttttttaklc"), max_size=60), st.booleans(), st.booleans())
@example(seed=0, events=list("rktktca"), is_small=False, followed=True)
def test_every_sequence_gets_exactly_its_tokens(seed: int, events: list[str], is_small: bool, followed: bool) -> None:
    life = Life(seed, capacity=6 if is_small else 10**6, followed=followed)
    for index, event in enumerate(events):
        match event:
            case "r":
                life.request(f"r{index}", 1)
            case "n":
                life.request(f"n{index}", life.random.randrange(2, 4))
            case "t":
                life.turn()
            case "a":
                life.abort()
            case "k":
                life.lose(leave=False)
            case "l":
                life.lose(leave=True)
            case "c":
                life.come()
    life.finish()
    for name, count in life.wanted.items():
        if name in life.aborted:
            assert life.got[name] == tokens_of(name, count)[: len(life.got[name])]
        elif life.ended[name].finish_reason == "error":  # where nobody had room
            if life.ended[name].error_kind == "queue_full":
                assert is_small
            else:
                assert followed and "each time that it computed this request" in str(life.ended[name].error)
        else:
            assert life.got[name] == tokens_of(name, count)
    life.check_nothing_is_left()


def test_what_is_taken_over_goes_on_behind_what_was_delivered() -> None:
    """Of a request with three samples, one of which has ended: two are left, with their own seeds and tokens."""
    life = Life(1)
    message = added("a", [1, 2, 3], 40, n=3)
    message = msgspec.structs.replace(message, params=RowParams(seed=5, prompt_logprobs=1), wait_s=3.0)
    life.fleet.send(message)
    holder = next(each for each in life.fleet.replicas if each.client.running)
    logprobs = [TokenLogprobs([1], [-0.5], 1)] * 2
    deltas: list[Delta] = [
        SequenceDelta(request_id="a", token_ids=[7], prompt_logprobs=logprobs, started_at=1.0, cached_tokens=16),
        TokenDeltas(request_ids=["a-1", "a-2"], token_ids=[8, 9]),
        SequenceDelta(request_id="a-1", token_ids=[10, 11]),
        SequenceDelta(request_id="a", token_ids=[2], finish_reason="stop"),
    ]
    told = life.fleet.take_in(holder, StepOutputs(deltas=deltas, stats=CoreStats()))
    assert told.deltas == deltas
    holder.client.dead = True
    for other in life.fleet.replicas:
        other.client.running.clear()
        other.client.send = other.client.messages.append  # type: ignore[method-assign]
    life.fleet.lost(holder, CoreDiedError("killed"))
    [other] = life.fleet.replicas
    assert other.client.messages == [
        msgspec.structs.replace(
            message,
            request_id="a-1",
            params=RowParams(seed=1),
            followers=[Follower(request_id="a-2", seed=2)],
            wait_s=None,
            accepted=True,
            begun=True,
            resumed=[Resumed([8, 10, 11]), Resumed([9])],
        )
    ]
    late = [TokenDeltas(request_ids=["a-1", "a-2"], token_ids=[99, 99])]
    assert life.fleet._deliveries.take_in(holder.number, late).deltas == []
    again = [SequenceDelta(request_id="a-2", token_ids=[12], started_at=2.0, cached_tokens=32)]
    found = life.fleet.take_in(other, StepOutputs(deltas=again, stats=CoreStats())).deltas
    assert found == again, "nobody had told when it started"


def test_a_request_has_got_on_when_each_of_its_sequences_that_had_begun_has() -> None:
    """One that kills stands still at its token, while others of its samples go on, and others wait for a row."""
    deliveries = Deliveries(SpeculationConfig())
    deliveries.add(added("a", [1, 2, 3], 40, n=3), 0)
    first, second = (TokenDeltas(request_ids=[name], token_ids=[1]) for name in ("a", "a-1"))
    assert not deliveries.got_on("a")
    deliveries.take_in(0, [first])
    assert deliveries.got_on("a") and not deliveries.well_on("a")
    deliveries.take_in(0, [second])
    deliveries.move("a", 1)
    assert not deliveries.got_on("a")
    for _ in range(STEPS):
        deliveries.take_in(1, [first])
    assert not deliveries.got_on("a") and not deliveries.well_on("a")
    for _ in range(STEPS):
        assert not deliveries.well_on("a")
        deliveries.take_in(1, [second])
        assert deliveries.got_on("a")
    assert deliveries.well_on("a")


def test_with_drafts_a_request_is_well_on_behind_as_many_tokens_more() -> None:
    for speculation, grammar, wanted in (
        (SpeculationConfig(method="ngram", num_speculative_tokens=3), None, 4 * STEPS),
        (SpeculationConfig(num_speculative_tokens=3), "g", 4 * STEPS),
        (SpeculationConfig(num_speculative_tokens=3), None, STEPS),
    ):
        deliveries = Deliveries(speculation)
        deliveries.add(msgspec.structs.replace(added("a", [1, 2, 3], 40), grammar=grammar), 0)
        tokens = 0
        while not deliveries.well_on("a"):
            deliveries.take_in(0, [TokenDeltas(request_ids=["a"], token_ids=[1])])
            tokens += 1
        assert tokens == wanted


def test_a_search_begins_again() -> None:
    message = msgspec.structs.replace(added("a", [1, 2, 3], 40, n=2), beams=BeamParams(width=3))
    deliveries = Deliveries(SpeculationConfig())
    deliveries.add(message, 0)
    assert deliveries.resumed("a") == msgspec.structs.replace(message, accepted=True)


def test_a_search_of_which_one_has_ended_is_over_with_the_others() -> None:
    """It begins again whole; of the sequences that are told of none is waited for that had ended."""
    life = Life(3)
    life.fleet.send(msgspec.structs.replace(added("a", [1, 2, 3], 40, n=2), beams=BeamParams(width=3)))
    life.fleet.send(AbortRequests(request_ids=["a"]))
    number = life.fleet._deliveries.replica_of("a-1")
    life.fleet.lost(next(each for each in life.fleet.replicas if each.number == number), CoreDiedError("gone"))
    life.fleet.send(AbortRequests(request_ids=["a-1"]))
    [last] = life.fleet.replicas
    assert life.fleet.is_idle(last.number)


def test_requests_wait_for_the_core_that_follows() -> None:
    life = Life(9, followed=True)
    life.request("a", 2)
    for replica in life.fleet.replicas:
        replica.client.dead = True
    life.request("b", 1)  # nobody has noticed
    life.turn()
    assert life.fleet.replicas == ()
    life.request("c", 1)
    life.abort()
    with pytest.raises(QueueFullError, match="max-waiting"):
        life.fleet.waiting.most = 1
        life.fleet.send(added("d", [1], 5))
    life.finish()
    assert len(life.ended) + len(life.aborted) == 4
    life.check_nothing_is_left()


def test_suspects_that_wait_for_their_trial_may_be_aborted() -> None:
    life = Life(11, followed=True)
    for death in range(3):  # before there is a request, and twice with both
        life.see(life.fleet.lost(life.fleet.replicas[0], CoreDiedError("killed"), True))
        if death:
            life.come()
        else:
            life.request("a", 1)
            life.request("b", 1)
    assert len(life.fleet._suspects._waiting) == 1
    life.fleet.send(AbortRequests(request_ids=["a", "b"]))
    life.aborted |= {"a", "b"}
    life.check_nothing_is_left()


@pytest.mark.parametrize("goes", ["the court", "nobody"])
def test_suspects_are_computed_where_no_court_comes(goes: str) -> None:
    life = Life(12, followed=True)
    for death in range(3):  # before there is a request, and twice with all of them
        life.see(life.fleet.lost(life.fleet.replicas[0], CoreDiedError("killed"), True))
        for name in "abc" if not death else "":
            life.request(name, 2)
        if death == 1:
            life.come()
    assert sorted(life.fleet._suspects._waiting) == list("abc")
    if goes == "the court":
        life.come()
        life.come()
        court = life.fleet._court
        assert court is not None
        life.fleet.drain(court)
        court.leaving = True
    else:  # fewer are asked for meanwhile, and the others serve
        life.fleet._court = Replica(99, 99, LittleCore(life.random), READY)
        life.come()
        life.fleet._court = None
        life.fleet.nobody_comes()
    for _ in range(400):
        life.turn()
    assert len(life.ended) == 6 and all(each.finish_reason != "error" for each in life.ended.values())
    life.check_nothing_is_left()


@pytest.mark.parametrize("beside", [0, 1, 31])
def test_a_request_that_kills_cores_is_found_and_the_others_finish(beside: int) -> None:
    life = Life(10, followed=True)
    names = [f"r{index}" for index in range(beside)]
    sent = {name: life.request(name, 1) for name in [*names[: beside // 2], "poison", *names[beside // 2 :]]}
    deaths = 0
    for _ in range(2000):
        if not life.wanted.keys() - life.ended.keys():
            break
        if not life.fleet.replicas:
            life.come()
        for replica in life.fleet.replicas:
            if "poison" in replica.client.running:
                replica.client.dead = True
                deaths += 1
        life.turn()
    assert deaths == 3 == life.fleet._stats().core_deaths
    assert life.ended["poison"].error_kind == "fault" and "each time" in str(life.ended["poison"].error)
    assert all(life.got[name] == tokens_of(name, life.wanted[name]) for name in names)
    life.check_nothing_is_left()
    assert not life.fleet._suspects._deaths
    # Clients send again what ends with a 500: nobody computes it, whatever its name and seed.
    life.fleet.send(msgspec.structs.replace(sent["poison"], request_id="again", params=RowParams(seed=9)))
    (told,) = life.fleet.told
    (delta,) = each_delta(told.deltas)
    assert delta.request_id == "again" and delta.error_kind == "fault" and "each time" in str(delta.error)
    assert not any("again" in replica.client.running for replica in life.fleet.replicas)
    life.check_nothing_is_left()


def test_the_last_ones_death_is_raised() -> None:
    life = Life(2)
    first, second = life.fleet.replicas
    life.fleet.lost(first, CoreDiedError("one"))
    with pytest.raises(CoreDiedError, match="two"):
        life.fleet.lost(second, CoreDiedError("two"))


def test_what_concerns_all_reaches_all_and_those_that_come_later() -> None:
    life = Life(3)
    vocabulary = Vocabulary(tokenizer="{}", eos_token_ids=[2])
    life.fleet.send(vocabulary)
    pinned = added("p", [1] * 40, 1, pin="system")
    life.fleet.send(pinned)
    life.come()
    for replica in life.fleet.replicas:
        assert replica.client.messages == [vocabulary, pinned]
    life.wanted["p"], life.got["p"] = 1, []
    life.finish()
    assert life.got["p"] == tokens_of("p", 1)  # once, although three have computed it
    life.fleet.send(UnpinPrefix(name="system"))
    life.come()
    assert life.fleet.replicas[-1].client.messages == [vocabulary]


@pytest.mark.parametrize("others_have_it", [False, True])
def test_a_pin_is_made_again_when_the_replica_that_was_to_tell_of_it_is_lost(others_have_it: bool) -> None:
    life = Life(4)
    pinned = added("p", [1] * 40, 1, pin="system")
    life.fleet.send(pinned)
    life.wanted["p"], life.got["p"] = 1, []
    owner = life.fleet._deliveries.replica_of("p")
    replica = next(each for each in life.fleet.replicas if each.number == owner)
    others = [each for each in life.fleet.replicas if each is not replica]
    if others_have_it:
        for each in others:
            while each.client.running:
                life.see(life.fleet.take_in(each, each.client.turn()))
        assert not life.got["p"]  # another one was to tell
    life.see(life.fleet.lost(replica, CoreDiedError("killed")))
    for each in others:
        again = msgspec.structs.replace(pinned, accepted=True)
        assert each.client.messages[-3:] == [AbortRequests(request_ids=["p"]), UnpinPrefix(name="system"), again]
    life.finish()
    assert life.got["p"] == tokens_of("p", 1)
    life.check_nothing_is_left()


def test_counters_never_fall_and_gauges_are_of_those_that_are_left() -> None:
    life = Life(5)
    first, second = life.fleet.replicas
    stats = CoreStats(running=3, generated_tokens=100, accepted_at=[2, 1], core_parts_s={"plan": 1.0}, compiling=True)
    life.fleet.take_in(first, StepOutputs(deltas=[], stats=stats))
    both = life.fleet.take_in(second, StepOutputs(deltas=[], stats=CoreStats(running=1, accepted_at=[1]))).stats
    assert (both.running, both.generated_tokens, both.replicas, both.compiling) == (4, 100, 2, True)
    assert (both.accepted_at, both.core_parts_s) == ([3, 1], {"plan": 1.0})
    left = life.fleet.lost(first, CoreDiedError("killed")).stats
    assert (left.running, left.generated_tokens, left.replicas, left.compiling) == (1, 100, 1, False)
    assert (left.accepted_at, left.core_parts_s) == ([3, 1], {"plan": 1.0})


def test_no_request_is_lost_when_all_are_full() -> None:
    life = Life(6, capacity=1)
    life.request("a", 1)
    life.request("b", 1)
    with pytest.raises(QueueFullError):
        life.fleet.send(added("c", [1], 2))
    life.finish()
    life.check_nothing_is_left()


def test_a_stalled_replica_gets_nothing_while_another_makes_progress() -> None:
    life = Life(8)
    first, second = life.fleet.replicas
    first.client.is_stalled = True
    for index in range(6):
        life.fleet.send(added(f"r{index}", [index] * 40, 5))
    assert (len(first.client.running), len(second.client.running)) == (0, 6)
    second.client.is_stalled = True
    for index in range(6, 12):
        life.fleet.send(added(f"r{index}", [index] * 40, 5))
    assert len(first.client.running) == 6


def test_a_request_without_a_replica_is_refused() -> None:
    life = Life(7)
    for replica in life.fleet.replicas:
        life.fleet.drain(replica)
    with pytest.raises(EngineError, match="all are being removed"):
        life.fleet.send(added("a", [1], 2))


def test_replicas_in_rounds_are_woken_behind_every_request_and_end_with_the_first_that_is_lost() -> None:
    fleet: Fleet[LittleCore] = Fleet(Router(16), in_rounds=True)
    for number in range(3):
        fleet.add(Replica(number, number, LittleCore(Random(number)), READY))
    cores = [replica.client for replica in fleet.replicas]
    fleet.send(added("a", [1] * 20, 5))
    fleet.send(added("p", [2] * 40, 1, pin="kept"))
    with pytest.raises(QueueFullError):
        for core in cores:
            core._capacity = 0
        fleet.send(added("refused", [3], 5))
    for core in cores:
        assert [message.number for message in core.messages if isinstance(message, Wake)] == [1, 2]
        names = [message.request_id for message in core.messages if isinstance(message, AddRequest)]
        assert "p" in names and isinstance(core.messages[-1], Wake)
        if "a" in names:
            at = [getattr(message, "request_id", "") for message in core.messages].index("a")
            assert core.messages[at + 1] == Wake(number=1)
    with pytest.raises(CoreDiedError, match="it died"):
        fleet.lost(fleet.replicas[1], CoreDiedError("it died"))
