"""Servers between which no page moves: it is said once, and no request goes the longer way for nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_servers import FakeServer
from served import BODY, Served

from engine.errors import ConfigError
from entrypoints.router import servers
from entrypoints.router.run import apart
from entrypoints.router.servers import Moves, Server, why_not

LAYOUT = {"weights": "w", "block_size": "16", "kv_cache_dtype": "float32"}


def server(url: str, role: str | None, **layout: str) -> Server:
    made = Server(url)
    made.moves = Moves(role, {**LAYOUT, **layout})
    return made


def test_who_moves_pages_to_whom() -> None:
    prefill, decode, both = server("p", "kv_producer"), server("d", "kv_consumer"), server("b", "kv_both")
    assert why_not(prefill, decode) is None and why_not(both, both) is None
    assert why_not(Server("another engine's"), decode) is None and why_not(prefill, Server("another engine's")) is None
    assert "decode server p has kv_role kv_producer: start it with --role decode" in str(why_not(prefill, prefill))
    assert "prefill server x has kv_role None: start it with --role prefill" in str(why_not(server("x", None), decode))
    unlike = server("d", "kv_consumer", block_size="32", kv_cache_dtype="int8")
    differ = "prefill server p and decode server d differ: block_size 16 and 32, kv_cache_dtype float32 and int8"
    assert why_not(prefill, unlike) == differ


@pytest.fixture(params=["layout", "no role"])
def unlike(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(servers, "CHECK_S", 0.1)
    prefill = FakeServer(kv_role="kv_producer", kv_layout=LAYOUT)
    if request.param == "layout":
        made = Served(1.0, prefill, kv_role="kv_consumer", kv_layout={**LAYOUT, "block_size": "32"})
    else:
        made = Served(1.0, prefill, kv_role=None, kv_layout={})
    yield made
    made.close()


def test_a_pair_that_moves_nothing_is_told_once_and_is_no_two_hops(
    unlike: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert unlike.post(BODY).json()["text"] == "answer"
    assert unlike.decoded == [BODY] * 3 and not unlike.prefill.asked
    assert (unlike.router.two_hops, unlike.router.one_hop, unlike.router.prefill_failures) == (0, 3, 3)
    told = [message for name, _, message in caplog.record_tuples if name == "pageloom.router"]
    assert len(told) == 2, "one of each decode server"
    assert all("block_size 16 and 32" in line or "start it with --role decode" in line for line in told)


def test_the_decode_server_that_can_take_pages_is_asked_first() -> None:
    prefill = FakeServer(kv_role="kv_producer", kv_layout=LAYOUT)
    served = Served(1.0, prefill, kv_role="kv_consumer", kv_layout=LAYOUT)
    served.other.moves = {"kv_role": "kv_consumer", "kv_layout": {}}
    try:
        for _ in range(2):
            assert served.post(BODY).status_code == 200
        assert len(served.decode.asked) == 2 and served.router.two_hops == 2
        served.decode.close()
        assert served.post(BODY).status_code == 200
        assert served.other.asked == [BODY] and served.router.two_hops == 2
        served.decode = FakeServer()
    finally:
        served.close()


@pytest.mark.parametrize(
    ("prefill", "decode", "host", "says"),
    [
        (
            ["http://127.0.0.1:1"],
            ["http://localhost:1/"],
            "127.0.0.1",
            "both name http://127.0.0.1:1: a server has one",
        ),
        (
            ["http://127.0.0.1:1"],
            ["http://localhost:7"],
            "127.0.0.1",
            "http://localhost:7 is this router's own address",
        ),
        (["http://127.0.0.1:7"], ["http://127.0.0.1:1"], "0.0.0.0", "http://127.0.0.1:7 is this router's own address"),
    ],
)
def test_a_router_in_front_of_itself_or_of_one_server_in_both_roles_is_refused(
    prefill: list[str], decode: list[str], host: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        apart(prefill, decode, host, 7)


def test_a_server_that_is_named_twice_is_one() -> None:
    first = ["http://127.0.0.1:1", "http://localhost:1", "http://127.0.0.1:2", "http://127.0.0.1:1/a"]
    assert apart(first, ["http://192.0.2.1:7"], "127.0.0.1", 7) == (
        ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:1/a"],
        ["http://192.0.2.1:7"],
    )
