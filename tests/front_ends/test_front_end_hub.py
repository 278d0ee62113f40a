"""Front ends of one hub over real sockets: each gets its own sequences' tokens, and nothing of another's."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import pytest
from core_fakes import request
from hub_fakes import together
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.wire import (
    AbortRequests,
    AddRequest,
    Follower,
    ResetPrefixCache,
    SequenceDelta,
    StepTaken,
    TokenDeltas,
    Vocabulary,
)
from engine.errors import ConfigError, CoreDiedError, QueueFullError
from engine.front_ends import client as client_module
from engine.front_ends import hub as hub_module
from engine.front_ends.wire import Order


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(200):
            await main()

    asyncio.run(bounded())


def added(name: str, n: int = 1) -> AddRequest:
    message = request(name)
    followers = [Follower(request_id=f"{name}:{i}", seed=i) for i in range(1, n)]
    return AddRequest(
        request_id=name,
        prompt_token_ids=message.prompt_token_ids,
        params=message.params,
        max_tokens=100,
        followers=followers,
    )


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.lists(st.sampled_from("rrrnttttttteea"), min_size=5, max_size=60))
def test_each_gets_its_own_tokens_and_ends(seed: int, events: list[str]) -> None:
    """Requests with several samples, tokens in common and single deltas, ends and aborts, by chance."""
    random, owners, wanted = Random(seed), dict[str, int](), defaultdict[str, list[int]](list)
    aborted, over = set[str](), set[str]()

    async def main() -> None:
        async with together(3) as all_of_them:
            for index, event in enumerate(events):
                running = sorted(owners.keys() - aborted - over)
                if event in "rn":
                    place, message = random.randrange(3), added(f"s{index}", 1 if event == "r" else 3)
                    owners.update(dict.fromkeys(message.request_ids, place))
                    all_of_them.clients[place].send(message)
                    await all_of_them.was_told(message)
                elif event == "t" and running:
                    chosen = random.sample(running, random.randrange(1, len(running) + 1))
                    tokens = [random.randrange(100) for _ in chosen]
                    for name, token in zip(chosen, tokens, strict=True):
                        wanted[name].append(token)
                    all_of_them.cores.say(
                        TokenDeltas(
                            request_ids=["nobody", *chosen, *aborted], token_ids=[1, *tokens, *(1 for _ in aborted)]
                        )
                    )
                elif event == "e" and running:
                    name = random.choice(running)
                    over.add(name)
                    wanted[name].append(5)
                    all_of_them.cores.say(SequenceDelta(request_id=name, token_ids=[5], finish_reason="length"))
                elif event == "a" and running:
                    name = random.choice(running)
                    # An answer to what was said before is here, so that it is clear what it had got.
                    await all_of_them.has_heard(owners[name], name, wanted[name])
                    aborted.add(name)
                    all_of_them.clients[owners[name]].send(AbortRequests(request_ids=[name, "unknown"]))
                    await all_of_them.was_told(AbortRequests(request_ids=[name]))
            for name, place in owners.items():
                await all_of_them.has_heard(place, name, wanted[name])
            for place in range(3):
                own = {name for name, owner in owners.items() if owner == place}
                assert {name for name, tokens in all_of_them.tokens(place).items() if tokens} <= own
                assert all_of_them.ended(place).keys() == own & over

    run(main)


def test_what_is_refused_is_told_to_whoever_asked_and_to_nobody_else() -> None:
    async def main() -> None:
        async with together(2) as both:
            both.cores.refuses = QueueFullError("too many", 7.5)
            both.clients[1].send(added("queue_full", n=2))
            await both.until(lambda: len(both.ended(1)) == 2)
            both.cores.refuses = CoreDiedError("gone")
            both.clients[1].send(added("fault", n=2))
            await both.until(lambda: len(both.ended(1)) == 4)
            both.cores.refuses = ValueError("odd")  # a mistake of ours is of one request, too
            both.clients[1].send(added("mistake"))
            await both.until(lambda: len(both.ended(1)) == 5)
            assert not both.ended(0) and both.ended(1)["mistake"].error_kind == "fault"
            for kind, why, after_s in (("queue_full", "too many", 7.5), ("fault", "gone", 1.0)):
                told = both.ended(1)[kind]
                assert (told.finish_reason, told.error_kind, told.error) == ("error", kind, why)
                assert told.retry_after_s == after_s
            both.cores.refuses = None
            both.cores.say(TokenDeltas(request_ids=["fault"], token_ids=[1]))  # nobody waits for it any more
            both.clients[0].send(ResetPrefixCache())
            await both.until(lambda: ResetPrefixCache() in both.cores.told)
            assert not both.tokens(1)["fault"]

    run(main)


def test_what_one_had_that_has_gone_is_aborted_and_what_it_says_then_is_nobodys() -> None:
    async def main() -> None:
        async with together(2) as both:
            both.clients[0].send(added("a", n=2))
            both.clients[1].send(added("b"))
            await both.until(lambda: len(both.cores.told) == 2)
            both.hub.lost(1)
            assert both.cores.told[2:] == [AbortRequests(request_ids=["a", "a:1"])]
            both.clients[0].send(added("late"))
            both.cores.say(TokenDeltas(request_ids=["a", "b"], token_ids=[3, 4]))
            await both.until(lambda: both.tokens(1)["b"] == [4])
            assert not both.tokens(0) and len(both.cores.told) == 3
            assert (await both.clients[1].ask("none")).texts == [b""]  # and nobody waits for its answers

    run(main)


def test_all_are_asked_and_steps_are_told_to_one() -> None:
    async def main() -> None:
        async with together(3) as three:
            for place, client in enumerate(three.clients):
                client.answers["place"] = str(place).encode
            assert sorted((await three.clients[1].ask("place")).texts) == [b"0", b"1", b"2"]
            for number in range(5):
                three.cores.say(step=StepTaken(0.5, 8), generated=number)
            await three.until(lambda: sum(each.step is not None for each in three.got[0]) == 5)
            # Who had nothing to hear learns what is counted, but for a moment.
            await three.until(lambda: all(got[-1].stats.generated_tokens == 4 for got in three.got))
            assert not any(each.step for got in three.got[1:] for each in got)

    run(main)


def test_a_vocabulary_is_told_once() -> None:
    """All have the same, and taking it in takes a core long."""

    async def main() -> None:
        async with together(2) as both:
            for client in both.clients:
                client.send(Vocabulary(tokenizer="{}", eos_token_ids=[2]))
                client.send(ResetPrefixCache())
            await both.until(lambda: both.cores.told.count(ResetPrefixCache()) == 2)
            assert sum(isinstance(each, Vocabulary) for each in both.cores.told) == 1

    run(main)


def test_all_learn_of_a_stall_and_of_the_end() -> None:
    async def main() -> None:
        async with together(2) as both:
            both.cores.why_stalled = "it hangs"
            await both.until(lambda: [client.stalled() for client in both.clients] == ["it hangs"] * 2)
            both.cores.says.put_nowait(CoreDiedError("killed"))
            await both.until(lambda: both.died == ["killed"] * 2)
            assert str(await both.running) == "killed"
            for client in both.clients:
                with pytest.raises(CoreDiedError, match="killed"):
                    client.send(added("x"))

    run(main)


def test_one_that_takes_nothing_any_more_is_given_up() -> None:
    async def main() -> None:
        async with together(2, frames=16) as both:
            stuck = list[int]()
            both.hub.on_stuck = stuck.append
            both._tasks[0].cancel()  # it does not receive
            with suppress(asyncio.CancelledError):
                await both._tasks[0]
            both.clients[0].send(added("a"))
            both.clients[1].send(added("b"))
            await both.until(lambda: len(both.cores.told) == 2)
            for number in range(3000):
                both.cores.say(SequenceDelta(request_id="a", token_ids=[7] * 2000))
                if number % 16 == 0:
                    await asyncio.sleep(0)
            both.cores.say(TokenDeltas(request_ids=["b"], token_ids=[9]))
            await both.until(lambda: bool(stuck) and both.tokens(1)["b"] == [9])
            assert set(stuck) == {1}

    run(main)


def test_what_fails_in_the_hub_itself_ends_all_and_says_so() -> None:
    async def main() -> None:
        async with together(2) as both:
            both.cores.says.put_nowait("no outputs")  # type: ignore[arg-type]
            await both.until(lambda: all(died is not None for died in both.died))
            assert all("AttributeError" in str(died) for died in both.died)
            with pytest.raises(AttributeError):
                await both.running

    run(main)


def test_orders_are_carried_out_one_by_one_and_too_many_are_refused() -> None:
    async def main() -> None:
        async with together(2) as both:
            begun, may_end = list[str](), threading.Event()

            def obey(order: Order) -> None:
                begun.append(order.what)
                may_end.wait(100)
                if order.replicas == 3:
                    raise ConfigError("three are too many")

            both.hub._obey = obey  # type: ignore[method-assign]
            waiting = [asyncio.create_task(asyncio.to_thread(both.clients[0].scale, 2 + at % 2)) for at in range(3)]
            await both.until(lambda: bool(begun) and len(both.hub._orders) == 3)
            both.hub._orders.update(asyncio.create_task(asyncio.sleep(0)) for _ in range(20))  # as if many waited
            with pytest.raises(ConfigError, match="wait already"):
                await asyncio.to_thread(both.clients[1].sleep)
            assert begun == ["scale"]
            may_end.set()
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert sorted(str(each) for each in ends) == ["None", "None", "three are too many"]

    run(main)


def test_whoever_waits_for_an_order_learns_that_nobody_carries_it_out_any_more() -> None:
    async def main() -> None:
        async with together(1) as one:
            may_end = threading.Event()
            one.hub._obey = lambda order: may_end.wait(100)  # type: ignore[method-assign,assignment]
            asleep = asyncio.create_task(asyncio.to_thread(one.clients[0].sleep))
            await one.until(lambda: bool(one.hub._orders))
            one.cores.says.put_nowait(CoreDiedError("killed"))
            with pytest.raises(CoreDiedError, match="killed"):
                await asleep
            may_end.set()

    run(main)


def test_one_that_does_not_answer_is_said_and_what_one_that_has_gone_has_said_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_module, "ANSWER_S", 60.0)
    monkeypatch.setattr(client_module, "ANSWER_S", 60.0)

    async def main() -> None:
        async with together(3) as three:
            for place, client in enumerate(three.clients):
                client.answers["count"] = str(place).encode
            assert len((await three.clients[0].ask("count")).texts) == 3
            three.hub.lost(3)
            told = await three.clients[0].ask("count")
            assert (sorted(told.texts), told.gone) == ([b"0", b"1"], [b"2"])
            three._tasks[1].cancel()  # it does not receive
            monkeypatch.setattr(hub_module, "ANSWER_S", 0.3)
            with pytest.raises(TimeoutError, match="1 front ends do not answer"):
                await three.clients[0].ask("count")

    run(main)
