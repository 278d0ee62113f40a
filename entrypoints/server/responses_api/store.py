"""Responses that may be asked for again, or gone on from: bounded in bytes and in time, in memory or in a file."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.errors import ConfigError
from entrypoints.server.bodies import values_in
from entrypoints.server.keys import client_name
from entrypoints.server.responses_api.fields import ResponseObject

_LAYOUT = 1
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS responses (id TEXT PRIMARY KEY, previous TEXT, used REAL NOT NULL, "
    "size INTEGER NOT NULL, shown BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS responses_used ON responses (used)",
    "CREATE TABLE IF NOT EXISTS items (response TEXT NOT NULL, place INTEGER NOT NULL, given INTEGER NOT NULL, "
    "id TEXT, size INTEGER NOT NULL, marks INTEGER NOT NULL, body BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS items_response ON items (response, place)",
    "CREATE INDEX IF NOT EXISTS items_id ON items (id)",
    f"PRAGMA user_version={_LAYOUT}",
)
"""The `size` of a response is that of `shown` and of all its items. `given`: to the model, not by it. `marks`: of an
item's values."""
_PATIENCE_S = 0.2
_SHARED_PATIENCE_S = 10.0
"""for another process of this server to be done with it"""
Item = dict[str, Any]
Take = Callable[[int, int], None]
"""told how many bytes and values are about to be read; may raise"""
_decoder = msgspec.json.Decoder(Item)


class Stored(NamedTuple):
    """`input`: what came with it, each with an id; not what came before."""

    response: ResponseObject
    input: list[Item]


class Turn(NamedTuple):
    """What is gone on from. `items`: its input, then what the model made of it, without log-probabilities."""

    previous: str | None
    items: list[Item]


class ResponseStore:
    """Methods may be called from any thread of the task that serves a request: nobody finds what another key's holder
    has stored (`--keys`). What has not been used for longest goes first. What a response shows is stored apart from its
    items: whoever goes on from it reads only these."""

    def __init__(self, file: Path | None, most_bytes: int, seconds: float, *, shared: bool = False) -> None:
        """None: in memory. `shared`: by the processes of one server. Raises `ConfigError`."""
        self._most_bytes, self._seconds, self._shared = most_bytes, seconds, shared
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(
                file or ":memory:",
                check_same_thread=False,
                isolation_level=None,
                timeout=_SHARED_PATIENCE_S if shared else _PATIENCE_S,
            )
            if not shared:  # one server for a file: it counts its bytes
                self._database.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._lay_out(file)
            self._bytes = self._size()
        except sqlite3.Error as error:
            raise ConfigError(f"the response store {file} cannot be opened: {error}") from error

    def _lay_out(self, file: Path | None) -> None:
        with self._database:
            self._database.execute("BEGIN IMMEDIATE")
            (layout,) = self._database.execute("PRAGMA user_version").fetchone()
            (tables,) = self._database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            fits = not tables or layout == _LAYOUT
            for statement in _SCHEMA if fits else ():
                self._database.execute(statement)
        if not fits:
            self._database.close()
            raise ConfigError(f"the response store {file} is another version's: name another file, or remove it")

    def keep(self, stored: Stored) -> None:
        """Unless it is not to be stored."""
        if stored.response.store:
            self.put(stored)

    def put(self, stored: Stored) -> None:
        """New, or in place of itself."""
        response = stored.response
        name, shown = _own(response.id), msgspec.json.encode(response)
        items = [*stored.input, *map(_without_logprobs, response.output)]
        bodies = [msgspec.json.encode(item) for item in items]
        size = len(shown) + sum(map(len, bodies))
        rows = [
            (name, place, place < len(stored.input), _id_of(item), len(body), values_in(body), body)
            for place, (item, body) in enumerate(zip(items, bodies, strict=True))
        ]
        with self._lock:
            row = (name, response.previous_response_id, time.time(), size, shown)
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._delete_one(name)
                self._database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?)", row)
                self._database.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            self._bytes = self._size() if self._shared else self._bytes + size
            self._evict()

    def shown(self, name: str) -> bytes | None:
        """The response, as JSON."""
        with self._lock:
            self._evict()
            found = self._database.execute("SELECT shown FROM responses WHERE id = ?", (_own(name),)).fetchone()
        return None if found is None else found[0]

    def input(self, name: str) -> list[Item] | None:
        name = _own(name)
        with self._lock:
            self._evict()
            if self._database.execute("SELECT 1 FROM responses WHERE id = ?", (name,)).fetchone() is None:
                return None
            bodies = self._bodies("response = ? AND given", name)
        return list(map(_decoder.decode, bodies))

    def delete(self, name: str) -> bool:
        with self._lock:
            return bool(self._delete([_own(name)]))

    def item(self, name: str, take: Take) -> Item | None:
        """The first that was stored under its id: who brings another cannot take its place."""
        with self._lock:
            found = self._database.execute(
                "SELECT size, marks, body FROM items WHERE id = ? ORDER BY rowid LIMIT 1", (_own(name),)
            ).fetchone()
        if found is None:
            return None
        size, marks, body = found
        take(size, marks)
        return _decoder.decode(body)

    def turn(self, name: str, take: Take) -> Turn | None:
        """It counts as used."""
        name = _own(name)
        with self._lock:
            self._evict()
            found = self._database.execute("SELECT previous FROM responses WHERE id = ?", (name,)).fetchone()
            if found is None:
                return None
            sums = "SELECT COALESCE(SUM(size), 0), COALESCE(SUM(marks), 0) FROM items WHERE response = ?"
            take(*self._database.execute(sums, (name,)).fetchone())
            self._database.execute("UPDATE responses SET used = ? WHERE id = ?", (time.time(), name))
            bodies = self._bodies("response = ?", name)
        return Turn(found[0], list(map(_decoder.decode, bodies)))

    def _bodies(self, which: str, response: str) -> list[bytes]:
        rows = self._database.execute(f"SELECT body FROM items WHERE {which} ORDER BY place", (response,))
        return [body for (body,) in rows]

    def _size(self) -> int:
        (size,) = self._database.execute("SELECT COALESCE(SUM(size), 0) FROM responses").fetchone()
        return int(size)

    def _evict(self) -> None:
        oldest = time.time() - self._seconds
        rows = self._database.execute("SELECT id FROM responses WHERE used < ?", (oldest,)).fetchall()
        self._delete([row[0] for row in rows])
        while self._bytes > self._most_bytes:
            oldest_one = self._database.execute("SELECT id FROM responses ORDER BY used LIMIT 1").fetchone()
            if oldest_one is None:  # another process was faster
                self._bytes = self._size()
                return
            self._delete([oldest_one[0]])

    def _delete(self, names: list[str]) -> int:
        deleted = 0
        for name in names:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                deleted += self._delete_one(name)
        return deleted

    def _delete_one(self, name: str) -> bool:
        """Of a transaction."""
        found = self._database.execute("SELECT size FROM responses WHERE id = ?", (name,)).fetchone()
        if found is None:
            return False
        self._database.execute("DELETE FROM items WHERE response = ?", (name,))
        self._database.execute("DELETE FROM responses WHERE id = ?", (name,))
        self._bytes -= found[0]
        return True

    def close(self) -> None:
        with self._lock:
            self._database.close()


class PassingResponses:
    """As a socket sees its responses: those of the store, and of its own also those that are not to be stored, which
    are kept in `passing` until it `forget`s them."""

    def __init__(self, store: ResponseStore, passing: ResponseStore) -> None:
        self._store, self._passing = store, passing
        self._lock = threading.Lock()
        self._own: set[str] = set()
        self._ended = False

    def keep(self, stored: Stored) -> None:
        if stored.response.store:
            self._store.put(stored)
            return
        with self._lock:
            if not self._ended:
                self._own.add(stored.response.id)
                self._passing.put(stored)

    def item(self, name: str, take: Take) -> Item | None:
        return self._store.item(name, take)

    def turn(self, name: str, take: Take) -> Turn | None:
        return (self._passing if name in self._own else self._store).turn(name, take)

    def forget(self) -> None:
        """Also what a thread has yet to keep."""
        with self._lock:
            self._ended = True
            for name in self._own:
                self._passing.delete(name)


Responses = ResponseStore | PassingResponses
"""what a conversation may go on from, and is kept in"""


def _id_of(item: Item) -> str | None:
    name = item.get("id")
    return _own(name) if isinstance(name, str) else None


def _own(name: str) -> str:
    """The name of what is stored, among those of all clients."""
    client = client_name()
    return f"{client}\n{name}" if client else name


def _without_logprobs(item: Mapping[str, Any]) -> Item:
    """Nobody goes on from them, and they are a hundred times as long as what is said."""
    content = item.get("content")
    if item.get("type") != "message" or not isinstance(content, Sequence):
        return dict(item)
    return {**item, "content": [{key: part[key] for key in part if key != "logprobs"} for part in content]}
