"""What others have to do with the KV cache: who is told of it, and who reads it or fills it. Names are vLLM's."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the prefix cache stores and forgets, published over ZeroMQ. Names and defaults are vLLM's."""

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    """None: zmq, if events are enabled; null: nobody is told"""
    endpoint: str = "tcp://*:5557"
    """bound if it has a wildcard (* or ::) or is ipc://, else connected to; a data-parallel rank adds its number to the
    port"""
    replay_endpoint: str | None = None
    """always bound: what was published lately can be asked for"""
    buffer_steps: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 10_000
    """batches that can be asked for again"""
    hwm: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 100_000
    """batches that wait for a subscriber that is slow; more are dropped for it"""
    max_queue_size: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 100_000
    """batches that wait to be published; more are dropped"""
    topic: str = ""


class NixlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config`."""

    backends: Annotated[tuple[Literal["UCX"], ...], msgspec.Meta(min_length=1, max_length=1)]


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prefill apart from decode. Names are vLLM's."""

    kv_connector: Literal["NixlConnector"]
    """whose contract is kept: `kv_transfer_params`"""
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    """computes prompts for others, takes them from others, or both"""
    kv_ip: str = "127.0.0.1"
    """where others read pages; it is told them as `remote_host`"""
    kv_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0: any, for it is told, too; a data-parallel rank adds its number"""
    kv_sources: tuple[str, ...] = ()
    """networks, addresses and names of other hosts that pages are taken from; requests say where their pages are"""
    kv_connector_extra_config: NixlConfig | None = None
    """pages go by NIXL; None: by the engine's own transports"""
    kv_buffer_device: Literal["cpu"] = "cpu"
    kv_load_failure_policy: Literal["recompute"] = "recompute"

    @property
    def produces(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        return self.kv_role != "kv_producer"
