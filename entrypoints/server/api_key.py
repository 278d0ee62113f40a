"""The API key: where it comes from, and who is let in."""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import ConfigError
from entrypoints.server.error_shape import error_body
from entrypoints.server.errors import error_response

VARIABLE = "PAGELOOM_API_KEY"
OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/ping"})
"""which machines ask that hold no key, and which tell nothing of anybody's requests; `/health` tells a router in front
which pages this server moves"""

logger = logging.getLogger("pageloom.server")


class ApiKeyGuard:
    """Refuses requests without `Authorization: Bearer KEY` or `x-api-key: KEY`, which is Anthropic's; plain ASGI, so
    that routes still see disconnects."""

    def __init__(self, app: ASGIApp, key: str, unguarded: frozenset[str] = frozenset()) -> None:
        """`unguarded`: further paths that nobody needs the key for, each as it is written."""
        self._app, self._key, self._open = app, key.encode(), OPEN_PATHS | unguarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] in ("http", "websocket") and scope["path"] not in self._open
        if guarded and not self._admits(scope):
            body = error_body("missing or wrong API key", "authentication_error", None, "invalid_api_key")
            await error_response(scope, 401, body, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        """One of the two will do; a header that is there twice does not count."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        own = [value for name, value in scope["headers"] if name == b"x-api-key"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        bears = scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
        return bears or (len(own) == 1 and hmac.compare_digest(own[0].strip(), self._key))


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
