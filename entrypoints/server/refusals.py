"""A line of the log for each request that is refused before the engine is asked for it: by what and under which status.
`request_log` has the others."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from entrypoints.server.caller import CALLER
from entrypoints.server.errors import error_code_of
from entrypoints.server.load import COUNTED
from entrypoints.server.paths import route_path

logger = logging.getLogger("pageloom.requests")


class LogsRefusals:
    """Plain ASGI, so that routes still see disconnects."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) not in COUNTED:
            await self._app(scope, receive, send)
            return
        status, began = 0, time.monotonic()

        async def send_seen(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        await self._app(scope, receive, send_seen)
        caller = CALLER.get()
        if caller is None or caller.watched or status < 400:
            return
        code = error_code_of(scope)
        fields = {
            "path": caller.path,
            "status": status,
            "error": code,
            "latency_s": round(time.monotonic() - began, 6),
        }
        logger.info("request %s refused: %s", caller.request_id, code, extra={"fields": fields})
