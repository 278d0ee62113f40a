"""Pinned prefixes: `/v1/prefixes`, and the file of them that a server starts with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from pydantic import ValidationError

from engine import AsyncEngine
from engine.errors import ConfigError, EngineError, InvalidRequestError
from entrypoints.server.context import ServerContext
from entrypoints.server.protocol import PinRequest
from entrypoints.server.streaming import answer


async def pin(engine: AsyncEngine, body: PinRequest) -> int:
    """Number of tokens. Raises `InvalidRequestError` and whatever else the engine raises."""
    prompt: dict[str, Any] = {}
    if body.messages is not None:
        prompt["prompt_token_ids"] = await engine.apply_chat_template(
            body.messages, add_generation_prompt=False, template_kwargs=body.chat_template_kwargs
        )
    else:
        prompt["prompt" if isinstance(body.prompt, str) else "prompt_token_ids"] = body.prompt
    if body.cache_salt is not None:
        prompt["cache_salt"] = body.cache_salt
    return await engine.pin_prefix(body.name, prompt)


async def pin_file(engine: AsyncEngine, path: Path) -> int:
    """Pin what a file of JSON lines says, each as the body of POST /v1/prefixes; returns how many. Raises
    `ConfigError` naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--pinned-prefixes: cannot read {path}: {error}") from error
    count = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = PinRequest.model_validate(json.loads(line))
            if unknown := body.unknown_fields():
                raise InvalidRequestError(f"{unknown[0]}: unrecognized request argument", unknown[0])
            await pin(engine, body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"--pinned-prefixes: {path}, line {number}: {where}: {first['msg']}") from error
        except (ValueError, EngineError) as error:
            raise ConfigError(f"--pinned-prefixes: {path}, line {number}: {error}") from error
        count += 1
    return count


def add_routes(app: FastAPI, context: ServerContext) -> None:
    engine = context.engine

    @app.post("/v1/prefixes")
    async def pin_prefix(body: PinRequest, request: Request) -> dict[str, object]:
        """Whoever leaves before the answer has nothing pinned."""
        context.settings.refuse_several("prefixes are pinned")
        context.take_note(body, request)
        return {"object": "prefix", "name": body.name, "tokens": await answer(request, pin(engine, body))}

    @app.get("/v1/prefixes")
    async def pinned_prefixes() -> dict[str, object]:
        pinned = engine.pinned_prefixes()
        return {
            "object": "list",
            "data": [{"object": "prefix", "name": name, "tokens": n} for name, n in pinned.items()],
        }

    @app.delete("/v1/prefixes/{name:path}")
    async def unpin_prefix(name: str) -> dict[str, object]:
        engine.unpin_prefix(name)
        return {"object": "prefix", "name": name, "deleted": True}
