"""Pages between two caches, over shared memory and TCP: all of them and unchanged, or an error that says why."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from types import ModuleType

import msgspec
import numpy as np
import pytest
from fake_pages import LAYOUT, memory, packed

from engine.errors import ConfigError
from engine.kv_transfer import exports, reader
from engine.kv_transfer.exports import Exports
from engine.kv_transfer.frames import MAX_KEYS, Answer, Ask, TransferError, Wire, local_name
from engine.kv_transfer.interface import LeaseEnded, News
from engine.kv_transfer.memory import KVMemory
from engine.kv_transfer.params import KVTransferParams
from engine.kv_transfer.staging import Staging, Stagings

KEYS = [bytes([index]) * 32 for index in range(8)]
THERE = {key: 31 - index for index, key in enumerate(KEYS)}
HERE = {key: 3 * index for index, key in enumerate(KEYS)}
STAGINGS = Stagings(2, Staging)


def fetch(source: KVTransferParams, pages: dict[bytes, int], target: KVMemory, timeout_s: float) -> int:
    return reader.fetch(source, pages, target, STAGINGS, timeout_s)


class Source:
    def __init__(self, lease_s: float = 30.0, timeout_s: float = 5.0) -> None:
        self.news: SimpleQueue[News] = SimpleQueue()
        self.exports = Exports("127.0.0.1", 0, lease_s, timeout_s, self.news.put)
        self.memory = memory(1)
        self.exports.attach(self.memory)

    def offer(self, generation: int = 1, pages: dict[bytes, int] = THERE) -> KVTransferParams:
        return KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self.exports.engine_id,
            remote_request_id=self.exports.offer(generation, pages),
            remote_host="127.0.0.1",
            remote_port=self.exports.port,
        )

    def ended(self, timeout_s: float = 5.0) -> News:
        return self.news.get(timeout=timeout_s)


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.exports.close()


@pytest.fixture(params=["shared memory", "TCP"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "TCP":
        monkeypatch.setattr(reader, "local_name", lambda port: f"\0nobody-{port}")
    return str(request.param)


def test_pages_arrive_unchanged_and_the_lease_is_over(source: Source, transport: str) -> None:
    params, target = source.offer(), memory(2)
    assert fetch(params, HERE, target, 5.0) == len(KEYS) * sum((24, 40, 13))
    assert packed(target.host, list(HERE.values())) == packed(source.memory.device, list(THERE.values()))
    assert source.ended() == LeaseEnded(generation=1)
    with pytest.raises(TransferError, match="no such lease"):
        fetch(params, HERE, target, 5.0)


def test_one_page_of_many_may_be_asked_for(source: Source, transport: str) -> None:
    target = memory(2)
    fetch(source.offer(), {KEYS[5]: 7}, target, 5.0)
    assert packed(target.host, [7]) == packed(source.memory.device, [THERE[KEYS[5]]])


def test_who_wants_nothing_gives_the_lease_back(source: Source, transport: str) -> None:
    assert fetch(source.offer(7), {}, memory(2), 5.0) == 0
    assert source.ended() == LeaseEnded(generation=7)


@pytest.mark.parametrize("wrong", ["lease", "engine", "layout", "page", "withdrawn", "port"])
def test_what_does_not_fit_is_refused_with_the_reason(source: Source, transport: str, wrong: str) -> None:
    params, target, pages = source.offer(), memory(2, **({"block_size": "32"} if wrong == "layout" else {})), HERE
    before = packed(target.host, list(range(32)))
    if wrong == "withdrawn":
        source.exports.withdraw(1)
    changed = {
        "lease": {"remote_request_id": "1." + "0" * 32},
        "engine": {"remote_engine_id": "an older one"},
        "port": {"remote_port": 1},
    }.get(wrong, {})
    params = KVTransferParams(**{name: changed.get(name, getattr(params, name)) for name in params.__struct_fields__})
    if wrong == "page":
        pages = {**HERE, b"another prompt": 1}
    reasons = {
        "lease": "no such",
        "engine": "later",
        "layout": "differ: block_size 16 and 32",
        "page": "another prompt",
    }
    with pytest.raises(TransferError, match=reasons.get(wrong, "no such lease|refused")):
        fetch(params, pages, target, 5.0)
    assert packed(target.host, list(range(32))) == before


@pytest.mark.parametrize("wrong", ["a pipe", "not sealed", "too small", "none"])
def test_memory_of_a_reader_that_could_be_pulled_away_is_refused(source: Source, wrong: str) -> None:
    params, made = source.offer(), os.memfd_create("reader", os.MFD_ALLOW_SEALING)
    os.ftruncate(made, 1 << 20 if wrong == "not sealed" else 8)
    if wrong == "too small":
        fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    given = os.pipe() if wrong == "a pipe" else (made,)
    with reader._connect(params, time.monotonic() + 5) as connection:
        wire = Wire(connection, time.monotonic() + 5)
        ask = Ask(source.exports.engine_id, params.remote_request_id or "", LAYOUT, KEYS)
        wire.send(ask, None if wrong == "none" else given[-1])
        assert wire.receive(Answer).error
    for descriptor in {made, *given}:
        os.close(descriptor)
    assert fetch(params, HERE, memory(2), 5.0)


def test_nobody_comes_in_time() -> None:
    source = Source(lease_s=0.05)
    try:
        source.offer(3)
        assert source.ended() == LeaseEnded(generation=3, expired=True)
    finally:
        source.exports.close()


def test_a_reader_that_leaves_half_way_may_come_again(source: Source, transport: str) -> None:
    params, target = source.offer(), memory(2)
    connection = reader._connect(params, time.monotonic() + 5)
    wire = Wire(connection, time.monotonic() + 5)
    with STAGINGS.of("here", 1000) as staging:
        local = staging.descriptor if transport == "shared memory" else None
        wire.send(Ask(source.exports.engine_id, params.remote_request_id or "", LAYOUT, KEYS), local)
        connection.recv(3)
    connection.close()
    assert fetch(params, HERE, target, 5.0)
    assert source.ended() == LeaseEnded(generation=1)


def test_pages_that_were_changed_on_the_way_are_not_taken(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(source.memory.device), "checksum", lambda pages, packed, count: os.urandom(8))
    target = memory(2)
    before = packed(target.host, list(range(32)))
    with pytest.raises(TransferError, match="checksum"):
        fetch(source.offer(), HERE, target, 5.0)
    assert packed(target.host, list(range(32))) == before


def test_a_source_that_is_stopped_is_left_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        params = KVTransferParams(
            remote_engine_id="e", remote_request_id="1.x", remote_host="127.0.0.1", remote_port=silent.getsockname()[1]
        )
        with pytest.raises(TransferError, match="too long"):
            fetch(params, HERE, memory(2), 0.2)


def test_a_stranger_who_says_nothing_is_left_before_a_reader_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "ASK_S", 0.2)
    made = Source(timeout_s=600.0)
    try:
        with socket.create_connection(("127.0.0.1", made.exports.port)) as stranger:
            stranger.settimeout(30)
            assert stranger.recv(1) == b""
    finally:
        made.exports.close()


def test_who_says_nothing_gives_way_to_readers(source: Source, transport: str) -> None:
    """In places and in the backlog behind them; a fetch has far less time than they have."""
    with contextlib.ExitStack() as strangers:
        for _ in range(exports.MOST_CONNECTIONS + 20):
            connection = strangers.enter_context(socket.create_connection(("127.0.0.1", source.exports.port)))
            connection.sendall(struct.pack("<I", 1000))  # not all of a frame
        for generation in range(1, 9):
            assert fetch(source.offer(generation), HERE, memory(2), 2.5)


def framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<I", 1000) + b"short",
        framed(msgspec.msgpack.encode({"type": "ask", "engine_id": "e" * 600, "lease": "", "layout": {}, "keys": []})),
        framed(msgspec.msgpack.encode(Ask("e", "l", {}, [b""] * (MAX_KEYS + 1)))),
        framed(msgspec.msgpack.encode(Ask("e", "l", {}, [bytes(65)]))),
        os.urandom(4096),
    ],
)
def test_what_strangers_send_ends_their_connection_alone(source: Source, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", source.exports.port)) as stranger:
        stranger.settimeout(5)
        with contextlib.suppress(OSError):  # it may have been reset at once
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert fetch(source.offer(), HERE, memory(2), 5.0)


def test_who_sends_descriptors_without_end_is_left(source: Source) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(local_name(source.exports.port))
        stranger.sendall(struct.pack("<I", 1000))
        for _ in range(4):
            with contextlib.suppress(OSError):  # it has been left
                socket.send_fds(stranger, [b"x"], [stranger.fileno()])
        stranger.settimeout(1)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    until = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < until, "what came is still open"
        time.sleep(0.01)
    assert fetch(source.offer(), HERE, memory(2), 5.0)


@pytest.mark.parametrize("stranger", [reader, exports])
def test_shared_memory_is_for_processes_of_one_user(
    source: Source, stranger: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader takes TCP where the name is somebody else's; a source says nothing to somebody else."""
    monkeypatch.setattr(stranger, "is_of_this_user", lambda connection: False)
    if stranger is exports:
        with pytest.raises(TransferError):
            fetch(source.offer(), HERE, memory(2), 5.0)
    with reader._connect(source.offer(2), time.monotonic() + 5) as connection:
        assert (connection.family == socket.AF_UNIX) == (stranger is exports)
    monkeypatch.undo()
    assert fetch(source.offer(3), HERE, memory(2), 5.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process is started by root alone")
def test_another_users_process_is_told_nothing(source: Source) -> None:
    if not (child := os.fork()):
        try:
            os.setuid(65534)
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(local_name(source.exports.port))
                stranger.settimeout(source.exports._timeout_s - 1)
                os._exit(len(stranger.recv(1)))
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_process_without_descriptors_waits_for_one(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            raise OSError(errno.EMFILE, "Too many open files")

    slept: list[float] = []
    monkeypatch.setattr(exports.time, "sleep", slept.append)
    with Full() as full:
        source.exports._accept(full)
    assert len(slept) == 1 and slept[0] > 0


def test_a_process_that_cannot_start_a_thread_turns_a_reader_away_and_serves_the_next(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unstarted(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    params = source.offer()
    with monkeypatch.context() as patched:
        patched.setattr(exports.threading, "Thread", Unstarted)
        for _ in range(exports.MOST_CONNECTIONS + 1):  # none of them keeps a place
            with pytest.raises(TransferError):
                fetch(params, HERE, memory(2), 5.0)
    assert fetch(params, HERE, memory(2), 5.0)


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="kv_port"):
        Exports("127.0.0.1", taken.getsockname()[1], 1.0, 1.0, lambda news: None)


def test_the_core_waits_for_no_copy_but_that_of_what_it_takes_back(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other prompts end, and give way, while pages are read."""
    pack, begun, go_on = source.memory.device.pack, threading.Event(), threading.Event()

    def slow(blocks: list[int], into: np.ndarray) -> None:
        begun.set()
        assert go_on.wait(30)
        pack(blocks, into)

    monkeypatch.setattr(source.memory.device, "pack", slow)
    params, target = source.offer(1), memory(2)
    reads = threading.Thread(target=fetch, args=(params, HERE, target, 30.0))
    reads.start()
    assert begun.wait(30)
    source.offer(2)
    source.exports.withdraw(2)
    takes_back = threading.Thread(target=source.exports.withdraw, args=(1,))
    takes_back.start()
    takes_back.join(0.1)
    assert takes_back.is_alive()
    go_on.set()
    takes_back.join(30)
    reads.join(30)
    assert packed(target.host, list(HERE.values())) == packed(source.memory.device, list(THERE.values()))


def test_memory_that_is_in_use_when_all_is_closed_is_closed_behind_it() -> None:
    before = len(os.listdir("/proc/self/fd"))
    stagings = Stagings(2, Staging)
    with stagings.of("a", 100):
        with stagings.of("b", 100):
            pass
        stagings.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_many_at_once_each_get_theirs_while_others_are_withdrawn(source: Source, transport: str) -> None:
    """Readers, expiry and withdrawals in threads: every lease ends once, and what arrives is right."""
    rolls = random.Random(5)
    right, refused = [], []

    def read(generation: int, seed: int) -> None:
        pages = {key: (block + generation) % 32 for key, block in THERE.items()}
        params, target = source.offer(generation, pages), memory(seed)
        if seed % 4 == 0:
            source.exports.withdraw(generation)
        try:
            fetch(params, HERE, target, 5.0)
            right.append(packed(target.host, [*HERE.values()]) == packed(source.memory.device, [*pages.values()]))
        except TransferError:
            refused.append(generation)

    threads = [threading.Thread(target=read, args=(i, rolls.randrange(100))) for i in range(1, 61)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ended = [source.ended() for _ in right]
    assert all(right) and len(right) + len(refused) == 60 and refused
    assert len({each.generation for each in ended if isinstance(each, LeaseEnded)}) == len(right)
    with pytest.raises(Empty):
        source.ended(0.05)
    assert not source.exports._offers and not source.exports._names
