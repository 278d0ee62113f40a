"""Real core processes behind one client, under a fake device: what goes where, and what happens when one goes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import psutil
import pytest
from core_fakes import request, tiny_config

from engine.config import EngineConfig
from engine.core.client import ProcessClient
from engine.core.wire import AbortRequests, CoreReady, StepOutputs, each_delta
from engine.errors import ConfigError, CoreDiedError
from engine.kv_settings import KVEventsConfig, KVTransferConfig
from engine.parallel_config import ParallelConfig
from engine.replicas import stop_watch as room
from engine.replicas.client import ReplicatedClient

pytestmark = pytest.mark.timeout(120)


@contextmanager
def replicas(executor: str = "Counting", size: int = 2, core_restarts: int = 0) -> Iterator[ReplicatedClient]:
    """Started; afterwards nothing of it is left: processes, threads, sockets' directories."""
    threads, made = set(threading.enumerate()), list[ProcessClient]()

    def make(config: EngineConfig, cpus: Sequence[int] | None, group_fd: int | None) -> ProcessClient:
        made.append(ProcessClient(config, executor=f"replica_fakes:{executor}", cpus=cpus))
        return made[-1]

    config = msgspec.structs.replace(tiny_config(), parallel=ParallelConfig(data=size))
    cache = msgspec.structs.replace(config.cache, kv_cache_memory=2 << 20)
    client = ReplicatedClient(msgspec.structs.replace(config, cache=cache, core_restarts=core_restarts), make)
    try:
        client.start()
        yield client
    finally:
        client.close()
        client.close()
        made = [each for each in made if each._started]
        assert not any(psutil.pid_exists(each.pid) for each in made)
        assert not any(os.path.exists(each.socket_directory) for each in made)
        assert set(threading.enumerate()) <= threads


def pids(client: ReplicatedClient) -> dict[int, int]:
    return {replica.number: replica.client.pid for replica in client._fleet.replicas}


def holder(client: ReplicatedClient, name: str) -> int:
    number = client._fleet._deliveries.replica_of(name)
    assert number is not None
    return number


class Seen:
    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    def see(self, outputs: StepOutputs) -> None:
        for delta in each_delta(outputs.deltas):
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                assert delta.request_id not in self.ended
                self.ended[delta.request_id] = delta.finish_reason

    def until_ended(self, client: ReplicatedClient, names: set[str]) -> None:
        while names - self.ended.keys():
            self.see(client.recv())


def counted(prompt: int, count: int) -> list[int]:
    return [10 + (prompt + index) % 80 for index in range(count)]


def test_replicas_whose_ports_there_are_not_are_refused_before_any_is_started_or_stopped() -> None:
    events = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:65533", replay_endpoint="tcp://*:5000")
    config = msgspec.structs.replace(tiny_config(), parallel=ParallelConfig(data=2), kv_events=events)
    client = ReplicatedClient(config)
    with pytest.raises(ConfigError, match=r"endpoint 'tcp://\*:65533': ports are 1 to 65535"):
        client.scale(4)
    with pytest.raises(CoreDiedError, match="not started"):
        client.scale(3)
    client.close()
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_producer", kv_port=65533)
    client = ReplicatedClient(msgspec.structs.replace(config, kv_events=None, kv_transfer=transfer))
    with pytest.raises(ConfigError, match="kv_port must be at most 65532"):
        client.scale(4)
    client.close()


def test_requests_are_spread_and_each_gets_its_tokens() -> None:
    with replicas() as client:
        names = {f"r{index}" for index in range(20)}
        for index in range(20):
            client.send(request(f"r{index}", max_tokens=6, prompt_len=20 + index))
        assert {holder(client, name) for name in names} == {0, 1}
        seen = Seen()
        seen.until_ended(client, names)
        assert all(seen.tokens[f"r{index}"] == counted(20 + index, 6) for index in range(20))


def test_on_an_event_loop() -> None:
    async def main(client: ReplicatedClient) -> None:
        seen = Seen()
        for index in range(8):
            client.send(request(f"r{index}", max_tokens=5, prompt_len=20))
        while len(seen.ended) < 8:
            seen.see(await client.recv_async())
        waiting = asyncio.ensure_future(client.recv_async())
        await asyncio.sleep(0.05)
        waiting.cancel()
        client.send(request("late", max_tokens=3))
        while "late" not in seen.ended:
            seen.see(await client.recv_async())
        assert seen.tokens["late"] == counted(5, 3)

    with replicas() as client:
        asyncio.run(main(client))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_replicas_requests_are_computed_by_the_others(signum: int) -> None:
    with replicas("SlowlyCounting") as client:
        names = {f"r{index}" for index in range(8)}
        for index in range(8):
            client.send(request(f"r{index}", max_tokens=20, prompt_len=20 + index))
        seen = Seen()
        while sum(map(len, seen.tokens.values())) < 24:
            seen.see(client.recv())
        victim = holder(client, "r3")
        os.kill(pids(client)[victim], signum)
        seen.until_ended(client, names)
        assert all(seen.tokens[f"r{index}"] == counted(20 + index, 20) for index in range(8))
        assert set(seen.ended.values()) == {"length"}
        assert client.replicas == [1 - victim]
        client.send(request("after"))
        seen.until_ended(client, {"after"})


def test_the_last_ones_death_is_the_engines() -> None:
    with replicas() as client:
        for pid in pids(client).values():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(CoreDiedError, match="SIGKILL"):
            for _ in range(3):
                client.recv()
        with pytest.raises(CoreDiedError, match="SIGKILL"):
            client.send(request("r"))


def test_replicas_come_and_go_while_requests_run() -> None:
    with replicas("SlowlyCounting") as client:
        seen, names = Seen(), set[str]()

        def receive() -> None:
            while len(seen.ended) < 40:
                seen.see(client.recv())

        receiver = threading.Thread(target=receive)
        receiver.start()
        for index in range(40):
            names.add(f"r{index}")
            client.send(request(f"r{index}", max_tokens=8, prompt_len=20 + index))
            if index == 10:
                assert client.add_replica() == 2
            if index == 20:
                client.remove_replica(0)
                assert client.replicas == [1, 2]
            if index == 30:
                client.remove_replica(1, drain_timeout_s=0.0)
        receiver.join()
        assert client.replicas == [2]
        assert all(seen.tokens[f"r{index}"] == counted(20 + index, 8) for index in range(40))
        assert set(seen.ended.values()) == {"length"}
        assert [replica.place for replica in client._fleet.replicas] == [2]
        assert (client.add_replica(), [replica.place for replica in client._fleet.replicas]) == (3, [2, 0])
        assert list(client.stats_of_each()) == [2, 0]  # as KV events and the log call them
        client.remove_replica(3)
        with pytest.raises(ConfigError, match="the only one"):
            client.remove_replica(2)
        with pytest.raises(ConfigError, match="there is no replica 7"):
            client.remove_replica(7)


def test_one_is_removed_while_nobody_receives() -> None:
    with replicas() as client:
        client.remove_replica(0)
        assert client.replicas == [1]


def test_an_aborted_request_says_nothing_more() -> None:
    with replicas("SlowlyCounting") as client:
        client.send(request("a", max_tokens=2000))
        client.send(request("b", max_tokens=20))
        seen = Seen()
        while len(seen.tokens) < 2:
            seen.see(client.recv())
        client.send(AbortRequests(request_ids=["a"]))
        before = len(seen.tokens["a"])
        seen.until_ended(client, {"b"})
        assert len(seen.tokens["a"]) == before


@pytest.mark.parametrize("other", ["Counting", "never_made"])  # which is there soon, or never
def test_a_start_that_fails_waits_for_nobody_and_leaves_nothing(other: str) -> None:
    made: list[ProcessClient] = []

    def make(config: EngineConfig, cpus: Sequence[int] | None, group_fd: int | None) -> ProcessClient:
        kind = "core_fakes:NotFitting" if made else f"replica_fakes:{other}"
        made.append(ProcessClient(config, executor=kind, cpus=cpus))
        return made[-1]

    client = ReplicatedClient(msgspec.structs.replace(tiny_config(), parallel=ParallelConfig(data=2)), make)
    with pytest.raises(ConfigError, match="9 GiB"):
        client.start()
    assert not any(psutil.pid_exists(each.pid) for each in made)


@pytest.mark.exhaustive  # it takes ten seconds to be sure
def test_a_stopped_replica_gets_nothing_more_and_all_stopped_are_told_of() -> None:
    with replicas("SlowlyCounting") as client:
        for index in range(8):
            client.send(request(f"r{index}", max_tokens=2000, prompt_len=20 + index))
        os.kill(pids(client)[0], signal.SIGSTOP)
        stalled = client._fleet.replicas[0].client.stalled
        until = time.monotonic() + 60
        while stalled() is None and time.monotonic() < until:
            client.recv()
        assert stalled() is not None and client.stalled() is None
        for index in range(8):
            client.send(request(f"s{index}", prompt_len=20 + index))
            assert holder(client, f"s{index}") == 1
        os.kill(pids(client)[1], signal.SIGSTOP)
        while client.stalled() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert client.stalled() is not None
        for pid in pids(client).values():
            os.kill(pid, signal.SIGCONT)


def test_a_replica_that_stays_stopped_is_told_of_and_is_lost_where_another_one_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(room, "ALONE_LOOKS", 5)
    with replicas("SlowlyCounting") as client:
        seen = Seen()
        for index in range(4):
            client.send(request(f"r{index}", max_tokens=12, prompt_len=20 + index))
        os.kill(pids(client)[0], signal.SIGSTOP)
        seen.until_ended(client, {f"r{index}" for index in range(4)})
        assert client.replicas == [1]
        warned = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
        assert len(warned) == 1 and "was stopped by a signal: others take over" in warned[0]
        os.kill(pids(client)[1], signal.SIGSTOP)  # the last one is the engine's own: it is not given up
        client.send(request("last", max_tokens=2))
        time.sleep(2.5)
        os.kill(pids(client)[1], signal.SIGCONT)
        seen.until_ended(client, {"last"})


def in_background(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """The thread that calls it, and what it raises."""
    raised: list[object] = []

    def run() -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_closing_ends_a_drain() -> None:
    with replicas("SlowlyCounting") as client:
        for index in range(6):
            client.send(request(f"r{index}", max_tokens=2000, prompt_len=20 + index))
        thread, raised = in_background(lambda: client.remove_replica(0))
        while not client._fleet.replicas[0].draining:
            time.sleep(0.01)
        client.close()
        thread.join()
        assert [type(error) for error in raised] == [CoreDiedError]


def test_closing_ends_the_start_of_another_one() -> None:
    with replicas() as client:
        make, placed, go = client._make_client, threading.Event(), threading.Event()

        def held(config: EngineConfig, cpus: Sequence[int] | None, group_fd: int | None) -> ProcessClient:
            made = make(config, cpus, group_fd)
            start = made.start

            def start_late() -> CoreReady:
                placed.set()
                go.wait()
                return start()

            made.start = start_late  # type: ignore[method-assign]
            return made

        client._make_client = held
        adding, raised = in_background(client.add_replica)
        placed.wait()
        closing, failed = in_background(client.close)
        while not client._closed:
            time.sleep(0.01)
        go.set()
        adding.join()
        closing.join()
        assert [type(error) for error in raised] == [CoreDiedError] and not failed
        assert client.replicas == [0, 1]


def test_a_drained_one_serves_again_when_it_is_the_last() -> None:
    with replicas("SlowlyCounting") as client:
        names = {f"r{index}" for index in range(6)}
        for index in range(6):
            client.send(request(f"r{index}", max_tokens=60, prompt_len=20 + index))
        assert {holder(client, name) for name in names} == {0, 1}
        thread, raised = in_background(lambda: client.remove_replica(0))
        while not client._fleet.replicas[0].draining:
            time.sleep(0.01)
        os.kill(pids(client)[1], signal.SIGKILL)
        seen = Seen()
        seen.until_ended(client, names)
        thread.join()
        assert [type(error) for error in raised] == [ConfigError]
        assert set(seen.ended.values()) == {"length"}
        client.send(request("after"))
        seen.until_ended(client, {"after"})
