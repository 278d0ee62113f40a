"""Nothing in the core spins or polls when there is nothing to do."""

from __future__ import annotations

import threading
import time

import psutil
import pytest
from core_fakes import request, tiny_config
from thread_cpu import cpu_s, thread_ids

from engine.core.client import ProcessClient

IDLE_S = 3.0
MAX_SHARE = 0.01


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.mark.timeout(120)
def test_an_idle_core_uses_no_cpu_after_it_has_served() -> None:
    others = thread_ids()
    client = ProcessClient(tiny_config(), executor="idle_executor:Computing")
    try:
        client.start()
        client.send(request("r", max_tokens=20))
        while not any(delta.finish_reason for delta in client.recv().deltas):
            pass
        core = psutil.Process(client.pid)
        assert core.num_threads() > 3, "the loop, its I/O, and compute threads are still there"
        time.sleep(1.5)  # the last heartbeat of a busy core
        own = thread_ids() - others - {threading.get_native_id()}  # who measures is not measured
        used, ours = _cpu_s(core), cpu_s(own)
        time.sleep(IDLE_S)
        assert _cpu_s(core) - used < MAX_SHARE * IDLE_S
        assert cpu_s(own) - ours < MAX_SHARE * IDLE_S
    finally:
        client.close()
