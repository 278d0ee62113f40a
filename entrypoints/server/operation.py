"""What whoever runs the server asks it: is it alive, can it take requests, does it make progress; version, metrics.

`/live`: the process answers. `/ready`: send requests here. `/health`: the core makes progress with what it has. None of
them needs the key, and none says more than a line: the log has the rest.
"""

from __future__ import annotations

import logging
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from engine.errors import CoreDiedError
from entrypoints.server.context import ServerContext
from entrypoints.server.errors import error_body

logger = logging.getLogger("pageloom.server")


class Progress:
    """Whether the core makes progress; the log is told when that changes, not whenever somebody asks."""

    def __init__(self, context: ServerContext) -> None:
        self._engine = context.engine
        self._stalled = False

    def trouble(self) -> tuple[str, str] | None:
        """(error code, message), or None."""
        try:
            self._engine.check_health()
        except CoreDiedError:
            return "engine_dead", "the engine is not running"
        reason = self._engine.stalled()
        if (reason is not None) != self._stalled:
            self._stalled = reason is not None
            logger.warning("the engine core %s", f"seems to hang: {reason}" if reason else "makes progress again")
        return None if reason is None else ("engine_stalled", "the engine has work and makes no progress")


def add_routes(app: FastAPI, context: ServerContext) -> None:
    engine, progress = context.engine, Progress(context)

    def state(trouble: tuple[str, str] | None) -> Response:
        if trouble is None:
            return Response(status_code=200)
        code, message = trouble
        return JSONResponse(error_body(message, "server_error", None, code), 503)

    @app.get("/live")
    async def live() -> Response:
        return Response(status_code=200)

    @app.get("/ready")
    async def ready() -> Response:
        if app.state.draining:
            return state(("shutting_down", "the server is shutting down"))
        return state(progress.trouble())

    @app.get("/health")
    async def health() -> Response:
        return state(progress.trouble())

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version("pageloom")}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics.render(), media_type=CONTENT_TYPE_LATEST)
