"""The prefix cache's events over ZeroMQ, as vLLM publishes them, for routers and indexers outside.

A batch is what one turn of the loop changed: frames `topic`, its number (8 bytes, big-endian) and msgpack of
`[seconds since 1970, events, data-parallel rank]`. Each event is a map whose `type` is BlockStored, BlockRemoved or
AllBlocksCleared (vLLM since its pull request 42892). Hashes are the last 8 bytes of our digests as an unsigned number:
what vLLM sends unasked, and the one form that Dynamo and llm-d both read.

Numbers count batches, sent or not, so that who misses one sees the gap. The last ones are kept: who asks the replay
endpoint for those from a number on gets them, each in a message of its own, and at last one whose number is -1.
"""

from __future__ import annotations

import errno
import logging
import os
import socket as socketlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import zmq

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.kv_cache.events import Cleared, KVEvent, Stored
from engine.layer_groups import Chunk, State, Window

logger = logging.getLogger(__name__)

LINGER_MS = 1000
BATCHES_AT_ONCE = 256
"""sent before the replay endpoint is looked at again"""
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_REQUEST_BYTES = 64
"""of a message to the replay endpoint: longer ones end their connection"""


class _Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Named as in the schema, its fields too; `type` is the class's name."""


class BlockStored(_Event, kw_only=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str] | None]
    """of each block; a salt stands with a sequence's first one"""
    group_idx: int
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event, kw_only=True):
    block_hashes: list[int]
    medium: str
    group_idx: int


class AllBlocksCleared(_Event):
    pass


class Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


class KVEventPublisher:
    """Both sockets, and the thread that they belong to. `publish` never waits."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises `ConfigError` where an endpoint cannot be had. Nothing is sent before `start`."""
        assert config.kv_events is not None
        self._config, self._rank = config.kv_events, config.parallel.data_rank
        self._block_size = config.cache.block_size
        self._windows: Sequence[Window] = ()
        self._waiting: deque[tuple[int, float, list[KVEvent]]] = deque()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=self._config.buffer_steps)
        self._next = self._dropped = 0
        self._closing = False
        self._files: list[str] = []
        """of ipc:// endpoints"""
        self._encoder = msgspec.msgpack.Encoder()
        self._topic = self._config.topic.encode()
        self._context = zmq.Context()
        try:
            self._publisher = self._open(zmq.PUB, self._config.hwm, "endpoint", self._config.endpoint)
            self._replay: zmq.Socket[bytes] | None = None
            if self._config.replay_endpoint is not None:
                most = self._config.buffer_steps + 1  # one answer: what a client does not take is dropped
                self._replay = self._open(zmq.ROUTER, most, "replay_endpoint", self._config.replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def _open(self, kind: int, most: int, name: str, endpoint: str) -> zmq.Socket[bytes]:
        endpoint = endpoint_of_rank(endpoint, self._rank)
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, most)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)  # a subscription, too, which is kept
        binds = kind == zmq.ROUTER or is_bound(endpoint)
        try:
            if binds:
                self._take_file(endpoint)
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            what = f"{name} {endpoint!r} cannot be {'bound' if binds else 'connected'}"
            why = f"{zmq.strerror(error.errno or 0)}; choose another one"
            raise ConfigError(f"kv_events_config: {what}: {why}") from None
        logger.info("KV events: %s %s %s", name, endpoint, "bound" if binds else "connected")
        return socket

    def _take_file(self, endpoint: str) -> None:
        """ZeroMQ takes a file over from whoever listens to it, and leaves its own. Raises ZMQError."""
        path = endpoint.removeprefix("ipc://")
        if path == endpoint or path.startswith("@"):
            return
        with socketlib.socket(socketlib.AF_UNIX) as other, suppress(OSError):
            other.connect(path)
            raise zmq.ZMQError(errno.EADDRINUSE)
        self._files.append(path)

    def start(self, windows: Sequence[Window]) -> None:
        """`windows`: of each layer group."""
        self._windows = windows
        self._thread.start()

    def publish(self, events: list[KVEvent]) -> None:
        """One batch. Where the queue is full it is dropped; its number is missing then."""
        number, self._next = self._next, self._next + 1
        if len(self._waiting) >= self._config.max_queue_size:
            self._dropped += 1
            if self._dropped.bit_count() == 1:  # the first, second, fourth …
                logger.warning(
                    "KV events: %d batches were dropped: %d wait already (max_queue_size)",
                    self._dropped,
                    self._config.max_queue_size,
                )
            return
        self._waiting.append((number, time.time(), events))
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """What waits is sent, if it can be within a second. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._thread.is_alive():
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
        self._context.destroy(linger=LINGER_MS)
        os.close(self._wake_fd)
        for path in self._files:
            with suppress(OSError):
                os.unlink(path)

    def _run(self) -> None:
        """Until `close`. Blocked while there is nothing to do."""
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while self._waiting or not self._closing:
            ready = dict(poller.poll(0 if self._waiting else None))
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            for _ in range(min(len(self._waiting), BATCHES_AT_ONCE)):
                self._send(*self._waiting.popleft())
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)

    def _send(self, number: int, ts: float, events: list[KVEvent]) -> None:
        try:
            batch = Batch(ts, [self._told(event) for event in events], self._rank)
            payload = self._encoder.encode(batch)
            self._publisher.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
            self._sent.append((number, payload))
        except Exception:  # the next batch may be sent; who follows sees that this one is missing
            logger.exception("KV events: batch %d could not be sent", number)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """One request: frames identity, empty, the first number that is wanted."""
        try:
            client, *rest = replay.recv_multipart(zmq.NOBLOCK)
            if len(rest) != 2 or len(rest[1]) != 8:
                return
            first = int.from_bytes(rest[1], "big")
            for number, payload in self._sent:
                if number >= first:
                    replay.send_multipart((client, b"", number.to_bytes(8, "big"), payload), zmq.NOBLOCK)
            replay.send_multipart((client, b"", END_OF_REPLAY, b""), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the client has left
            logger.debug("KV events: a replay was not answered: %s", error)

    def _told(self, event: KVEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
        if isinstance(event, Cleared):
            return AllBlocksCleared()
        hashes = [hash_of(digest) for digest in event.digests]
        medium = "CPU" if event.on_host else "GPU"  # the engine's tiers, whatever the device is
        if not isinstance(event, Stored):
            return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=event.group)
        kind, window = _kind_of(self._windows[event.group])
        extra: list[tuple[str] | None] = [None] * len(hashes)
        if event.salt is not None:
            extra[0] = (event.salt.encode(errors="replace").decode(),)
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if event.parent is None else hash_of(event.parent),
            token_ids=event.token_ids,
            block_size=self._block_size,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=extra,
            group_idx=event.group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )


def hash_of(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


def is_bound(endpoint: str) -> bool:
    """By vLLM's rule: what names one host is where somebody listens."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Of a data-parallel rank: the port is that of rank 0 and as many more; a file has another ending."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("ipc://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def _kind_of(window: Window) -> tuple[str, int | None]:
    """What a layer group keeps, in vLLM's words."""
    if window is None:
        return "full_attention", None
    if isinstance(window, State):
        return "mamba", None
    return ("chunked_local_attention", None) if isinstance(window, Chunk) else ("sliding_window", window)
