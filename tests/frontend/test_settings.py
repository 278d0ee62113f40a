"""Settings in Python: what is harmless is taken, what is none is refused by name."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import EngineArgs, KVEventsConfig, make_args
from engine.errors import ConfigError
from engine.limits import Limits
from engine.machine import Machine
from engine.setting_checks import check_settings, kv_events_of, swap_space_of


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        ({"limits": None}, "limits", Limits()),
        ({"limits": {"prompts": 3}}, "limits", Limits(prompts=3)),
        ({"override_generation_config": None}, "override_generation_config", {}),
        ({"cores": range(2)}, "cores", (0, 1)),
        ({"cores": [1, 3]}, "cores", (1, 3)),
        ({"max_num_seqs": np.int64(4)}, "max_num_seqs", 4),
        ({"memory_fraction": np.float32(0.5)}, "memory_fraction", 0.5),
        ({"memory_fraction": 1}, "memory_fraction", 1),
        ({"kv_cache_memory": "1GiB"}, "kv_cache_memory", "1GiB"),
        ({"cache_dir": Path("/c")}, "cache_dir", "/c"),
    ],
)
def test_values_that_do_no_harm_are_taken(settings: dict[str, Any], name: str, value: object) -> None:
    assert getattr(make_args("m", settings), name) == value
    assert make_args(Path("m"), {}) == EngineArgs(model="m")


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"max_seqs": 1}, TypeError, "max_seqs"),
        ({"max_num_seqs": "a"}, ConfigError, "max_num_seqs"),
        ({"dtype": "float8"}, ConfigError, "dtype"),
        ({"limits": {"fruits": 1}}, ConfigError, "fruits"),
    ],
)
def test_what_is_no_setting_is_refused_by_name(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make_args("m", settings)


def kv_events(**settings: object) -> KVEventsConfig | None:
    return kv_events_of(make_args("m", {"kv_events_config": settings}))


def test_events_of_the_cache_are_published_where_they_are_enabled() -> None:
    enabled = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:6000", hwm=5)
    assert kv_events(enable_kv_cache_events=True, endpoint="tcp://*:6000", hwm=5) == enabled
    assert kv_events(enable_kv_cache_events=True, publisher="zmq", replay_endpoint="ipc:///tmp/r") is not None
    for off in ({}, {"publisher": "zmq"}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert kv_events(**off) is None


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"endpoints": "tcp://*:1"}, "unknown field `endpoints`; it may have enable_kv_cache_events, publisher, endp"),
        ({"publisher": "nats"}, "nats"),
        ({"buffer_steps": 0}, "buffer_steps"),
        ({"max_queue_size": 0}, "max_queue_size"),
        ({"hwm": "many"}, "hwm"),
        ({"endpoint": "tcp://*"}, "endpoint must be as"),
        ({"endpoint": "inproc://events"}, "endpoint must be as"),
        ({"replay_endpoint": "http://h:80/"}, "replay_endpoint must be as"),
        ({"endpoint": "tcp://*:0"}, "endpoint 'tcp://.*:0': ports are 1 to 65535"),
        ({"endpoint": "tcp://*:99999"}, "endpoint 'tcp://.*:99999': ports are 1 to 65535"),
        ({"replay_endpoint": "tcp://*:65536"}, "replay_endpoint 'tcp://.*:65536': ports are 1 to 65535"),
    ],
)
def test_events_that_cannot_be_published_so_are_refused_by_name(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_events_config: .*" + says):
        kv_events(enable_kv_cache_events=True, **settings)


@pytest.mark.parametrize(
    ("replicas", "endpoint", "port", "meet"),
    [
        (1, "tcp://*:6000", 6000, True),
        (1, "tcp://*:6000", 6001, False),
        (2, "tcp://*:6000", 6001, True),
        (2, "tcp://[::]:6001", 6000, True),
        (2, "tcp://*:6000", 6002, False),
        (2, "tcp://router:6000", 6001, False),
        (2, "ipc:///tmp/e", 6001, False),
    ],
)
def test_ports_of_replicas_that_would_meet_are_refused(replicas: int, endpoint: str, port: int, meet: bool) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": f"tcp://*:{port}"}
    args = EngineArgs(model="m", data_parallel_size=replicas, kv_events_config=events)
    if not meet:
        assert kv_events_of(args) is not None
        return
    with pytest.raises(ConfigError, match=r"kv_events_config: endpoint and replay_endpoint have ports"):
        kv_events_of(args)


def test_each_replica_has_a_port() -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:65534"}
    for replicas in (1, 2):
        assert kv_events_of(EngineArgs(model="m", data_parallel_size=replicas, kv_events_config=events)) is not None
    with pytest.raises(ConfigError, match=r"data_parallel_size \(3\) each adds its rank"):
        kv_events_of(EngineArgs(model="m", data_parallel_size=3, kv_events_config=events))


def test_events_of_a_cache_that_is_off_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_events_config tells of the prefix cache"):
        kv_events_of(
            EngineArgs(model="m", enable_prefix_caching=False, kv_events_config={"enable_kv_cache_events": True})
        )


MACHINE = Machine(physical_cores=4, memory_bytes=1 << 34, home="/home/u", working_directory="/work")
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kv_role": "both"}, "kv_role`; it may be 'kv_producer' or 'kv_consumer' or 'kv_both'$"),
        ({"kv_connector_extra_config": {"backends": ["GDS"]}}, "backends.0.`; it may be 'UCX'$"),
        ({"kv_rank": 0}, "unknown field `kv_rank`; it may have kv_connector, kv_role, "),
        ({"kv_ip": "192.0.2.1"}, "kv_ip '192.0.2.1' is no address of this host"),
        ({"kv_ip": "0.0.0.0"}, "kv_ip '0.0.0.0' is no address of this host that others could be told"),
        ({"kv_sources": ["10.0.0.0/99"]}, "kv_sources: '10.0.0.0/99' is no network"),
    ],
)
def test_what_moves_pages_is_refused_with_what_it_may_be(settings: dict[str, Any], says: str) -> None:
    """Before anything is loaded, as `--check` does."""
    args = make_args("m", {"kv_transfer_config": {**TRANSFER, **settings}, "device": "cpu"})
    with pytest.raises(ConfigError, match=says):
        check_settings(args, MACHINE)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_who_takes_pages_needs_the_room_where_they_land(role: str) -> None:
    transfer = {"kv_transfer_config": {**TRANSFER, "kv_role": role}}
    takes = role == "kv_consumer"
    assert swap_space_of(make_args("m", transfer), "cpu", MACHINE) == (1 << 30 if takes else 0)
    none = make_args("m", {**transfer, "swap_space": 0})
    with pytest.raises(ConfigError, match="swap_space") if takes else nullcontext():
        assert swap_space_of(none, "cpu", MACHINE) == 0
