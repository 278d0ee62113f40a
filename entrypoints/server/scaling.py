"""Replicas that come and go while the server answers, under the names of vLLM's routes."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import FastAPI
from pydantic import Field, Strict

from engine.errors import ConfigError, InvalidRequestError
from entrypoints.server.context import ServerContext
from entrypoints.server.fields import Body


class Scaling(Body):
    """How many replicas there are to be; of those that are too many each is drained first, for so many seconds."""

    new_data_parallel_size: Annotated[int, Strict()]
    drain_timeout: Annotated[float, Field(ge=0, le=86400)] = 300.0


def add_routes(app: FastAPI, context: ServerContext) -> None:
    engine, under_way = context.engine, set[asyncio.Task[None]]()

    @app.post("/scale_elastic_ep")
    async def scale(body: Scaling) -> dict[str, str]:
        task = asyncio.create_task(engine.scale(body.new_data_parallel_size, body.drain_timeout))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        try:
            await asyncio.shield(task)  # it goes on where whoever asked for it has left
        except ConfigError as error:
            raise InvalidRequestError(str(error), "new_data_parallel_size") from error
        return {"message": f"Scaled to {body.new_data_parallel_size} data parallel engines"}

    @app.post("/is_scaling_elastic_ep")
    async def is_scaling() -> dict[str, bool]:
        return {"is_scaling_elastic_ep": bool(under_way)}
