"""The reader's side: pages by their keys from another engine, by NIXL if that is asked for; else over shared memory
where it is on this host, else TCP."""

from __future__ import annotations

import socket
import time

from msgspec.structs import replace

from engine.kv_transfer.frames import Answer, Ask, Took, TransferError, Wire, is_of_this_user, local_name
from engine.kv_transfer.memory import KVMemory
from engine.kv_transfer.nixl_agent import Registered
from engine.kv_transfer.params import KVTransferParams
from engine.kv_transfer.sources import is_own
from engine.kv_transfer.staging import Staging, Stagings

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def fetch(
    source: KVTransferParams,
    pages: dict[bytes, int],
    memory: KVMemory,
    stagings: Stagings[Staging] | Stagings[Registered],
    timeout_s: float,
) -> int:
    """Bring pages into blocks of the host tier; their size in bytes. `stagings`: what they pass through says how they
    come. Raises `TransferError`: what is in these blocks then means nothing."""
    deadline, keys = time.monotonic() + timeout_s, list(pages)
    size = len(keys) * memory.host.page_bytes
    ask = Ask(source.remote_engine_id or "", source.remote_request_id or "", memory.layout, keys)
    with _connect(source, deadline) as connection:
        wire, local = Wire(connection, deadline), connection.family == socket.AF_UNIX
        if not keys:
            wire.send(ask)
            _check(wire.receive(Answer), 0)
            return 0
        with stagings.of(f"{source.remote_host}:{source.remote_port}", size) as staging:
            packed = staging.bytes[:size]
            if isinstance(staging, Registered):
                wire.send(replace(ask, nixl=True))
            else:
                wire.send(ask, staging.descriptor if local else None)
            answer = wire.receive(Answer)
            _check(answer, size)
            if isinstance(staging, Registered):
                staging.read(answer.metadata, answer.address, size, deadline)
            elif not local:
                wire.receive_pages(packed)
            if memory.host.checksum(packed, len(keys)) != answer.checksum:
                raise TransferError("the checksum is another one")
            memory.host.unpack(list(pages.values()), packed)
            wire.send(Took())
    return size


def _check(answer: Answer, size: int) -> None:
    if answer.error is not None:
        raise TransferError(answer.error)
    if answer.size != size:
        raise TransferError(f"{answer.size} bytes, where {size} were expected")


def _connect(source: KVTransferParams, deadline: float) -> socket.socket:
    host, port = source.remote_host or "", source.remote_port or 0
    left = max(deadline - time.monotonic(), 0.001)
    if host in _LOOPBACK or is_own(host):
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.settimeout(left)
        try:
            local.connect(local_name(port))
            if is_of_this_user(local):
                return local
        except OSError:  # another network namespace, or a tunnel
            pass
        local.close()
    try:
        connection = socket.create_connection((host, port), timeout=left)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection
    except (OSError, UnicodeError) as error:  # of a name that is none
        raise TransferError(f"{host[:200]!r}, port {port}: {error}") from error
