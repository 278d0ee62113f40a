"""Ranks that torchrun starts: what its variables mean, and who leaves when."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from agent_processes import remote_executor
from core_fakes import tiny_config
from fake_ranks import FAKE_GROUP, group_config, told
from test_multiproc import until

from engine.errors import ConfigError, EngineError
from engine.executor.torchrun import TorchrunPlaces, serve_as_rank
from engine.parallel_config import Launch, launch_of
from engine.step import StepPlan

TWO = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_variables_of_torchrun_are_read() -> None:
    more = {"LOCAL_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    assert launch_of({**TWO, **more}) == Launch(1, 2, 1, None, ("127.0.0.1", 29500), True, 3)
    assert launch_of({**TWO, "LOCAL_WORLD_SIZE": "1"}).local_size == 1
    assert (launch_of({**TWO, **more}).node, launch_of(TWO).node) == ("0", "1")
    for without in TWO:
        with pytest.raises(ConfigError, match=f"torchrun starts: {without} is not set"):
            launch_of({name: value for name, value in TWO.items() if name != without})
    with pytest.raises(ConfigError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set"):
        launch_of({"RANK": "0"})
    with pytest.raises(ConfigError, match="are no numbers"):
        launch_of({**TWO, "RANK": "first"})
    with pytest.raises(ConfigError, match="torchrun has started 2 processes"):
        serve_as_rank(launch_of(TWO), 3, 1.0)
    assert serve_as_rank(launch_of({**TWO, "RANK": "0"}), 2, 1.0) is None
    with pytest.raises(EngineError, match=r"rank 1: rank 0 did not say within 0.5 s where it is"):
        serve_as_rank(launch_of({**TWO, "MASTER_PORT": "1"}), 2, 0.5)


def test_an_address_that_leads_other_nodes_to_themselves_is_refused() -> None:
    assert TorchrunPlaces(launch_of({**TWO, "LOCAL_WORLD_SIZE": "2"})).host() == "127.0.0.1"
    assert TorchrunPlaces(launch_of(TWO)).host() == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"MASTER_ADDR 127.0.0.1 is 127.0.0.1 .*--master-addr"):
        TorchrunPlaces(launch_of({**TWO, "LOCAL_WORLD_SIZE": "1"})).host()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.timeout(120)
def test_a_process_is_a_rank_until_the_first_one_leaves(tmp_path: Path) -> None:
    environment = {**TWO, "MASTER_PORT": str(free_port()), "LOCAL_RANK": "1"}
    places = TorchrunPlaces(launch_of({**environment, "RANK": "0", "LOCAL_RANK": "0"}))
    config = group_config(tiny_config(async_scheduling=False), 2, tmp_path)
    left: list[int | None] = []
    rank = threading.Thread(target=lambda: left.append(serve_as_rank(launch_of(environment), 2, 60)))
    rank.start()
    executor = remote_executor(config, "fake_ranks:Light", places, *FAKE_GROUP)
    executor.load()
    executor.submit(StepPlan(step_id=0), lambda: None)
    assert executor.collect().token_ids == [0]
    until(lambda: "step 0" in told(tmp_path, 1))
    executor.close()
    rank.join()
    assert left == [0]
