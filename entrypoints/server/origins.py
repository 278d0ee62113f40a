"""Web pages of other origins: what browsers let them ask of any host without asking it first.

A page may send a POST to anywhere as long as it is "simple", as a form's is, and open a WebSocket; whose page it is,
only `Origin` tells. All else (a body that says that it is JSON, DELETE) browsers ask the server's leave for, which it
gives by `--allowed-origins` alone. So routes that read no body, or one of any type, need this guard; it stands before
all of them. A GET changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from entrypoints.server.error_shape import error_body
from entrypoints.server.errors import error_response

_JSON = "application/json"


class OriginGuard:
    """Plain ASGI, so that routes still see disconnects."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """`allowed`: web pages that may call; "*": all."""
        self._app, self._allowed = app, frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._refuses(scope):
            message = "pages of this origin may not ask that (--allowed-origins)"
            body = error_body(message, "invalid_request_error", None, "origin_not_allowed")
            await error_response(scope, 403, body)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refuses(self, scope: Scope) -> bool:
        if scope["type"] != "websocket" and (scope["type"] != "http" or scope["method"] != "POST"):
            return False
        headers = Headers(scope=scope)
        origins = headers.getlist("origin")
        if not origins or "*" in self._allowed or self._allowed.issuperset(origins):
            return False
        if all(origin.partition("://")[2] == headers.get("host") for origin in origins):
            return False
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        return scope["type"] == "websocket" or kind != _JSON
