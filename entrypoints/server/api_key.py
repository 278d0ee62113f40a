"""Keys: where they come from, and who is let in."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import ConfigError
from entrypoints.server.counts import SharedMemory
from entrypoints.server.error_shape import error_body
from entrypoints.server.errors import describe, error_response
from entrypoints.server.keys import CLIENT, Client, Keyring
from entrypoints.server.load import COUNTED
from entrypoints.server.paths import route_path
from entrypoints.server.quotas import RateLimitedError
from entrypoints.server.request_ids import add_header, request_id_of
from entrypoints.server.scopes import scope_of

VARIABLE = "PAGELOOM_API_KEY"
OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/ping"})
"""which machines ask that hold no key, and which tell nothing of anybody's requests; `/health` tells a router in front
which pages this server moves"""

logger = logging.getLogger("pageloom.server")


class ApiKeyGuard:
    """Refuses requests without `Authorization: Bearer KEY` or `x-api-key: KEY`, which is Anthropic's, those with a key
    that is not for their route, and those beyond its quotas; plain ASGI, so that routes still see disconnects."""

    def __init__(self, app: ASGIApp, keyring: Keyring, unguarded: frozenset[str] = frozenset()) -> None:
        """`unguarded`: further paths that nobody needs a key for, each as it is written."""
        self._app, self._keyring, self._open = app, keyring, OPEN_PATHS | unguarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or route_path(scope) in self._open:
            await self._app(scope, receive, send)
            return
        client = self._client(scope)
        if client is None:
            body = error_body("missing or wrong API key", "authentication_error", None, "invalid_api_key")
            await error_response(scope, 401, body, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        needed = scope_of(route_path(scope))
        if needed is not None and needed not in client.scopes:
            body = error_body(f"this key lacks the scope {needed!r}", "permission_error", None, "insufficient_scope")
            await error_response(scope, 403, body)(scope, receive, send)
            return
        token = CLIENT.set(client)
        try:
            await self._admitted(client, scope, receive, send)
        finally:
            CLIENT.reset(token)

    async def _admitted(self, client: Client, scope: Scope, receive: Receive, send: Send) -> None:
        """Turns of a WebSocket are counted by who takes them."""
        if scope["type"] != "http" or route_path(scope) not in COUNTED:
            await self._app(scope, receive, send)
            return
        try:
            with client.one():
                _show(client, scope)
                await self._app(scope, receive, send)
        except RateLimitedError as error:  # nothing but `one` raises it
            _show(client, scope)
            status, body, headers = describe(error, request_id_of(scope))
            await error_response(scope, status, body, headers)(scope, receive, send)

    def _client(self, scope: Scope) -> Client | None:
        """One of the two headers will do; one that is there twice does not count."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        own = [value for name, value in scope["headers"] if name == b"x-api-key"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        bearer = self._keyring.find(key.strip()) if scheme.lower() == b"bearer" else None
        if bearer is not None or len(own) != 1:
            return bearer
        return self._keyring.find(own[0].strip())


def _show(client: Client, scope: Scope) -> None:
    """Its quotas, under OpenAI's names."""
    for name, shown in client.quotas.shown().items():
        add_header(scope, f"x-ratelimit-limit-{name}", str(shown.limit))
        add_header(scope, f"x-ratelimit-remaining-{name}", str(shown.remaining))
        add_header(scope, f"x-ratelimit-reset-{name}", f"{shown.reset_s:.3f}s")


def take_keys(
    key: str | None, key_file: Path | None, keys: Path | None, memory: SharedMemory | None = None
) -> Keyring | None:
    """None: nobody needs a key. `memory`: as `Keyring`'s. Raises `ConfigError`."""
    one = take_api_key(key, key_file)
    if keys is not None:
        if one is not None:
            raise ConfigError(f"--keys has the keys of all clients: unset {VARIABLE}")
        return Keyring(file=keys, memory=memory)
    return None if one is None else Keyring(key=one)


def take_api_key(given: str | None, file: Path | None) -> str | None:
    """The key from `--api-key`, else from `--api-key-file`, else from PAGELOOM_API_KEY; None: nobody needs one. The
    variable is removed, so that no child process inherits it. Raises `ConfigError`."""
    inherited = os.environ.pop(VARIABLE, None)
    if given is not None:
        logger.warning("--api-key shows the key to whoever lists processes; --api-key-file or %s does not", VARIABLE)
        return _checked(given, "--api-key")
    if file is not None:
        try:
            return _checked(file.read_text(encoding="utf-8"), f"--api-key-file {file}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file: cannot read {file}: {error}") from error
    return None if inherited is None else _checked(inherited, VARIABLE)


def _checked(key: str, source: str) -> str:
    key = key.strip()
    if not key or not all(" " < character <= "~" for character in key):
        raise ConfigError(f"{source} must hold one key of visible ASCII characters")
    return key
