"""Pages by NIXL: what arrives, what fails, and what is known of others afterwards. With the library itself where it is
installed."""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import resource
import socket
import sys
import time
from collections.abc import Iterator

import msgspec
import pytest
from core_fakes import tiny_config
from fake_nixl import FakeNixl
from fake_pages import memory, packed

from engine.errors import ConfigError
from engine.kv_settings import KVTransferConfig
from engine.kv_transfer import nixl_agent, reader
from engine.kv_transfer.connector import EngineConnector
from engine.kv_transfer.exports import Exports
from engine.kv_transfer.frames import Answer, TransferError, Wire
from engine.kv_transfer.nixl_agent import NixlAgent
from engine.kv_transfer.params import KVTransferParams
from engine.kv_transfer.staging import Staging, Stagings

KEYS = [bytes([index]) * 32 for index in range(8)]
THERE = {key: 31 - index for index, key in enumerate(KEYS)}
HERE = {key: 3 * index for index, key in enumerate(KEYS)}


class Pair:
    """A source's exports and a reader."""

    def __init__(self, source: NixlAgent | None, here: NixlAgent) -> None:
        self.memory, self.target, self.here = memory(1), memory(2), here
        self.exports = Exports("127.0.0.1", 0, 30.0, 5.0, lambda news: None, source)
        self.exports.attach(self.memory)
        self.stagings = Stagings(2, here.memory)
        self.generation = 0

    def fetch(self, timeout_s: float = 5.0) -> int:
        self.generation += 1
        source = KVTransferParams(
            remote_engine_id=self.exports.engine_id,
            remote_request_id=self.exports.offer(self.generation, THERE),
            remote_host="127.0.0.1",
            remote_port=self.exports.port,
        )
        return reader.fetch(source, HERE, self.target, self.stagings, timeout_s)

    def all_came(self) -> bool:
        return packed(self.target.host, [*HERE.values()]) == packed(self.memory.device, [*THERE.values()])


@pytest.fixture
def nixl() -> FakeNixl:
    return FakeNixl()


@pytest.fixture
def pair(nixl: FakeNixl) -> Iterator[Pair]:
    made = Pair(nixl.make("source"), nixl.make("reader"))
    yield made
    made.exports.close()


def test_pages_arrive_unchanged_and_memory_is_used_again(pair: Pair, nixl: FakeNixl) -> None:
    for _ in range(3):
        pair.target = memory(2)
        assert pair.fetch() == len(KEYS) * pair.memory.device.page_bytes
        assert pair.all_came()
    assert len(nixl.agents["source"].regions) <= 2 and len(nixl.agents["reader"].regions) == 1


@pytest.mark.parametrize("how", ["fails", "stuck"])
def test_memory_that_a_failed_read_may_still_write_to_is_never_used_again_and_never_freed(
    pair: Pair, nixl: FakeNixl, how: str
) -> None:
    pair.fetch()
    before = packed(pair.target.host, list(range(32)))
    setattr(nixl, how, True)
    with pytest.raises(TransferError, match="ended with ERR" if how == "fails" else "too long"):
        pair.fetch(0.2)
    assert packed(pair.target.host, list(range(32))) == before
    ((lost, transfer),) = pair.here._lost
    assert not transfer.released and not nixl.agents["reader"].remotes
    setattr(nixl, how, False)
    pair.fetch()
    ctypes.memset(lost.address, 255, lost.bytes.size)  # what comes late
    assert pair.all_came()
    pair.fetch()
    assert pair.all_came() and nixl.agents["reader"].regions[0][0] == lost.address
    assert len(nixl.agents["reader"].regions) == 2


def test_reads_that_did_not_end_have_a_bound(pair: Pair, nixl: FakeNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "MOST_LOST", 2)
    nixl.fails = True
    for _ in range(2):
        with pytest.raises(TransferError, match="ended with ERR"):
            pair.fetch()
    nixl.fails = False
    with pytest.raises(TransferError, match="2 reads by NIXL did not end"):
        pair.fetch()


def test_a_source_keeps_memory_mapped_that_a_late_reader_may_still_read(pair: Pair, nixl: FakeNixl) -> None:
    agent = nixl.make("another")
    small = agent.memory(5000)
    address = small.address
    small.bytes[:] = 7
    small.close()
    larger = agent.memory(50_000)
    assert larger.bytes.size == 1 << 16 and ctypes.string_at(address, 4) == b"\7" * 4
    assert agent.memory(6000) is small


def test_a_source_of_many_sockets_still_sees_its_readers() -> None:
    """select() takes no descriptor beyond 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1600:
        pytest.skip("this machine allows no such descriptor")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1600), hard))
    one, other = socket.socketpair()
    descriptor = fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 1500)
    wire = Wire(socket.socket(fileno=descriptor), time.monotonic() + 5)
    assert not wire.is_readable(0)
    other.send(b"x")
    assert wire.is_readable(0)
    for each in (one, other, wire.socket):
        each.close()


@pytest.mark.parametrize("wrong", ["metadata", "address", "another address"])
def test_what_a_source_says_of_its_memory_is_not_believed(
    pair: Pair, nixl: FakeNixl, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = reader.Wire.receive

    def changed(wire: reader.Wire, kind: type[Answer]) -> object:
        answer = real(wire, kind)
        if isinstance(answer, Answer):
            to = {"metadata": b"{", "address": 1 << 70, "another address": answer.address + (1 << 22)}[wrong]
            answer = msgspec.structs.replace(answer, **{wrong.split()[-1]: to})
        return answer

    monkeypatch.setattr(reader.Wire, "receive", changed)
    with pytest.raises(TransferError, match="NIXL does not begin"):
        pair.fetch()
    assert not pair.here._lost and not nixl.agents["reader"].remotes


def test_metadata_has_a_bound() -> None:
    Answer(metadata=b"x")
    for wrong in ({"metadata": bytes((64 << 10) + 1)}, {"address": -1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(Answer(**wrong)), type=Answer)  # type: ignore[arg-type]


def test_what_is_remembered_of_sources_has_a_bound(nixl: FakeNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "MOST_KNOWN", 4)
    here = nixl.make("reader")
    for index in range(10):
        pair = Pair(nixl.make(f"source {index}"), here)
        pair.fetch()
        pair.exports.close()
        assert pair.all_came() and len(here._known) <= 4
    assert len(nixl.agents["reader"].remotes) == 4


def test_a_source_without_it_says_so_and_one_with_it_serves_others(nixl: FakeNixl) -> None:
    pair = Pair(None, nixl.make("reader"))
    with pytest.raises(TransferError, match="kv_connector_extra_config"):
        pair.fetch()
    pair.exports.close()
    pair = Pair(nixl.make("source"), nixl.make("reader"))
    plain = Stagings(2, Staging)
    pair.stagings = plain  # type: ignore[assignment]
    pair.fetch()
    assert pair.all_came() and not nixl.agents["source"].turned
    pair.exports.close()
    plain.close()


def test_settings_are_told_apart_at_the_start(nixl: FakeNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"backends": ["LIBFABRIC"]}, {"backends": []}, {}, {"backends": ["UCX"], "num_threads": 4}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(
                {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": wrong},
                KVTransferConfig,
            )
    given = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"backends": ["UCX"]}}
    config = msgspec.structs.replace(tiny_config(), kv_transfer=msgspec.convert(given, KVTransferConfig))
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match=r"pip install 'pageloom\[nixl\]'"):
        EngineConnector(config, lambda news: None)
    nixl.plugins = []
    monkeypatch.setattr(nixl_agent, "_library", lambda: nixl)
    with pytest.raises(ConfigError, match="no backend UCX"):
        EngineConnector(config, lambda news: None)


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs the extra nixl")
def test_the_library_moves_pages_as_the_fake_does() -> None:
    pair = Pair(NixlAgent("source", ("UCX",)), NixlAgent("reader", ("UCX",)))
    for _ in range(2):
        pair.fetch()
        assert pair.all_came()
    pair.exports.close()
    with pytest.raises(TransferError):
        pair.here.read(b"no metadata", 0, 0, 1, 0.0)
