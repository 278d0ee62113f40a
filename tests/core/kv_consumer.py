"""A consumer of the prefix cache's events that knows only what vLLM publishes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq


class KVCacheEvent(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """As a consumer declares it."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Consumer:
    def __init__(self, directory: Path, topic: str = "") -> None:
        self._context = zmq.Context()
        self.events, self._replay = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self.events.connect(f"ipc://{directory}/events")
        self.events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._replay.connect(f"ipc://{directory}/replay")
        self.topic = topic.encode()

    def next(self) -> tuple[int, KVEventBatch]:
        topic, number, payload = self.events.recv_multipart()
        assert topic == self.topic and len(number) == 8
        return int.from_bytes(number, "big"), DECODER.decode(payload)

    def replay(self, first: int) -> list[tuple[int, KVEventBatch]]:
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if not payload:
                assert number == b"\xff" * 8
                return found
            found.append((int.from_bytes(number, "big"), DECODER.decode(payload)))

    def send_rubbish(self) -> None:
        self._replay.send_multipart((b"", b"?"))
        self._replay.send(b"no delimiter")
        self._replay.send_multipart((b"", b"", b"", b""))

    def send_too_much(self) -> None:
        """Returns when the connection was ended for it; a new one follows."""
        monitor = self._replay.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._replay.send_multipart((b"", bytes(1000)))
        assert monitor.poll(60_000)
        self._replay.disable_monitor()

    def close(self) -> None:
        self._context.destroy(linger=0)
