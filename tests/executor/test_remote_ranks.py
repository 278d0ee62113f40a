"""Ranks behind agents, as on other hosts: the same steps, every way to die, and nobody who does not know the secret."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from agent_processes import AgentProcesses, remote_executor
from core_fakes import tiny_config
from fake_ranks import FAKE_GROUP, group_config, told
from test_multiproc import nothing, open_descriptors, until
from test_ranks_that_compute import config_of

from engine.errors import ConfigError, EngineError
from engine.executor import connections
from engine.executor.connections import Listener, Purpose, connect
from engine.executor.multiproc import MultiprocExecutor
from engine.step import StepMasks, StepPlan

pytestmark = pytest.mark.timeout(180)


@contextmanager
def nothing_left(executor: MultiprocExecutor) -> Iterator[MultiprocExecutor]:
    """Afterwards no process, thread and descriptor."""
    gc.collect()  # what earlier tests have left
    affinity, descriptors = os.sched_getaffinity(0), open_descriptors()
    workers: list[int] = []
    try:
        yield executor
        workers = executor._workers.pids if executor._workers else []
    finally:
        executor.close()
        os.sched_setaffinity(0, affinity)
    until(lambda: not any(psutil.pid_exists(pid) for pid in workers))
    until(lambda: open_descriptors() == descriptors)
    assert not any(thread.name.startswith(("workers", "rank")) for thread in threading.enumerate())


def light(
    where: Path, places: AgentProcesses, ranks: int = 2, kind: str = "Light", timeout_s: float = 60.0
) -> MultiprocExecutor:
    """Ranks that need no torch, and share memory."""
    config = group_config(tiny_config(async_scheduling=False), ranks, where)
    parallel = msgspec.structs.replace(config.parallel, timeout_s=timeout_s)
    return remote_executor(
        msgspec.structs.replace(config, parallel=parallel), f"fake_ranks:{kind}", places, *FAKE_GROUP
    )


def summing(where: Path, cache_dir: Path, places: AgentProcesses, ranks: int = 2) -> MultiprocExecutor:
    """Ranks that really sum, over sockets where `places` are not here."""
    config = config_of(False, where, cache_dir)
    parallel = msgspec.structs.replace(config.parallel, tensor=ranks)
    return remote_executor(msgspec.structs.replace(config, parallel=parallel), "reducing_ranks:reducing", places)


def serve(executor: MultiprocExecutor, ranks: int, steps: range) -> None:
    for step in steps:
        executor.submit(StepPlan(step_id=step, masked=[0] * (step % 5 == 0)), nothing)
        if step % 5 == 0:
            executor.sample(StepMasks(step, np.ones((3, 100_000), dtype=np.int32)))
        expected = ranks * step + sum(range(ranks)) + ranks * 300_000 * (step % 5 == 0)
        assert executor.collect().token_ids == [expected]


@pytest.mark.parametrize(
    ("ranks", "here", "slow_s"),
    [
        pytest.param(2, False, 0.0, id="sockets"),
        pytest.param(3, False, 0.0, id="three", marks=pytest.mark.exhaustive),
        pytest.param(2, True, 0.0, id="memory", marks=pytest.mark.exhaustive),
        pytest.param(2, False, 0.002, id="slow network", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_behind_agents_compute_the_same_steps(
    ranks: int, here: bool, slow_s: float, tmp_path: Path, native_cache: Path
) -> None:
    with nothing_left(summing(tmp_path, native_cache, AgentProcesses(here, slow_s=slow_s), ranks)) as executor:
        executor.load()
        executor.warm_up()
        serve(executor, ranks, range(20))
        notes = [(tmp_path / f"rank-{rank}") for rank in range(ranks)]
        until(lambda: all(len(path.read_text().splitlines()) == 20 for path in notes))
        assert len({path.read_text() for path in notes}) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", ["worker", "agent"])
def test_whoever_sums_over_sockets_learns_why_another_rank_was_lost(
    victim: str, tmp_path: Path, native_cache: Path
) -> None:
    places = AgentProcesses()
    with nothing_left(summing(tmp_path, native_cache, places, ranks=3)) as executor:
        executor.load()
        serve(executor, 3, range(2))
        assert executor._workers is not None
        last = executor._workers.pids[1]
        os.kill(last, signal.SIGSTOP)
        killer = threading.Timer(0.1, os.kill, (last if victim == "worker" else places.pid(2), signal.SIGKILL))
        killer.start()
        executor.submit(StepPlan(step_id=2), nothing)
        words = {"worker": "died: killed by signal 9", "agent": "died: its host was lost: it closed its connection"}
        with pytest.raises(EngineError, match=rf"rank 2 \(process {last} on 127.0.0.1\) {words[victim]}"):
            executor.collect()
        killer.join()
        with pytest.raises(EngineError, match="rank 2 "):
            executor.submit(StepPlan(step_id=3), nothing)


@pytest.mark.parametrize(
    ("victim", "number", "words"),
    [
        ("worker", signal.SIGKILL, "died: killed by signal 9"),
        ("worker", signal.SIGSTOP, "was stopped by a signal while the others waited for it"),
        ("agent", signal.SIGKILL, "died: its host was lost: it closed its connection"),
    ],
)
def test_a_lost_rank_is_named_with_the_cause(victim: str, number: signal.Signals, words: str, tmp_path: Path) -> None:
    places = AgentProcesses(here=True)
    with nothing_left(light(tmp_path, places, ranks=3)) as executor:
        executor.load()
        executor.warm_up()
        assert executor._workers is not None
        last = executor._workers.pids[1]
        changed = threading.Event()
        executor.watch_compilation(changed.set)
        changed.clear()
        os.kill(last if victim == "worker" else places.pid(2), number)
        if number is signal.SIGSTOP:  # which is looked for while somebody waits
            executor.submit(StepPlan(step_id=0), nothing)
            with pytest.raises(EngineError, match=words):
                executor.collect()
        assert changed.wait(60), "an idle core learns of it, too"
        with pytest.raises(EngineError, match=rf"rank 2 \(process {last} on 127.0.0.1\) {words}"):
            executor.compile_state()


def test_errors_of_a_start_keep_their_kind(tmp_path: Path) -> None:
    with nothing_left(light(tmp_path, AgentProcesses(here=True), kind="OthersNotFitting")) as executor:
        with pytest.raises(ConfigError, match="the model needs 9 GiB"):
            executor.load()
        assert told(tmp_path, 1)


def test_a_driver_that_is_killed_leaves_no_rank_and_no_agent_behind(tmp_path: Path) -> None:
    config = msgspec.json.encode(group_config(tiny_config(async_scheduling=False), 2, tmp_path)).decode()
    code = f"import sys; sys.path[:] = {sys.path!r}; from agent_processes import drive; drive(sys.argv[1])"
    driver = subprocess.Popen([sys.executable, "-c", code, config], stdout=subprocess.PIPE)
    assert driver.stdout is not None and driver.stdout.readline() == b"loaded\n"
    below = psutil.Process(driver.pid).children(recursive=True)
    assert len(below) == 2
    driver.kill()
    driver.communicate()
    until(lambda: not any(process.is_running() for process in below))


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (["sh", "-c", "exec sleep 100"], r"ranks 1 did not join at 127.0.0.1, port \d+, within 0.5 s"),
        (["false"], "rank 1: its agent left with status 1"),
    ],
)
def test_a_rank_that_does_not_come_is_named(behind: list[str], words: str, tmp_path: Path) -> None:
    timeout_s = 0.5 if "0.5" in words else 60.0
    with (
        nothing_left(light(tmp_path, AgentProcesses(behind=behind), timeout_s=timeout_s)) as executor,
        pytest.raises(EngineError, match=words),
    ):
        executor.load()


def test_whoever_does_not_know_the_secret_is_dropped_and_holds_up_nobody() -> None:
    listener = Listener("127.0.0.1", b"secret")
    address = "127.0.0.1", listener.port
    with ExitStack() as held:
        held.callback(listener.close)
        for _ in range(70):
            held.enter_context(socket.create_connection(address))  # and says nothing
        held.enter_context(socket.create_connection(address)).sendall(b"GET / HTTP/1.1\r\n" * 20)
        with pytest.raises(EngineError, match="ended the handshake"):
            connect(address, b"guessed", Purpose("agent", 1), 5)
        stream = held.enter_context(connect(address, b"secret", Purpose("agent", 1), 5))
        joined = listener.next(60)
        assert joined is not None and joined.purpose == Purpose("agent", 1)
        assert listener.next(0.1) is None
        held.enter_context(joined.stream).sendall(b"x")
        assert stream.recv(1) == b"x"
    with pytest.raises(EngineError, match=r"no connection to 127\.0\.0\.1"):
        connect(address, b"secret", Purpose("agent", 1), 0)


def test_who_sends_a_byte_now_and_then_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.5)
    listener = Listener("127.0.0.1", b"secret")
    sent, hello = 0, b"plranks1" + bytes(32) + struct.pack("<H", 1000) + bytes(1000)
    with ExitStack() as held:
        held.callback(listener.close)
        stream = held.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
        with suppress(OSError):
            for sent in range(len(hello)):
                stream.sendall(hello[sent : sent + 1])
                time.sleep(0.02)
    assert sent < len(hello) - 1


def test_a_caller_does_not_believe_a_listener_that_does_not_know_the_secret() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        stream, _ = server.accept()
        with suppress(OSError), stream:
            stream.recv(1000)
            stream.sendall(bytes(64))
            stream.recv(1000)

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(EngineError, match="does not know the secret"):
        connect(server.getsockname(), b"secret", Purpose("frames", 1), 5)
    thread.join()
    server.close()


def may_have_networks() -> bool:
    if os.geteuid() or shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "-n", "ip", "link"], capture_output=True).returncode == 0


@pytest.mark.exhaustive
@pytest.mark.skipif(not may_have_networks(), reason="networks of their own are for root with iproute2")
def test_a_host_that_falls_silent_is_lost_with_its_rank(tmp_path: Path, native_cache: Path) -> None:
    """The rank lives in a network of its own, whose link goes down: nobody closes a connection."""
    name, near, far = f"pl{os.getpid()}", f"pln{os.getpid()}", f"plf{os.getpid()}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    with ExitStack() as held:
        ip("netns", "add", name)
        held.callback(ip, "netns", "del", name)
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        ip("addr", "add", "10.231.77.1/30", "dev", near)
        ip("link", "set", near, "up")
        ip("-n", name, "addr", "add", "10.231.77.2/30", "dev", far)
        ip("-n", name, "link", "set", far, "up")
        places = AgentProcesses(behind=["ip", "netns", "exec", name], host="10.231.77.1")
        executor = held.enter_context(nothing_left(summing(tmp_path, native_cache, places)))
        executor.load()
        serve(executor, 2, range(3))
        ip("-n", name, "link", "set", far, "down")
        executor.submit(StepPlan(step_id=3), nothing)
        with pytest.raises(EngineError, match=r"rank 1 \(process \d+ on 10.231.77.2\) died: its host was lost"):
            executor.collect()
