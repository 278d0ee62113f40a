"""The engine sleeps, wakes up and changes its weights while the server answers, under the names of vLLM's and SGLang's
routes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from fastapi import FastAPI
from fastapi.responses import Response

from engine.errors import ConfigError, InvalidRequestError, UnsupportedModelError, WeightsError
from entrypoints.server.context import ServerContext
from entrypoints.server.fields import Body


class Weights(Body):
    """Another checkpoint of the model that is served."""

    model_path: str


def add_routes(app: FastAPI, context: ServerContext) -> None:
    """None, unless the settings want them."""
    if not context.settings.enable_sleep_mode:
        return
    engine, under_way = context.engine, set[asyncio.Task[None]]()

    async def to_its_end(change: Coroutine[None, None, None]) -> None:
        """Also where whoever asked for it has left."""
        task = asyncio.create_task(change)
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        try:
            await asyncio.shield(task)
        except ConfigError as error:
            raise InvalidRequestError(str(error)) from error

    @app.post("/sleep")
    async def sleep(level: int = 1, mode: str = "wait") -> Response:
        """Levels are vLLM's, and differ in nothing: all memory is free. `mode`: what becomes of requests that run."""
        if mode not in ("wait", "keep"):
            raise InvalidRequestError("mode: requests wait until it wakes up; abort them before, or not", "mode")
        await to_its_end(engine.sleep())
        return Response(status_code=200)

    @app.post("/wake_up")
    async def wake_up() -> Response:
        await to_its_end(engine.wake_up())
        return Response(status_code=200)

    @app.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": engine.is_sleeping}

    @app.post("/update_weights_from_disk")
    async def update_weights(body: Weights) -> dict[str, bool | str]:
        try:
            await to_its_end(engine.update_weights(body.model_path))
        except (InvalidRequestError, WeightsError, UnsupportedModelError, OSError) as error:
            raise InvalidRequestError(str(error), "model_path") from error
        return {"success": True, "message": f"the weights of {body.model_path} are served"}
