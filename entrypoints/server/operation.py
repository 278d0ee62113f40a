"""What whoever runs the server asks it: is it alive, can it take requests, does it make progress; version, metrics,
load, settings.

`/live`: the process answers. `/ready`: send requests here. `/health`, and `/ping`: the core makes progress with what it
has; a router (`--role router`) reads there which pages it gives to others, or takes. None of them needs the key, and
none says more than a line: the log has the rest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from engine.errors import CoreDiedError, InvalidRequestError
from engine.front_ends.client import FrontEndClient
from engine.front_ends.wire import Answers
from engine.observability.added_up import added_up
from entrypoints.server.context import ServerContext
from entrypoints.server.error_shape import error_body
from entrypoints.server.load import Load

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

    def pause(self) -> tuple[str, str] | None:
        """As `trouble`, but it goes on, and nobody need do anything: requests wait."""
        if self._engine.is_restarting:
            return "restarting", "a core died, and another one is being started"
        return ("asleep", "the engine sleeps") if self._engine.is_sleeping else None


_OF_THE_HOST = ("cache_dir", "path", "tokenizer")
"""settings that name files"""
_OF_NOW = ("ledger", "type", "compiling", "distinct_pieces", "pieces_compiled")
"""what is otherwise a minute later, when pieces were compiled behind: `/v1/board` and `/metrics` know"""


def server_info(context: ServerContext) -> dict[str, Any]:
    """Settings that are in force, and what became of them; no key, and no path of the machine."""
    engine, settings = context.engine, context.settings
    ready = msgspec.to_builtins(engine.ready)
    return {
        "version": version("pageloom"),
        "models": list(context.names),
        "config": _without_files(msgspec.to_builtins(engine.config)),
        "generation_defaults": dict(engine.model.generation_defaults),
        "dialect": context.speech.dialect.name,
        "strict_fields": settings.strict_fields,
        "reasoning_field": settings.reasoning_field,
        "started": {name: ready[name] for name in ready if name not in _OF_NOW},
    }


def _without_files(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a draft model is called is a path, too."""
    kept: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            kept[name] = _without_files(value)
        elif name not in _OF_THE_HOST and not (name == "model" and value is not None):
            kept[name] = value
    return kept


def add_routes(app: FastAPI, context: ServerContext, load: Load, siblings: FrontEndClient | None) -> None:
    _add_counts(app, context, load, siblings)
    engine, progress = context.engine, Progress(context)

    def state(trouble: tuple[str, str] | None) -> Response:
        if trouble is None:
            return Response(status_code=200)
        return JSONResponse(error_body(trouble[1], "server_error", None, trouble[0]), 503)

    @app.get("/live")
    async def live() -> Response:
        return Response(status_code=200)

    @app.get("/ready")
    async def ready() -> Response:
        if app.state.draining:
            return state(("shutting_down", "the server is shutting down"))
        return state(progress.trouble() or progress.pause())

    role = getattr(engine.config.kv_transfer, "kv_role", None)

    @app.get("/health")
    async def health() -> Response:
        trouble, pause = progress.trouble(), progress.pause()
        paused = {} if pause is None else {pause[0]: True}
        moves = {"kv_role": role, "kv_layout": engine.ready.kv_layout}
        return JSONResponse(moves | paused) if trouble is None else state(trouble)

    @app.get("/ping")
    async def ping() -> Response:
        return state(progress.trouble())

    @app.post("/ping")
    async def post_ping() -> Response:
        return state(progress.trouble())

    @app.get("/server_info")
    async def info() -> dict[str, Any]:
        return server_info(context)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False) -> Response:
        """Prefixes that a running request uses, or that are pinned, stay; those of the host tier go, too."""
        if reset_running_requests:
            raise InvalidRequestError(
                "reset_running_requests: requests that run keep their prefixes", "reset_running_requests"
            )
        engine.reset_prefix_cache()
        return Response(status_code=200)

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version("pageloom")}


def _add_counts(app: FastAPI, context: ServerContext, load: Load, siblings: FrontEndClient | None) -> None:
    """Of this process, or of all that take requests for the same cores."""
    metrics = context.engine.metrics
    if siblings is not None:
        siblings.answers |= {"load": lambda: str(load.requests).encode(), "metrics": metrics.render}

    async def of_all(about: str, siblings: FrontEndClient) -> Answers:
        try:
            return await siblings.ask(about)
        except TimeoutError:
            raise HTTPException(503, "a process that takes requests does not answer the others") from None

    @app.get("/load")
    async def show_load() -> dict[str, int]:
        requests = [load.requests] if siblings is None else map(int, (await of_all("load", siblings)).texts)
        return {"server_load": sum(requests)}

    @app.get("/metrics")
    async def show_metrics() -> Response:
        if siblings is None:
            return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)
        told = await of_all("metrics", siblings)
        merged = await asyncio.to_thread(added_up, told.texts, metrics.of_cores(), told.gone)
        return Response(merged, media_type=CONTENT_TYPE_LATEST)
