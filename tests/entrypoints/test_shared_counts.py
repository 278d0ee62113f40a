"""Quotas that several processes count together are those that one would count."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from entrypoints.server import counts
from entrypoints.server.counts import OwnCounts, SharedMemory
from entrypoints.server.quotas import Quotas, RateLimitedError

MOVES = st.tuples(st.integers(0, 2), st.sampled_from(["ask", "ask", "ask", "end", "wait", "set"]), st.integers(1, 400))

COUNTER = """
import sys, time
from entrypoints.server.counts import SharedMemory
from entrypoints.server.quotas import Quotas

quotas = Quotas(time.monotonic, SharedMemory(int(sys.argv[1]), int(sys.argv[2])).of("app"))
quotas.set(None, 1, None)
for _ in range(2000):
    quotas.hold()
    quotas.use(1)
sys.stdin.read()
"""


def refused(quotas: Quotas) -> str | None:
    try:
        quotas.begin()
    except RateLimitedError as error:
        return str(error)
    return None


@given(st.lists(MOVES, max_size=60))
def test_three_that_share_are_one(moves: list[tuple[int, str, int]]) -> None:
    """Clocks are one, as a machine's is; each reads a changed file for itself."""
    now, descriptor = 50.0, SharedMemory.create()
    try:
        shared = [Quotas(lambda: now, SharedMemory(descriptor, place).of("app")) for place in range(3)]
        other = Quotas(lambda: now, SharedMemory(descriptor, 0).of("other"))
        other.set(1, 1, 1)
        alone, running = Quotas(lambda: now, OwnCounts()), [0, 0, 0]
        for quotas in (*shared, alone):
            quotas.set(60, 300, 4)
        for place, move, amount in moves:
            if move == "wait":
                now += amount / 50
            elif move == "set":
                for quotas in (*shared, alone):
                    quotas.set(amount, None if amount % 5 == 0 else 2 * amount, 1 + amount % 6)
            elif move == "end" and running[place]:
                running[place] -= 1
                for quotas in (shared[place], alone):
                    quotas.end()
                    quotas.use(amount)
            elif move == "ask":
                answer = refused(shared[place])
                assert answer == refused(alone)
                running[place] += answer is None
            assert [quotas.running for quotas in shared] == running
            assert all(quotas.shown() == alone.shown() for quotas in shared)
        assert other.shown()["requests"].remaining == 1
    finally:
        os.close(descriptor)


def test_processes_that_count_at_once_lose_nothing_and_one_that_comes_after_another_begins_with_nothing() -> None:
    descriptor = SharedMemory.create()
    try:
        command = [sys.executable, "-c", COUNTER, str(descriptor)]
        processes = [
            subprocess.Popen([*command, str(place)], stdin=subprocess.PIPE, pass_fds=(descriptor,), cwd=Path.cwd())
            for place in range(2)
        ]
        for each in processes:
            each.communicate(timeout=60)
            assert each.returncode == 0
        last = Quotas(time.monotonic, SharedMemory(descriptor, 2).of("app"))
        last.set(None, 1, 4000)
        # One comes again each minute, and one was there from the beginning.
        assert 3980 * 60 < last.shown()["tokens"].reset_s <= 4000 * 60
        last.set(None, None, 4000)
        assert str(refused(last)) == "4000 requests of this key are running, of 4000"
        SharedMemory(descriptor, 1)  # another process in the place of one that is gone
        last.set(None, None, 2001)
        assert refused(last) is None and "2001 requests" in str(refused(last))
    finally:
        os.close(descriptor)


def test_names_that_are_too_many_are_told_and_others_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "_SLOTS", 4)
    descriptor = SharedMemory.create()
    try:
        memory = SharedMemory(descriptor, 0)
        for number in range(4):
            memory.of(str(number)).own = number
        with pytest.raises(ConfigError, match="4 names have come and gone"):
            memory.of("another")
        assert [SharedMemory(descriptor, 1).of(str(number)).of_all for number in range(4)] == [0, 1, 2, 3]
    finally:
        os.close(descriptor)
