"""Responses that may be asked for again, or gone on from: bounded in bytes and in time, in memory or in a file."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigError
from entrypoints.server.responses_api.fields import ResponseObject

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, previous TEXT, used REAL NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS responses_used ON responses (used);
CREATE TABLE IF NOT EXISTS items (
    id TEXT NOT NULL, response TEXT NOT NULL, body BLOB NOT NULL, PRIMARY KEY (id, response));
CREATE INDEX IF NOT EXISTS items_response ON items (response);
"""
_MOST_TURNS = 4096
_PATIENCE_S = 0.2


class Stored(msgspec.Struct):
    """`input`: what came with it, each with an id; not what came before."""

    response: ResponseObject
    input: list[dict[str, Any]]


_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(Stored)


class ResponseStore:
    """Methods may be called from any thread. What has not been used for longest goes first; going on from a response
    uses all that came before it."""

    def __init__(self, file: Path | None, most_bytes: int, seconds: float) -> None:
        """None: in memory. Raises `ConfigError`."""
        self._most_bytes, self._seconds = most_bytes, seconds
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(
                file or ":memory:", check_same_thread=False, isolation_level=None, timeout=_PATIENCE_S
            )
            self._database.execute("PRAGMA locking_mode=EXCLUSIVE")  # one server for a file: it counts its bytes
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(_SCHEMA)
            found = self._database.execute("SELECT COALESCE(SUM(size), 0) FROM responses").fetchone()
        except sqlite3.Error as error:
            raise ConfigError(f"the response store {file} cannot be opened: {error}") from error
        self._bytes: int = found[0]

    def keep(self, stored: Stored) -> None:
        """Unless it is not to be stored."""
        if stored.response.store:
            self.put(stored)

    def put(self, stored: Stored) -> None:
        """New, or in place of itself."""
        response = stored.response
        body = _encoder.encode(stored)
        items = {item["id"]: item for item in (*stored.input, *response.output) if isinstance(item.get("id"), str)}
        with self._lock:
            self._delete([response.id])
            row = (response.id, response.previous_response_id, time.time(), len(body), body)
            with self._database:
                self._database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", row)
                rows = [(name, response.id, msgspec.json.encode(item)) for name, item in items.items()]
                self._database.executemany("INSERT OR IGNORE INTO items VALUES (?, ?, ?)", rows)
            self._bytes += len(body)
            self._evict()

    def get(self, name: str) -> Stored | None:
        with self._lock:
            self._evict()
            found = self._database.execute("SELECT body FROM responses WHERE id = ?", (name,)).fetchone()
        return None if found is None else _decoder.decode(found[0])

    def delete(self, name: str) -> bool:
        with self._lock:
            return bool(self._delete([name]))

    def item(self, name: str) -> dict[str, Any] | None:
        """The first that was stored under its id: who brings another cannot take its place."""
        with self._lock:
            found = self._database.execute(
                "SELECT body FROM items WHERE id = ? ORDER BY rowid LIMIT 1", (name,)
            ).fetchone()
        return None if found is None else msgspec.json.decode(found[0])

    def use(self, name: str) -> Stored | None:
        """As `get`, and it counts as used."""
        with self._lock:
            self._database.execute("UPDATE responses SET used = ? WHERE id = ?", (time.time(), name))
        return self.get(name)

    def turns(self, name: str) -> list[Stored] | None:
        """The response and all before it, the first one first; None where one of them is gone."""
        return _turns(name, self.use)

    def _evict(self) -> None:
        oldest = time.time() - self._seconds
        rows = self._database.execute("SELECT id FROM responses WHERE used < ?", (oldest,)).fetchall()
        self._delete([row[0] for row in rows])
        while self._bytes > self._most_bytes:
            (name,) = self._database.execute("SELECT id FROM responses ORDER BY used LIMIT 1").fetchone()
            self._delete([name])

    def _delete(self, names: list[str]) -> int:
        deleted = 0
        for name in names:
            found = self._database.execute("SELECT size FROM responses WHERE id = ?", (name,)).fetchone()
            if found is None:
                continue
            with self._database:
                self._database.execute("DELETE FROM items WHERE response = ?", (name,))
                self._database.execute("DELETE FROM responses WHERE id = ?", (name,))
            self._bytes -= found[0]
            deleted += 1
        return deleted

    def close(self) -> None:
        with self._lock:
            self._database.close()


class PassingResponses:
    """As a socket sees its responses: those of the store, and of its own also those that are not to be stored, which
    are kept in `passing` until it `forget`s them."""

    def __init__(self, store: ResponseStore, passing: ResponseStore) -> None:
        self._store, self._passing = store, passing
        self._own: set[str] = set()

    def keep(self, stored: Stored) -> None:
        if stored.response.store:
            self._store.put(stored)
        else:
            self._own.add(stored.response.id)
            self._passing.put(stored)

    def item(self, name: str) -> dict[str, Any] | None:
        return self._store.item(name)

    def turns(self, name: str) -> list[Stored] | None:
        return _turns(name, lambda each: self._passing.get(each) if each in self._own else self._store.use(each))

    def forget(self) -> None:
        for name in self._own:
            self._passing.delete(name)
        self._own.clear()


def _turns(name: str | None, find: Callable[[str], Stored | None]) -> list[Stored] | None:
    turns: list[Stored] = []
    while name is not None and len(turns) < _MOST_TURNS:
        stored = find(name)
        if stored is None:
            return None
        turns.append(stored)
        name = stored.response.previous_response_id
    return turns[::-1] if name is None else None


Responses = ResponseStore | PassingResponses
"""what a conversation may go on from, and is kept in"""
