"""The store of `/v1/responses`: what it keeps, for how long, and for whom."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError, InvalidRequestError
from engine.limits import Limits
from entrypoints.server.responses_api.fields import ResponseObject
from entrypoints.server.responses_api.handler import StoredItems
from entrypoints.server.responses_api.store import PassingResponses, ResponseStore, Stored


def stored(name: str, previous: str | None = None, size: int = 10) -> Stored:
    response = ResponseObject(id=name, created_at=0, model="m", status="completed", previous_response_id=previous)
    return Stored(response, [{"id": f"i-{name}", "content": "x" * size}])


def before(store: ResponseStore, name: str, **limits: Any) -> list[list[dict[str, Any]]]:
    return StoredItems(store, Limits(**limits)).before(name)


def item(store: ResponseStore, name: str) -> dict[str, Any] | None:
    return StoredItems(store, Limits()).item(name)


def test_the_store_lets_go_of_what_was_not_used_for_longest() -> None:
    store = ResponseStore(None, 12_000, 1000)
    for name, previous in (("a", None), ("b", "a"), ("c", None)):
        store.put(stored(name, previous, 3000))
    assert [items[0]["id"] for items in before(store, "b")] == ["i-a", "i-b"]
    store.put(stored("d", None, 3000))
    assert store.shown("c") is None and store.shown("b") is not None and item(store, "i-c") is None
    assert item(store, "i-a") == {"id": "i-a", "content": "x" * 3000}
    assert store.delete("a") and not store.delete("a")
    with pytest.raises(InvalidRequestError, match="'a' not found"):
        before(store, "b")
    store.put(stored("e", None, 20_000))
    assert store.shown("e") is None and store.shown("d") is None, "what is larger than all of it is not kept"


def test_the_store_lets_go_of_what_is_old() -> None:
    store = ResponseStore(None, 10**6, 0.0)
    store.put(stored("a"))
    assert store.shown("a") is None


def test_processes_of_one_server_share_a_file_and_its_bounds(tmp_path: Path) -> None:
    one, other = (ResponseStore(tmp_path / "responses", 12_000, 1000, shared=True) for _ in range(2))
    one.put(stored("a", None, 3000))
    other.put(stored("b", "a", 3000))
    assert [items[0]["id"] for items in before(one, "b")] == ["i-a", "i-b"]
    other.put(stored("c", None, 3000))
    other.put(stored("d", None, 3000))
    kept = [[name for name in "abcd" if each.shown(name) is not None] for each in (one, other)]
    assert kept[0] == kept[1] and len(kept[0]) == 3 and "d" in kept[0], "the bound is of all together"
    assert one.delete("d") and other.shown("d") is None and not other.delete("d")
    other.put(stored("e", None, 20_000))
    assert not any(each.shown(name) for each in (one, other) for name in "abcde")
    one.put(stored("f", None, 3000))
    assert other.shown("f") is not None
    for each in (one, other):
        each.close()


def test_a_store_in_a_file_outlives_its_server(tmp_path: Path) -> None:
    file = tmp_path / "responses.db"
    store = ResponseStore(file, 10**6, 1000)
    store.put(stored("a"))
    store.close()
    again = ResponseStore(file, 10**6, 1000)
    found = again.input("a")
    assert found is not None and found[0]["id"] == "i-a"
    again.put(stored("a", size=20))
    assert again.delete("a") and again._bytes == 0


def test_a_file_is_one_servers(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r.db", 10**6, 1000)
    store.put(stored("a"))
    with pytest.raises(ConfigError, match="cannot be opened: database is locked"):
        ResponseStore(tmp_path / "r.db", 10**6, 1000)
    store.close()


def test_a_file_of_another_version_is_refused_and_keeps_what_it_holds(tmp_path: Path) -> None:
    file = tmp_path / "r.db"
    with sqlite3.connect(file) as other:
        other.execute("CREATE TABLE responses (id TEXT PRIMARY KEY, body BLOB NOT NULL)")
    other.close()
    with pytest.raises(ConfigError, match="another version's"):
        ResponseStore(file, 10**6, 1000)
    again = sqlite3.connect(file)
    assert again.execute("SELECT COUNT(*) FROM sqlite_master WHERE type = 'table'").fetchone() == (1,)
    again.close()


def test_going_on_reads_what_was_said_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what a response shows besides, nor log-probabilities."""
    store = ResponseStore(None, 10**8, 1000)
    made = stored("a")
    made.response.metadata = {"k": "v" * 10**6}
    part = {"type": "output_text", "text": "t", "annotations": [], "logprobs": [{"token": "t" * 10**6}]}
    made.response.output = [{"type": "message", "id": "o", "role": "assistant", "content": [part]}]
    store.put(made)
    ((said, answered),) = before(store, "a", continued_bytes=300)
    assert said["id"] == "i-a" and answered["content"] == [{"type": "output_text", "text": "t", "annotations": []}]
    assert json.loads(store.shown("a") or b"")["output"][0]["content"] == [part]
    assert store.input("a") == [said]


def test_what_a_request_goes_on_from_is_bounded_in_bytes_and_turns_before_it_is_read() -> None:
    store = ResponseStore(None, 10**8, 1000)
    for number in range(5):
        store.put(stored(str(number), str(number - 1) if number else None, 1000))
    assert len(before(store, "4", continued_bytes=6000)) == 5
    for limits in ({"continued_bytes": 4000}, {"continued_values": 8}, {"messages": 4}):
        with pytest.raises(InvalidRequestError) as refused:
            before(store, "4", **limits)
        assert refused.value.field == "previous_response_id" and f"--limit {next(iter(limits))}" in str(refused.value)
    items = StoredItems(store, Limits(continued_bytes=4000))
    assert all(items.item("i-0") for _ in range(3))
    with pytest.raises(InvalidRequestError, match="continued_bytes"):
        items.item("i-0")


def test_a_socket_that_is_closed_keeps_nothing_that_comes_late() -> None:
    store, passing = ResponseStore(None, 10**6, 1000), ResponseStore(None, 10**6, 1000)
    socket = PassingResponses(store, passing)
    for name in ("a", "b"):
        late = stored(name)
        late.response.store = False
        socket.keep(late)
        assert (passing.shown(name) is None) == (name == "b")
        socket.forget()
    assert passing.shown("a") is None
