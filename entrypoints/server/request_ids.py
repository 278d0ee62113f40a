"""Headers of answers. All have `x-request-id`: the client's own where it is sane, else one that is made here. The
server's log names it, so that whoever got "internal error" can be helped. Others by `add_header`. A server that is
about to end closes each connection behind its answer: a client's pool then asks elsewhere."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from entrypoints.server.caller import CALLER, Caller

HEADER = "x-request-id"
_SANE = re.compile(rb"[\x21-\x7e]{1,128}")
_KEY = "pageloom.request_id"
_MORE = "pageloom.headers"
_SEND = "pageloom.send"
_STARTS = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})


def new_request_id() -> str:
    return secrets.token_hex(8)


def request_id_of(scope: Scope) -> str:
    return str(scope.get(_KEY, "-"))


def add_header(scope: Scope, name: str, value: str) -> None:
    """To the answer, whatever it will be; ASCII."""
    scope.setdefault(_MORE, {})[name] = value


def send_of(scope: Scope, send: Send) -> Send:
    """For bodies whose start has passed `send`: what stands around an application looks at starts, so its layers need
    not pass on every token of a stream."""
    found: Send = scope.get(_SEND, send)
    return found


class RequestIds:
    """Outside of everything else, so that no answer lacks it."""

    def __init__(self, app: ASGIApp, is_ending: Callable[[], bool]) -> None:
        self._app, self._is_ending = app, is_ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == HEADER.encode()]
        sane = len(given) == 1 and _SANE.fullmatch(given[0])
        request_id = scope[_KEY] = given[0].decode("ascii") if sane else new_request_id()

        scope[_SEND] = send

        async def send_with_id(message: Message) -> None:
            if message["type"] in _STARTS:
                headers = MutableHeaders(scope=message)
                headers.update({HEADER: request_id, **scope.get(_MORE, {})})
                if message["type"] == "http.response.start" and self._is_ending():
                    headers["connection"] = "close"
            await send(message)

        token = CALLER.set(Caller(request_id, scope["path"], scope["headers"], set(), time.monotonic()))
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            CALLER.reset(token)
