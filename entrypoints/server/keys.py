"""Who may ask: one key for all, or a file of clients, each with its key's hash, scopes, share and quotas (`--keys`).

The file is TOML, and is read again when it changes and on SIGHUP; what is wrong in it is told in the log, and the keys
before it stay.

    [[keys]]
    name = "alice"
    sha256 = "…"                   # of the key: printf %s "$KEY" | sha256sum
    scopes = ["infer"]             # and "metrics", "admin"
    weight = 1.0                   # of its share, with --scheduling-policy fair
    requests_per_minute = 600      # these three: without one, as many as it wants
    tokens_per_minute = 100000     # of prompts and answers; known when a request ends
    concurrency = 16
    shares_cache = false           # prefixes with others that share them
    priority_from = 0              # the most urgent priority that it may ask for
"""

from __future__ import annotations

import copy
import hashlib
import hmac
import logging
import re
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from engine.errors import ConfigError
from engine.request import NOBODY, Tenant
from entrypoints.server.counts import Counts, OwnCounts, SharedMemory
from entrypoints.server.quotas import Quotas, RateLimitedError

Scope = Literal["infer", "metrics", "admin"]
SCOPES: tuple[Scope, ...] = ("infer", "metrics", "admin")
_MOST_KEYS = 10_000
_MOST_BYTES = 16 * 1024 * 1024
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_A_COUNT = "a whole number from 1 to 2**53"
_FORMS = {
    "name": "1 to 64 letters, digits and _.@:-, of which the first is a letter or a digit",
    "sha256": 'the 64 hex digits that `printf %s "$KEY" | sha256sum` prints',
    "scopes": f"a list of {', '.join(SCOPES[:-1])} and {SCOPES[-1]}, or of some of them",
    "weight": "a number from 0.001 to 1000",
    "requests_per_minute": _A_COUNT,
    "tokens_per_minute": _A_COUNT,
    "concurrency": _A_COUNT,
    "shares_cache": "true or false",
    "priority_from": "a whole number",
}
"""of a key's fields, as their types have them"""

logger = logging.getLogger("pageloom.server")


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the file's; its fields are the file's."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@:-]{0,63}\Z")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
    scopes: tuple[Scope, ...] = ("infer",)
    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    concurrency: _Count | None = None
    shares_cache: bool = False
    priority_from: int = 0


class _KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: Annotated[list[Key], msgspec.Meta(min_length=1, max_length=_MOST_KEYS)]


class Used:
    """By one client since the start, whatever key it had."""

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.refused = Counter[str]()
        """by quota"""


class Client:
    """Who holds a key."""

    def __init__(self, clock: Callable[[], float], counts: Counts) -> None:
        self.name = ""
        """none: of the one key for all"""
        self.scopes = frozenset(SCOPES)
        self.tenant = NOBODY
        self._salt: bytes | None = None
        self.priority_from = -(2**63)
        self.sha256 = ""
        self.quotas = Quotas(clock, counts)
        self.used = Used()

    def set(self, key: Key) -> None:
        self.name, self.scopes, self.tenant = key.name, frozenset(key.scopes), Tenant(key.name, key.weight)
        self._salt = None if key.shares_cache else bytes.fromhex(key.sha256)
        self.priority_from, self.sha256 = key.priority_from, key.sha256.lower()
        self.quotas.set(key.requests_per_minute, key.tokens_per_minute, key.concurrency)

    def cache_salt(self, given: str | None) -> str | None:
        """Prefixes are found only by whom they are for: nobody else can know what comes of the key's hash. It is the
        same in all servers that have the file, which may hand prompts to each other."""
        if self._salt is None:
            return given
        return hmac.new(self._salt, (given or "").encode(), "sha256").hexdigest()

    def revoke(self) -> Client:
        """Whatever is still open under the old key is refused from now on. Returns who goes on, with what was used, and
        what still runs is going to use."""
        other = copy.copy(self)
        self.scopes = frozenset()
        return other

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A request goes on behind its answer."""
        self.quotas.hold()
        try:
            yield
        finally:
            self.quotas.end()

    @contextmanager
    def one(self) -> Iterator[None]:
        """A request, as long as it lasts. Raises `RateLimitedError`."""
        try:
            self.quotas.begin()
        except RateLimitedError as error:
            self.used.refused[error.quota] += 1
            raise
        self.used.requests += 1
        try:
            yield
        finally:
            self.quotas.end()

    def use(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> None:
        self.used.prompt_tokens += prompt_tokens
        self.used.cached_tokens += cached_tokens
        self.used.generated_tokens += generated_tokens
        self.quotas.use(prompt_tokens + generated_tokens)


CLIENT: ContextVar[Client | None] = ContextVar("client", default=None)
"""whose request a task serves; None: nobody needs a key"""


def client_name() -> str:
    """Of whose request this task serves."""
    client = CLIENT.get()
    return "" if client is None else client.name


class Keyring:
    def __init__(self, *, key: str | None = None, file: Path | None = None, memory: SharedMemory | None = None) -> None:
        """One of both. `memory`: where what clients use is counted, if other processes answer them, too. Raises
        `ConfigError`."""
        self._file, self._memory = file, memory
        self._by_digest: dict[bytes, Client] = {}
        self._by_name: dict[str, Client] = {}
        self._seen: object = None
        self._looked_at = 0.0
        if key is not None:
            self._by_digest[hashlib.sha256(key.encode()).digest()] = Client(time.monotonic, OwnCounts())
        if file is not None:
            self._seen = _state_of(file)
            self._take(read_keys(file))

    @property
    def clients(self) -> list[Client]:
        """Those that the file names, and those that it has named."""
        return list(self._by_name.values())

    @property
    def is_read_again(self) -> bool:
        return self._file is not None

    def find(self, key: bytes) -> Client | None:
        """By its hash: how long that takes tells nothing of the keys."""
        return self._by_digest.get(hashlib.sha256(key).digest())

    def look_again(self, now: float, anyway: bool = False) -> None:
        """Reads the file if it has changed since; looks each second at most."""
        if self._file is None or (now < self._looked_at + 1 and not anyway):
            return
        self._looked_at = now
        state = _state_of(self._file)
        if state == self._seen and not anyway:
            return
        self._seen = state
        try:
            self._take(read_keys(self._file))
            logger.info("%d keys were read from %s", len(self._by_digest), self._file)
        except ConfigError as error:
            logger.error("%s; the keys before it stay", error)

    def _take(self, keys: list[Key]) -> None:
        new = {key.name: self._new(key.name) for key in keys if key.name not in self._by_name}
        self._by_digest, named = {}, {key.name for key in keys}
        for name, client in self._by_name.items():
            if name not in named:
                client.scopes = frozenset()
        for key in keys:
            client = self._by_name.get(key.name) or new[key.name]
            if client.sha256 not in ("", key.sha256.lower()):
                client = client.revoke()
            client.set(key)
            self._by_name[key.name] = self._by_digest[bytes.fromhex(key.sha256)] = client

    def _new(self, name: str) -> Client:
        return Client(time.monotonic, OwnCounts() if self._memory is None else self._memory.of(name))


def read_keys(file: Path) -> list[Key]:
    """Raises `ConfigError`."""
    try:
        with file.open("rb") as stream:
            raw = stream.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise ConfigError(f"--keys: {file} is longer than {_MOST_BYTES} bytes")
        keys = msgspec.toml.decode(raw, type=_KeyFile).keys
    except OSError as error:
        raise ConfigError(f"--keys: cannot read {file}: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"--keys: {file}: {_in_words(error, raw)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"--keys: {file}: {error}") from error
    for what in ("name", "sha256"):
        ((value, count),) = Counter(getattr(key, what).lower() for key in keys).most_common(1)
        if count > 1:
            raise ConfigError(f"--keys: {file}: {count} keys have the {what} {value}")
    return keys


def _in_words(error: msgspec.ValidationError, raw: bytes) -> str:
    """Which entry is meant, and how what is wrong there must look. A field `sha256` is not shown: it may be the key."""
    found = tomllib.loads(raw.decode())
    at = re.search(r"- at `\$\.keys\[(\d+)\](?:\.(\w+))?", str(error))
    if at is None:
        others, keys = ", ".join(each for each in found if each != "keys"), found.get("keys", [])
        got = others or (f"{len(keys)} of them" if isinstance(keys, list) else "keys that are none")
        return f"it must hold 1 to {_MOST_KEYS} tables [[keys]] with name and sha256, and nothing else, got {got:.100}"
    entry, which = found["keys"][int(at[1])], f"key {int(at[1]) + 1}"
    if not isinstance(entry, dict):
        return f"{which} must be a table [[keys]] with name and sha256"
    if isinstance(entry.get("name"), str) and at[2] != "name":
        which += f" ({entry['name'][:64]})"
    if at[2] is not None:
        value = entry[at[2]]
        got = f"{len(str(value))} characters" if at[2] == "sha256" else repr(value)[:100]
        return f"{which}: {at[2]} must be {_FORMS[at[2]]}, got {got}"
    missing = [each for each in ("name", "sha256") if each not in entry]
    if missing:
        return f"{which}: {missing[0]} is missing: {_FORMS[missing[0]]}"
    other = next(each for each in entry if each not in _FORMS)
    near = get_close_matches(other, _FORMS, 1)
    hint = f"is it {near[0]}?" if near else f"there are {', '.join(_FORMS)}"
    return f"{which}: there is no field {other[:64]}; {hint}"


def _state_of(file: Path) -> object:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
