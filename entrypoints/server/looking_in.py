"""Whoever administers looks into a server that serves: profiles of its steps under the names of vLLM's and SGLang's
routes, and more or less in its log."""

from __future__ import annotations

import logging
from typing import Any, ClassVar, Literal

from fastapi import FastAPI, Request

from engine.errors import ConfigError, InvalidRequestError
from entrypoints.server.context import ServerContext
from entrypoints.server.fields import Body

logger = logging.getLogger("pageloom.server")

Level = Literal["debug", "info", "warning", "error"]


class Profile(Body):
    """How much is recorded; the names are SGLang's."""

    UNSUPPORTED: ClassVar = {"output_dir": ()}  # files are written where --profile-dir says

    num_steps: Any = None
    """None: until it is stopped, or as many as the limit"""


class Verbosity(Body):
    """What is logged from now on."""

    level: Level


def add_routes(app: FastAPI, context: ServerContext) -> None:
    """None, unless the settings want them."""
    engine, directory = context.engine, context.settings.profile_dir
    if directory is None:
        return

    @app.post("/start_profile")
    async def start_profile(request: Request, body: Profile | None = None) -> dict[str, str]:
        steps = None if body is None else body.num_steps
        if body is not None:
            context.take_note(body, request)
        try:
            path = await engine.profiles.start_async(directory, steps)
        except ConfigError as error:
            raise InvalidRequestError(str(error)) from error
        return {"path": str(path)}

    @app.post("/stop_profile")
    async def stop_profile() -> dict[str, list[str]]:
        """Also of a profile whose steps are over."""
        try:
            files = await engine.profiles.stop_async()
        except ConfigError as error:
            raise InvalidRequestError(str(error)) from error
        return {"files": [str(file) for file in files]}

    @app.post("/log_level")
    async def log_level(body: Verbosity) -> dict[str, str]:
        """Of this process and of the cores, also of those that start later."""
        level = logging.getLevelNamesMapping()[body.level.upper()]
        logging.getLogger().setLevel(level)
        engine.set_log_level(level)
        logger.log(max(level, logging.WARNING), "the log's level is %s from now on", body.level)
        return {"level": body.level}
