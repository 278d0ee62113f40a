"""Turns: bounded, in the order of arrival and work, and given on by whoever leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from engine.errors import QueueFullError
from engine.frontend.turns import PATIENCE, Turns


def turns(size: int, longest_wait_s: float = 60.0) -> Turns:
    return Turns(size, longest_wait_s, "waited for too long")


def test_no_more_than_its_size_at_a_time_and_whoever_waits_comes_in_order() -> None:
    async def body() -> None:
        two, inside, most, order = turns(2), 0, 0, list[int]()

        async def one(number: int) -> None:
            nonlocal inside, most
            async with two.of():
                inside += 1
                most = max(most, inside)
                order.append(number)
                await asyncio.sleep(0.001)
                inside -= 1

        await asyncio.gather(*(one(number) for number in range(9)))
        assert (most, order, two.free, two.waiting) == (2, list(range(9)), 2, 0)

    asyncio.run(body())


def test_little_work_goes_before_much_that_came_first_and_much_is_not_put_off_for_ever() -> None:
    async def body() -> None:
        one, order = turns(1), list[str]()

        async def work(name: str, work_s: float) -> None:
            async with one.of(work_s):
                order.append(name)

        await one.take(0.0)
        waiting = [asyncio.create_task(work(f"long {i}", 0.5 / PATIENCE)) for i in range(3)]
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(work("short", 0.0)))
        await asyncio.sleep(0.6)
        waiting.append(asyncio.create_task(work("late", 0.0)))
        await asyncio.sleep(0)
        one.give()
        await asyncio.gather(*waiting)
        assert order == ["short", "long 0", "long 1", "long 2", "late"]

    asyncio.run(body())


def test_who_leaves_or_fails_keeps_no_turn() -> None:
    async def body() -> None:
        one = turns(1)

        async def fail() -> None:
            async with one.of():
                raise KeyError

        async def hold() -> None:
            async with one.of():
                await asyncio.sleep(60)

        with pytest.raises(KeyError):
            await fail()
        holder = asyncio.create_task(hold())
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(hold()) for _ in range(5)]
        await asyncio.sleep(0)
        assert one.waiting == 5
        one_more: Coroutine[None, None, None] = one.take(0.0)
        told = asyncio.create_task(one_more)
        await asyncio.sleep(0)
        for task in waiting[1:]:
            task.cancel()
        holder.cancel()  # the turn goes to the first that waits ...
        await asyncio.sleep(0)
        waiting[0].cancel()  # ... who leaves in the same moment
        await asyncio.gather(holder, *waiting, return_exceptions=True)
        await asyncio.wait_for(told, 10)
        one.give()
        assert (one.free, one.waiting) == (1, 0)

    asyncio.run(body())


def test_who_has_waited_for_too_long_is_refused() -> None:
    async def body() -> None:
        one = turns(1, longest_wait_s=0.01)
        await one.take(0.0)
        with pytest.raises(QueueFullError, match="waited for too long"):
            await one.take(0.0)
        one.give()
        await one.take(0.0)
        assert (one.free, one.waiting) == (0, 0)

    asyncio.run(body())
