"""The reader's side: pages by their keys from another engine, over shared memory where it is on this host, else TCP."""

from __future__ import annotations

import mmap
import os
import socket
import time

import numpy as np

from engine.kv_transfer.frames import Answer, Ask, Took, TransferError, Wire, local_name
from engine.kv_transfer.memory import KVMemory
from engine.kv_transfer.params import KVTransferParams

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def fetch(source: KVTransferParams, pages: dict[bytes, int], memory: KVMemory, timeout_s: float) -> int:
    """Bring pages into blocks of the host tier; their size in bytes. Raises `TransferError`: what is in these blocks
    then means nothing."""
    deadline = time.monotonic() + timeout_s
    with _connect(source, deadline) as connection:
        wire = Wire(connection, deadline)
        keys = list(pages)
        wire.send(Ask(source.remote_engine_id or "", source.remote_request_id or "", memory.layout, keys))
        descriptors: list[int] = []
        try:
            answer = wire.receive_with(Answer, descriptors) if _is_local(connection) else wire.receive(Answer)
            if answer.error is not None:
                raise TransferError(answer.error)
            if not keys:
                return 0
            size: int = len(keys) * memory.host.page_bytes
            if answer.size != size:
                raise TransferError(f"{answer.size} bytes, where {size} were expected")
            packed = _mapped(descriptors, size) if _is_local(connection) else np.empty(size, dtype=np.uint8)
            if not descriptors:
                wire.receive_pages(packed)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if memory.host.checksum(packed, len(keys)) != answer.checksum:
            raise TransferError("the checksum is another one")
        memory.host.unpack(list(pages.values()), packed)
        wire.send(Took())
        return size


def _mapped(descriptors: list[int], size: int) -> np.ndarray:
    if len(descriptors) != 1 or os.fstat(descriptors[0]).st_size < size:
        raise TransferError("the shared memory is missing, or too small")
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return np.frombuffer(mmap.mmap(descriptors[0], size, flags=flags, prot=mmap.PROT_READ), dtype=np.uint8)


def _is_local(connection: socket.socket) -> bool:
    return connection.family == socket.AF_UNIX


def _connect(source: KVTransferParams, deadline: float) -> socket.socket:
    host, port = source.remote_host or "", source.remote_port or 0
    left = max(deadline - time.monotonic(), 0.001)
    if host in _LOOPBACK or _is_own(host):
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.settimeout(left)
        try:
            local.connect(local_name(port))
            return local
        except OSError:  # another network namespace, or a tunnel
            local.close()
    try:
        connection = socket.create_connection((host, port), timeout=left)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    except OSError as error:
        raise TransferError(f"{host}:{port}: {error}") from error


def _is_own(host: str) -> bool:
    """An address of this machine: one that a socket can be bound to."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
