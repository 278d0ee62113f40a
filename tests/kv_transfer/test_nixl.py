"""Pages by NIXL: what arrives, what fails, and what is known of others afterwards. With the library itself where it is
installed."""

from __future__ import annotations

import importlib.util
import sys
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
from engine.kv_transfer.frames import Answer, TransferError
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
def test_a_failure_leaves_no_memory_that_others_write_to_and_the_next_try_connects_anew(
    pair: Pair, nixl: FakeNixl, how: str
) -> None:
    pair.fetch()
    before = packed(pair.target.host, list(range(32)))
    setattr(nixl, how, True)
    with pytest.raises(TransferError, match="ended with ERR" if how == "fails" else "too long"):
        pair.fetch(0.2)
    assert packed(pair.target.host, list(range(32))) == before
    assert not nixl.agents["reader"].regions and not nixl.agents["reader"].remotes
    setattr(nixl, how, False)
    pair.fetch()
    assert pair.all_came()


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
    assert not nixl.agents["reader"].regions and not nixl.agents["reader"].remotes


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
