"""Cores that die, and others that follow them."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from core_fakes import request
from test_replicated_client import Seen, counted, pids, replicas

from engine.core.begun import Begun
from engine.core.client import ProcessClient
from engine.errors import CoreDiedError
from engine.replicas import following, restarts
from engine.replicas.replica import Replica
from engine.replicas.restarts import Restarts

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("size", [1, 2])
def test_cores_that_die_are_followed_by_others_and_no_token_is_lost_or_comes_twice(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All die twice, and one that starts does; requests come meanwhile, too."""
    monkeypatch.setattr(restarts, "MOST_WAIT_S", 0.1)
    with replicas("SlowlyCounting", size, 8) as client:
        seen, names = Seen(), {f"r{index}" for index in range(12)}
        for index in range(8):
            client.send(request(f"r{index}", max_tokens=40, prompt_len=20 + index))
        for death, wanted in enumerate((24, 80)):
            while sum(map(len, seen.tokens.values())) < wanted:
                seen.see(client.recv())
            victims = set(pids(client))
            for pid in pids(client).values():
                os.kill(pid, signal.SIGKILL)
            while victims & pids(client).keys():
                seen.see(client.recv())
            assert size == 2 or client.is_restarting, "of two the next one may serve already"
            client.send(request(f"r{8 + death}", max_tokens=40, prompt_len=28 + death))
            if not death:
                while not client._starting:
                    time.sleep(0.001)
                next(iter(client._starting.values())).abandon()  # it dies while it starts
        for index in (10, 11):
            client.send(request(f"r{index}", max_tokens=40, prompt_len=20 + index))
        seen.until_ended(client, names)
        assert set(seen.ended.values()) == {"length"}
        assert {name: len(tokens) for name, tokens in seen.tokens.items()} == dict.fromkeys(names, 40)
        assert all(seen.tokens[f"r{index}"] == counted(20 + index, 40) for index in range(8))
        while len(client.replicas) < size:
            time.sleep(0.01)
            with suppress(TimeoutError):
                asyncio.run(asyncio.wait_for(client.recv_async(), 0.1))
        assert client.stalled() is None


def test_one_that_dies_while_another_drains_is_followed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the one that drained goes: as many are left as were asked for."""
    monkeypatch.setattr(restarts, "MOST_WAIT_S", 0.1)
    with replicas("SlowlyCounting", 3, 4) as client:
        names = {f"r{index}" for index in range(6)}
        for name in names:
            client.send(request(name, max_tokens=600, prompt_len=20))
        removal = threading.Thread(target=client.remove_replica, args=(0,))
        removal.start()
        while not client._fleet.replicas[0].draining:
            time.sleep(0.001)
        os.kill(pids(client)[1], signal.SIGKILL)
        seen = Seen()
        while client.replicas != [0, 2, 3]:
            seen.see(client.recv())
        assert removal.is_alive()
        seen.until_ended(client, names)
        removal.join()
        assert client.replicas == [2, 3]
        time.sleep(0.3)
        assert client.replicas == [2, 3] and not client._following


def test_who_finds_that_nobody_is_missing_leaves_no_suspect_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer were asked for while it waited to follow one that died."""
    with replicas(size=1, core_restarts=2) as client:
        asked: list[bool] = []
        monkeypatch.setattr(client._fleet, "nobody_comes", lambda: asked.append(True))
        assert client._try_to_follow() is None and asked


def test_after_too_many_deaths_the_engine_ends_with_the_cause() -> None:
    with replicas(size=1, core_restarts=1) as client:
        for death in range(2):
            while not client.replicas:
                client.recv()
            os.kill(next(iter(pids(client).values())), signal.SIGKILL)
            client.send(request(f"r{death}", max_tokens=5))
            if not death:
                client.recv()
        with pytest.raises(CoreDiedError, match="SIGKILL"):
            for _ in range(10):
                client.recv()
        with pytest.raises(CoreDiedError, match="SIGKILL"):
            client.send(request("r"))


@contextmanager
def at_once(pid: int) -> Iterator[None]:
    """All that is sent to a core meanwhile comes before its next step."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_who_only_waited_for_a_row_is_tried_for_no_death(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eight run when a core dies in its first step, and twenty wait: only those eight can have killed it."""
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    with replicas("NeverEndsAStepAtFirst", 1, 4) as client:
        names, add = [f"r{index}" for index in range(28)], client._fleet.add

        def added(replica: Replica[ProcessClient]) -> None:
            with at_once(replica.client.pid):
                add(replica)

        monkeypatch.setattr(client._fleet, "add", added)
        with at_once(next(iter(pids(client).values()))):
            for index, name in enumerate(names):
                client.send(request(name, max_tokens=1, prompt_len=5 + index))
        seen, suspects = Seen(), client._fleet._suspects
        for _ in range(2):
            while not all(Begun(client._clients[0].socket_directory).has_any([f"r{index}"]) for index in range(8)):
                time.sleep(0.01)
            [victim] = pids(client).values()
            os.kill(victim, signal.SIGKILL)
            while victim in pids(client).values() or not client.replicas:
                seen.see(client.recv())
        assert not seen.tokens and suspects._on_trial == "r0"
        assert list(suspects._waiting) == [f"r{index}" for index in range(1, 8)]
        seen.until_ended(client, set(names))
        assert seen.tokens == {name: counted(5 + index, 1) for index, name in enumerate(names)}


def test_a_core_that_hangs_in_its_start_is_killed_and_another_one_follows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    with replicas("HangsInItsSecondStart", 1, 4) as client:
        assert client._start_s is not None
        monkeypatch.setattr(following, "LEAST_START_S", 2 * client._start_s + 5.0)
        monkeypatch.setattr(following, "STARTS", 0)
        client.send(request("r", max_tokens=1000))
        seen = Seen()
        while not seen.tokens:
            seen.see(client.recv())
        os.kill(next(iter(pids(client).values())), signal.SIGKILL)
        seen.until_ended(client, {"r"})
        assert seen.tokens["r"] == counted(5, 1000) and "hangs in its start" in caplog.text
    assert len((tmp_path / "starts").read_text().splitlines()) == 3


def test_what_is_missing_after_too_many_deaths_comes_when_they_do_not_count_any_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(following, "WINDOW_S", 1.0)
    with replicas("Counting", 3, 1) as client:
        for number in (0, 1):
            os.kill(pids(client)[number], signal.SIGKILL)
            while number in client.replicas:
                client.recv()
        assert "too many cores have died" in caplog.text
        while len(client.replicas) < 3:
            with suppress(TimeoutError):
                asyncio.run(asyncio.wait_for(client.recv_async(), 0.1))


def test_those_that_wait_for_a_core_for_too_long_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "MOST_WAIT_S", 0.1)
    with replicas("SlowlyCounting", 1, 4) as client:
        begun = msgspec.structs.replace(request("begun", max_tokens=40), wait_s=0.5)
        client.send(begun)
        seen = Seen()
        while not seen.tokens:
            seen.see(client.recv())
        with client._changing:  # nobody starts
            os.kill(next(iter(pids(client).values())), signal.SIGKILL)
            while client.replicas:
                seen.see(client.recv())
            client.send(msgspec.structs.replace(request("waits"), wait_s=0.5))
            while "waits" not in seen.ended:
                seen.see(client.recv())
        assert seen.ended["waits"] == "error"
        seen.until_ended(client, {"begun"})
        assert seen.tokens["begun"] == counted(5, 40)


def test_an_engine_is_closed_while_a_core_starts_in_the_place_of_one_that_died() -> None:
    for waits in (False, True):
        with replicas(size=1, core_restarts=4) as client:
            if waits:  # for the next start
                client._restarts.died(time.monotonic())
            os.kill(next(iter(pids(client).values())), signal.SIGKILL)
            while client.replicas:
                client.recv()
            if not waits:
                while not client._starting:
                    time.sleep(0.001)


def test_deaths_are_followed_sooner_or_later() -> None:
    policy = Restarts(4)
    assert [policy.died(now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)] == [0.0, 1.0, 2.0, 4.0, None]
    assert policy.died(603.5) == 16.0, "all but one are forgotten, but it is the sixth in a row"
    assert [policy.died(604.0, True), policy.died(605.0)] == [0.0, 0.0]
    assert [policy.died(86_400.0 * day) for day in range(1, 5)] == [0.0] * 4, "one a day is not a row"


def test_starts_that_fail_are_not_followed_for_ever_however_long_they_take() -> None:
    policy = Restarts(2)
    assert [policy.did_not_start(700.0 * number) for number in range(1, 6)] == [0.0, 0.0, None, 0.0, 0.0]
    policy.started()
    assert [policy.did_not_start(700.0 * number) for number in range(6, 9)] == [0.0, 0.0, None]
    assert policy.died(5_600.5, has_served=True) == 0.0
    policy = Restarts(2)
    assert policy.died(0.0, has_served=True) == 0.0
    assert [policy.did_not_start(now) for now in (1.0, 2.0, 700.0, 1_400.0)] == [0.0, None, 0.0, 0.0]
