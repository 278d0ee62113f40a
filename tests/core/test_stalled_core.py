"""A core that makes no progress is told as stalled long before it counts as dead; a start can be abandoned."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest
from core_fakes import request, tiny_config
from test_core_process import core, finish

from engine.core import liveness
from engine.core.client import ProcessClient
from engine.core.wire import AbortRequests
from engine.errors import CoreDiedError

pytestmark = pytest.mark.timeout(60)


def test_a_stopped_core_is_told_as_stalled_long_before_it_counts_as_dead_and_recovers(monkeypatch):
    monkeypatch.setattr(liveness, "STALL_S", 0.5)
    with core(heartbeat_s=0.1) as client:
        assert client.stalled() is None
        client.send(request("a", max_tokens=3900))
        client.recv()
        os.kill(client.pid, signal.SIGSTOP)
        receiver = threading.Thread(target=finish, args=(client, {"a"}))
        receiver.start()
        while (reason := client.stalled()) is None:
            time.sleep(0.01)
        assert reason == "it was stopped by a signal"
        os.kill(client.pid, signal.SIGCONT)
        while client.stalled() is not None:
            time.sleep(0.01)
        client.send(AbortRequests(request_ids=["a"]))
        receiver.join(60)
        assert not receiver.is_alive() and client.stalled() is None


def test_heartbeats_tell_how_long_steps_take():
    with core("Slow", heartbeat_s=0.05) as client:
        client.send(request("a", max_tokens=3))
        finish(client, {"a"})
        client.send(request("b", max_tokens=3))
        finish(client, {"b"})
        assert client._liveness._steps >= 3 and client._liveness._step_s >= 0.5


@pytest.mark.parametrize("executor", ["LoadingForEver", "FakeExecutor"])
def test_a_start_that_is_abandoned_ends_and_leaves_nothing(executor):
    client = ProcessClient(tiny_config(), executor=f"core_fakes:{executor}")
    errors: list[BaseException] = []

    def start() -> None:
        try:
            client.start()
            while True:
                client.recv()
        except CoreDiedError as error:
            errors.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    while not hasattr(client, "_liveness"):
        time.sleep(0.01)
    client.abandon()
    starter.join(60)
    client.close()
    assert errors and not psutil.pid_exists(client.pid) and not os.path.exists(client.socket_directory)
    before = ProcessClient(tiny_config(), executor="core_fakes:FakeExecutor")
    before.abandon()
    with pytest.raises(CoreDiedError, match="abandoned"):
        before.start()
