"""Both sides of one engine."""

from __future__ import annotations

import socket
import threading
import time
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from core_fakes import tiny_config
from fake_pages import memory

from engine.kv_settings import KVTransferConfig
from engine.kv_transfer import connector
from engine.kv_transfer.connector import READERS, EngineConnector
from engine.kv_transfer.interface import FetchDone, News
from engine.kv_transfer.params import KVTransferParams


def test_sources_that_are_slow_hold_up_other_fetches_no_longer_than_one_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config()
    config = msgspec.structs.replace(
        config,
        kv_transfer=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_consumer"),
        limits=msgspec.structs.replace(config.limits, kv_fetch_s=0.5),
    )
    go_on, begun, news = threading.Event(), SimpleQueue[str | None](), SimpleQueue[News]()

    def slow(source: KVTransferParams, *_: Any) -> int:
        begun.put(source.remote_request_id)
        assert go_on.wait(60)
        return 1

    monkeypatch.setattr(connector, "fetch", slow)
    reads = EngineConnector(config, news.put)
    reads.attach(memory(1))
    try:
        for number in range(READERS + 1):
            reads.fetch(
                number, KVTransferParams(remote_request_id=str(number), remote_host="127.0.0.1"), {b"key": number}
            )
        assert {begun.get(timeout=60) for _ in range(READERS)} == {str(number) for number in range(READERS)}
        time.sleep(0.6)
        go_on.set()
        ended = {
            each.number: each.error
            for each in (news.get(timeout=60) for _ in range(READERS + 1))  # type: ignore[union-attr]
            if isinstance(each, FetchDone)
        }
        assert ended.pop(READERS) == "it waited too long for other fetches" and begun.empty()
        assert set(ended.values()) == {None}
    finally:
        go_on.set()
        reads.close()


def test_replicas_listen_beside_each_other_and_each_names_itself() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = min(int(probe.getsockname()[1]), 65000)
    config = tiny_config()
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_producer", kv_port=port)
    gives = []
    for rank in range(2):
        parallel = msgspec.structs.replace(config.parallel, data=2, data_rank=rank)
        replica = msgspec.structs.replace(config, kv_transfer=transfer, parallel=parallel)
        gives.append(EngineConnector(replica, lambda _: None))
    try:
        assert [each.offer(1, {}).remote_port for each in gives] == [port, port + 1]
        assert len({each.offer(2, {}).remote_engine_id for each in gives}) == 2
    finally:
        for each in gives:
            each.close()


def test_a_place_that_the_setting_does_not_name_is_not_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    config = msgspec.structs.replace(
        tiny_config(),
        kv_transfer=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_consumer", kv_sources=("192.0.2.0/28",)),
    )
    asked, news = list[str | None](), SimpleQueue[News]()

    def fetch(source: KVTransferParams, *_: Any) -> int:
        asked.append(source.remote_host)
        return 1

    monkeypatch.setattr(connector, "fetch", fetch)
    reads = EngineConnector(config, news.put, waits=True)
    reads.attach(memory(1))
    for number, host in enumerate(("192.0.2.200", "192.0.2.9")):
        reads.fetch(number, KVTransferParams(remote_host=host), {b"key": number})
    first, second = news.get(timeout=60), news.get(timeout=60)
    assert isinstance(first, FetchDone) and "kv_sources" in (first.error or "")
    assert isinstance(second, FetchDone) and second.error is None
    assert asked == ["192.0.2.9"]
    reads.close()
