"""The store of `/v1/responses`: what it keeps, for how long, and for whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from entrypoints.server.responses_api.fields import ResponseObject
from entrypoints.server.responses_api.store import ResponseStore, Stored


def stored(name: str, previous: str | None = None, size: int = 10) -> Stored:
    response = ResponseObject(id=name, created_at=0, model="m", status="completed", previous_response_id=previous)
    return Stored(response, [{"id": f"i-{name}", "content": "x" * size}])


def test_the_store_lets_go_of_what_was_not_used_for_longest() -> None:
    store = ResponseStore(None, 12_000, 1000)
    for name, previous in (("a", None), ("b", "a"), ("c", None)):
        store.put(stored(name, previous, 3000))
    assert [turn.response.id for turn in store.turns("b") or ()] == ["a", "b"]
    store.put(stored("d", None, 3000))
    assert store.get("c") is None and store.get("b") is not None and store.item("i-c") is None
    assert store.item("i-a") == {"id": "i-a", "content": "x" * 3000}
    assert store.delete("a") and not store.delete("a") and store.turns("b") is None
    store.put(stored("e", None, 20_000))
    assert store.get("e") is None and store.get("d") is None, "what is larger than all of it is not kept"


def test_the_store_lets_go_of_what_is_old() -> None:
    store = ResponseStore(None, 10**6, 0.0)
    store.put(stored("a"))
    assert store.get("a") is None


def test_a_store_in_a_file_outlives_its_server(tmp_path: Path) -> None:
    file = tmp_path / "responses.db"
    store = ResponseStore(file, 10**6, 1000)
    store.put(stored("a"))
    store.close()
    again = ResponseStore(file, 10**6, 1000)
    found = again.get("a")
    assert found is not None and found.input[0]["id"] == "i-a"
    again.put(stored("a", size=20))
    assert again.delete("a") and again._bytes == 0


def test_a_file_is_one_servers(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r.db", 10**6, 1000)
    store.put(stored("a"))
    with pytest.raises(ConfigError, match="cannot be opened: database is locked"):
        ResponseStore(tmp_path / "r.db", 10**6, 1000)
    store.close()
