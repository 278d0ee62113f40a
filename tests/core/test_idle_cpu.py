"""Nothing in the core or its client spins or polls when there is nothing to do."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import psutil
import pytest
from core_fakes import request, tiny_config
from thread_cpu import assert_idle, mine, thread_ids

from engine.core.client import ProcessClient
from engine.core.wire import each_delta
from engine.errors import CoreDiedError


def test_a_core_that_has_served_and_its_client_use_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY")  # it hides compute threads that spin
    others = thread_ids()
    client = ProcessClient(tiny_config(), executor="idle_executor:Computing", heartbeat_s=0.05)

    def wait_for_death() -> None:
        with contextlib.suppress(CoreDiedError):
            client.recv()

    waiter = threading.Thread(target=wait_for_death)
    try:
        client.start()
        client.send(request("r", max_tokens=20))
        while not any(delta.finish_reason for delta in each_delta(client.recv().deltas)):
            pass
        assert psutil.Process(client.pid).num_threads() > 3, "the loop, its I/O, and compute threads are still there"
        waiter.start()
        time.sleep(0.5)  # the last heartbeat of a busy core
        assert_idle(client.pid)
        assert_idle(os.getpid(), mine(others), wakes=100)
    finally:
        client.close()
    waiter.join(30)
    assert not waiter.is_alive()
