"""Two replicas of two ranks without a model; processes of theirs are killed and stopped, while requests run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import psutil
from core_fakes import request, tiny_config

from engine.child import is_stopped
from engine.config import EngineConfig
from engine.core.client import ProcessClient
from engine.core.wire import each_delta
from engine.parallel_config import ParallelConfig
from engine.replicas.client import ReplicatedClient

WAIT_S = 30.0
"""for anything; what takes so long hangs"""
MODES = ("kill core", "kill rank", "stop core", "stop rank")


def started(cache_dir: Path) -> ReplicatedClient:
    def make(config: EngineConfig, cpus: Sequence[int] | None, group_fd: int | None) -> ProcessClient:
        return ProcessClient(config, executor="fake_ranks:sampling_ranks", cpus=cpus)

    config = tiny_config(async_scheduling=False)
    client = ReplicatedClient(
        msgspec.structs.replace(
            config,
            parallel=ParallelConfig(tensor=2, data=2),
            compile=msgspec.structs.replace(config.compile, cache_dir=str(cache_dir)),
            # fake ranks say that they have a thousand bytes
            cache=msgspec.structs.replace(config.cache, kv_cache_memory=None),
        ),
        make,
    )
    client.start()
    return client


def until(condition: object) -> float:
    """Seconds that it took. Raises TimeoutError."""
    assert callable(condition)
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > WAIT_S:
            raise TimeoutError("it hangs")
        time.sleep(0.002)
    return time.monotonic() - began


class Chaos:
    def __init__(self, cache_dir: Path, seed: int) -> None:
        self.random = Random(seed)
        self.client = started(cache_dir)
        self.running: set[str] = set()
        self.tokens: dict[str, int] = {}
        self.reported_s: list[float] = []
        self._pids: set[int] = set()
        self._closing = False
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def round(self, index: int, mode: str) -> None:
        """Something happens to a process; all requests end all the same, and there are two replicas again."""
        names = {f"r{index}.{number}" for number in range(6)}
        self.running |= names
        for name in names:
            self.tokens[name] = 0
            self.client.send(request(name, max_tokens=30, prompt_len=10 + int(name[-1])))
        until(lambda: sum(self.tokens[name] for name in names) > 12)
        replica = self.random.choice(self.client._fleet.replicas)
        [rank] = psutil.Process(replica.client.pid).children()
        self._pids |= {replica.client.pid, rank.pid}
        victim = replica.client.pid if mode.endswith("core") else rank.pid
        os.kill(victim, signal.SIGKILL if mode.startswith("kill") else signal.SIGSTOP)
        if mode == "stop core":  # it may go on
            self.reported_s.append(until(lambda: replica.client.stalled() is not None))
            os.kill(victim, signal.SIGCONT)
        else:
            self.reported_s.append(until(lambda: replica.number not in self.client.replicas))
        until(lambda: not names & self.running)
        assert all(self.tokens[name] == 30 for name in names), "a token was lost, or came twice"
        self.client.scale(2)

    def close(self) -> int:
        """How many processes are left."""
        self._pids |= {replica.client.pid for replica in self.client._fleet.replicas}
        for replica in self.client._fleet.replicas:
            self._pids |= {child.pid for child in psutil.Process(replica.client.pid).children()}
        self._closing = True
        self.client.send(request("last", max_tokens=1))
        self._thread.join(WAIT_S)
        self.client.close()
        until(lambda: not any(psutil.pid_exists(pid) for pid in self._pids))
        return sum(psutil.pid_exists(pid) for pid in self._pids)

    def _receive(self) -> None:
        while not self._closing:
            for delta in each_delta(self.client.recv().deltas):
                self.tokens[delta.request_id] = self.tokens.get(delta.request_id, 0) + len(delta.token_ids)
                if delta.finish_reason is not None:
                    assert delta.finish_reason == "length", delta.error
                    self.running.discard(delta.request_id)


def kill_the_front_end(cache_dir: Path) -> float:
    """Seconds until nothing of it is left."""
    call = f"import sys; sys.path[:] = {sys.path!r}; from chaos import be_killed; be_killed({str(cache_dir)!r})"
    front = subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.PIPE)
    assert front.stdout is not None and front.stdout.readline() == b"ready\n"
    children = psutil.Process(front.pid).children(recursive=True)
    assert len([child for child in children if not is_stopped(child.pid)]) == 4
    front.kill()
    front.wait()
    front.stdout.close()
    return until(lambda: not any(runs(child) for child in children))


def runs(process: psutil.Process) -> bool:
    """One that has ended and is not reaped yet, by whoever inherited it, does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def be_killed(cache_dir: str) -> None:
    client = started(Path(cache_dir))
    client.send(request("r", max_tokens=4000))
    client.recv()
    print("ready", flush=True)
    time.sleep(3600)
