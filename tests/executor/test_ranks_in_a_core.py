"""A core process whose executor has ranks of its own: what a client sees, and what is left when the core goes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from core_fakes import request, tiny_config
from fake_ranks import group_config, told
from test_multiproc import pids, until

from engine.core.client import ProcessClient
from engine.core.wire import each_delta
from engine.errors import ConfigError, CoreDiedError

pytestmark = pytest.mark.timeout(180)


def client(executor: str, where: Path) -> ProcessClient:
    return ProcessClient(group_config(tiny_config(async_scheduling=False), 2, where), executor=f"fake_ranks:{executor}")


def test_a_core_serves_with_several_ranks_and_leaves_none(tmp_path: Path) -> None:
    core = client("sampling_ranks", tmp_path)
    try:
        core.start()
        core.send(request("r", max_tokens=5))
        tokens: list[int] = []
        while len(tokens) < 5:
            tokens += [token for delta in each_delta(core.recv().deltas) for token in delta.token_ids]
        assert tokens == [7] * 5, "rank 0's"
        [worker] = pids(tmp_path, 1)
        assert psutil.pid_exists(worker)
    finally:
        core.close()
    until(lambda: not psutil.pid_exists(worker))


@pytest.mark.parametrize("victim", ["core", "rank 1"])
def test_whoever_is_killed_takes_the_others_along_and_the_client_is_told(victim: str, tmp_path: Path) -> None:
    core = client("sampling_ranks", tmp_path)
    try:
        core.start()
        core.send(request("r", max_tokens=4000))
        core.recv()
        [worker] = pids(tmp_path, 1)
        os.kill(core.pid if victim == "core" else worker, signal.SIGKILL)
        with pytest.raises(CoreDiedError) as caught:
            while True:
                core.recv()
        last = str(caught.value).splitlines()[-1]
        if victim == "rank 1":
            assert f"EngineError: rank 1 (process {worker}) died: killed by signal 9" in last
        else:
            assert last.startswith("killed by signal 9")
    finally:
        core.close()
    until(lambda: not psutil.pid_exists(worker))


def test_a_rank_that_is_killed_while_nobody_asks_for_anything_ends_the_core(tmp_path: Path) -> None:
    core = client("sampling_ranks", tmp_path)
    try:
        core.start()
        [worker] = pids(tmp_path, 1)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(CoreDiedError, match=rf"rank 1 \(process {worker}\) died: killed by signal 9"):
            while True:
                core.recv()
    finally:
        core.close()


def test_a_rank_without_room_fails_the_start_of_the_core_as_a_setting_that_does_not_hold(tmp_path: Path) -> None:
    core = client("ranks_without_room", tmp_path)
    try:
        with pytest.raises(ConfigError, match=r"^the model needs 9 GiB\nlower --max-model-len$"):
            core.start()
    finally:
        core.close()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids(tmp_path, 1)))


@pytest.mark.parametrize("mark", ["", "@@"])
def test_a_ranks_log_says_which_rank_it_is(mark: str, tmp_path: Path) -> None:
    config = msgspec.json.encode(group_config(tiny_config(async_scheduling=False), 2, tmp_path)).decode()
    call = (
        f"import sys; sys.path[:] = {sys.path!r}; from engine.core.process import write_log; "
        f"from fake_ranks import drive; write_log('core', 20, {mark!r}); drive('Light', {config!r})"
    )
    with subprocess.Popen([sys.executable, "-c", call], stderr=subprocess.PIPE) as driver:
        until(lambda: "step 3" in told(tmp_path, 1))
        driver.kill()
        assert driver.stderr is not None
        lines = driver.stderr.read().decode().splitlines()
    if mark:
        entries = [json.loads(line.removeprefix(mark)) for line in lines if line.startswith(mark)]
        found = {entry["process"]: entry["message"] for entry in entries}
        assert found == {"core": "loading\nrank 0's part", "rank 1": "loading\nrank 1's part"}
    else:
        text = "\n".join(lines)
        assert "INFO core: loading\n    rank 0's part" in text and "INFO rank 1: loading\n    rank 1's part" in text
