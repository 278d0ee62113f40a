"""What the routes that make vectors share: their fields, and how many prompts become vectors at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing

import msgspec
from pydantic import Field

from engine.errors import InvalidRequestError
from engine.pooling import PoolingParams, PoolingRequestOutput
from entrypoints.server.context import EnginePrompt, ServerContext
from entrypoints.server.fields import Body, NoEffect

_AT_A_TIME = 128
"""prompts of one body: enough to fill steps, and other clients' requests need not wait behind thousands"""


class PooledFields(Body):
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = Field(default=None, min_length=1)
    user: NoEffect = None


async def written(vectors: Iterable[object]) -> list[msgspec.Raw]:
    """As JSON, a few at a time, for the sake of others on the event loop."""
    pieces: list[msgspec.Raw] = []
    for vector in vectors:
        pieces.append(msgspec.Raw(msgspec.json.encode(vector)))
        if len(pieces) % 16 == 0:
            await asyncio.sleep(0)
    return pieces


async def vectors_of(
    context: ServerContext,
    prompts: Sequence[EnginePrompt],
    params: Sequence[PoolingParams],
    body: PooledFields,
    request_id: str,
    place: Callable[[int], str],
) -> list[PoolingRequestOutput]:
    """In their order, each by its own `params`; the first that fails ends the others. `place`: where in the body a
    prompt stands, as `input[2]`. Raises what `AsyncEngine.encode` raises."""
    turns = asyncio.Semaphore(_AT_A_TIME)

    async def one(index: int) -> PoolingRequestOutput:
        stream = context.encode(prompts[index], params[index], body, f"{request_id}-{index}")
        async with turns, aclosing(stream) as outputs:
            try:
                return await anext(outputs)
            except InvalidRequestError as error:
                if error.field != "prompt":
                    raise
                where = place(index)
                raise InvalidRequestError(f"{where}: {error}", where.partition("[")[0], error.code) from error

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(len(prompts))]
    except* Exception as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
    return [task.result() for task in tasks]
