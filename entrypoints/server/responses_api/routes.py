"""`/v1/responses`: make one, ask for it again, go on from it, cancel it, count what it would take."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import msgspec
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.responses import Response

from engine.errors import InvalidRequestError
from entrypoints.server.answers import Answers, joined
from entrypoints.server.context import Place, ServerContext, last
from entrypoints.server.encoding import json_response
from entrypoints.server.error_shape import error_body
from entrypoints.server.errors import describe
from entrypoints.server.keys import CLIENT
from entrypoints.server.request_ids import request_id_of
from entrypoints.server.responses import UsageCount, new_item_id, now
from entrypoints.server.responses_api.fields import CompactRequest, InputTokensRequest, ResponsesRequest
from entrypoints.server.responses_api.handler import Items, ResponseHandler, handler_of
from entrypoints.server.responses_api.items import as_listed, sealed
from entrypoints.server.responses_api.store import ResponseStore
from entrypoints.server.streaming import answer, event_stream
from entrypoints.server.structured import blamed_on
from entrypoints.server.tools import ToolUse

logger = logging.getLogger("pageloom.server")

T = TypeVar("T")
_SUMMARY_TOKENS = 512
_ASK_FOR_SUMMARY = (
    "Sum up this conversation for whoever goes on with it: what was asked, what was found out and done, names, numbers "
    "and decisions that matter, and what is still to do. Write nothing else."
)


class Background:
    """Responses that nobody waits for."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[asyncio.Task[None], ResponseHandler]] = {}

    async def start(self, handler: ResponseHandler, request_id: str) -> bytes:
        """The response as it is stored first, as JSON. It goes on where the client does not wait for that."""
        made: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(handler, request_id, made))
        self._running[handler.response.id] = task, handler
        task.add_done_callback(lambda _: self._running.pop(handler.response.id, None))
        return await asyncio.shield(made)

    async def cancel(self, name: str) -> bool:
        """False where it is over, or none of these: what it says of itself decides, before it is stored."""
        task, handler = self._running.get(name, (None, None))
        if task is None or handler is None or handler.response.status != "in_progress":
            return False
        handler.builder.cancel()
        task.cancel()
        await asyncio.wait({task})
        return True

    async def ended(self, name: str) -> None:
        """It is not stored any more."""
        if not await self.cancel(name) and name in self._running:
            await asyncio.wait({self._running[name][0]})

    def stop(self) -> None:
        for task, _ in self._running.values():
            task.cancel()

    async def _run(self, handler: ResponseHandler, request_id: str, made: asyncio.Future[bytes]) -> None:
        """Only this task stores it."""
        client = CLIENT.get()
        with nullcontext() if client is None else client.holding():
            await self._answer(handler, request_id, made)

    async def _answer(self, handler: ResponseHandler, request_id: str, made: asyncio.Future[bytes]) -> None:
        response = handler.response
        try:
            await asyncio.to_thread(handler.keep)
            made.set_result(msgspec.json.encode(response))
            await handler.answered()
        except asyncio.CancelledError:
            if response.status != "cancelled":
                raise
        except Exception as error:
            if not made.done():
                made.set_exception(error)
                return
            if response.status == "in_progress":
                _, described, _ = describe(error, request_id)
                info = described["error"]
                handler.builder.fail(info["code"] or info["type"], info["message"])
        await asyncio.to_thread(handler.keep)


def add_routes(app: FastAPI, context: ServerContext, store: ResponseStore) -> None:
    background = Background()
    app.state.background = background

    @app.post("/v1/responses")
    async def create(body: ResponsesRequest, request: Request) -> Response:
        handler = await answer(request, handler_of(context, store, body, request))
        name = request_id_of(request.scope)
        with blamed_on(handler.structured_by):
            if body.background:
                context.settings.refuse_several("responses are made in the background")
                return json_response(await answer(request, background.start(handler, name)))
            if body.stream:
                return await event_stream(request, handler.events(name))
            return json_response(await answer(request, handler.whole()))

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(body: InputTokensRequest, request: Request) -> dict[str, object]:
        context.check_model(body.model, generates=True)
        conversation = await answer(request, asyncio.to_thread(Items, context, store, body))
        context.take_note(body, request, conversation.tools.ignored)
        _, token_ids = await answer(request, conversation.render())
        return {"object": "response.input_tokens", "input_tokens": len(token_ids)}

    @app.post("/v1/responses/compact")
    async def compact(body: CompactRequest, request: Request) -> Response:
        context.check_model(body.model, generates=True)
        context.take_note(body, request)
        return json_response(await answer(request, compacted(context, store, body)))

    _stored_routes(app, store, background)


def _stored_routes(app: FastAPI, store: ResponseStore, background: Background) -> None:
    async def found(name: str, read: Callable[[str], T | None]) -> T:
        there = await asyncio.to_thread(read, name)
        if there is None:
            message = f"Response with id '{name[:100]}' not found."
            raise HTTPException(404, error_body(message, "invalid_request_error", None, "response_not_found"))
        return there

    @app.get("/v1/responses/{name}")
    async def retrieve(name: str, stream: bool = False) -> Response:
        if stream:
            raise InvalidRequestError("stream: a stored response is given whole", "stream")
        return json_response(await found(name, store.shown))

    @app.delete("/v1/responses/{name}")
    async def delete(name: str) -> dict[str, object]:
        await found(name, store.shown)
        await background.ended(name)
        return {"id": name, "object": "response", "deleted": await asyncio.to_thread(store.delete, name)}

    @app.post("/v1/responses/{name}/cancel")
    async def cancel(name: str) -> Response:
        await found(name, store.shown)
        if not await background.cancel(name):
            raise InvalidRequestError(f"response {name} is not running in the background", "response_id")
        return json_response(await found(name, store.shown))

    @app.get("/v1/responses/{name}/input_items")
    async def input_items(
        name: str, after: str | None = None, order: str = "desc", limit: int = Query(default=20, ge=1, le=100)
    ) -> dict[str, object]:
        items = [as_listed(item) for item in await found(name, store.input)]
        if order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if after is not None:
            if after not in ids:
                raise InvalidRequestError(f"after: no input item has the id {after[:100]!r}", "after")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return {"object": "list", "data": page, "has_more": len(items) > limit, **ends}


async def compacted(context: ServerContext, store: ResponseStore, body: CompactRequest) -> dict[str, object]:
    """The model sums a conversation up. What users said is kept as it is."""
    conversation = await asyncio.to_thread(Items, context, store, body)
    conversation.messages.append({"role": "user", "content": _ASK_FOR_SUMMARY})
    text, token_ids = await conversation.render()
    params = msgspec.structs.replace(context.engine.default_sampling_params(), max_tokens=_SUMMARY_TOKENS)
    name, place = new_item_id("compact"), Place(body.model)
    output = await last(context.generate({"prompt_token_ids": token_ids}, params, place, name, delta=False))
    count = UsageCount()
    count.add(0, output)
    usage = count.usage()
    part = output.outputs[0]
    answers = Answers(context.speech, ToolUse(), None)
    if answers.reads:
        await context.speech.load_reader()
    answers.prepare(params, text, "")
    summary, _, _ = joined(answers.pieces(part))
    item = {"type": "compaction", "id": new_item_id("cmp"), "encrypted_content": sealed(summary)}
    said = [
        each for each in conversation.items if each.get("type", "message") == "message" and each.get("role") == "user"
    ]
    return {
        "id": new_item_id("resp"),
        "object": "response.compaction",
        "created_at": now(),
        "output": [*({"type": "message", "status": "completed", **each} for each in said), item],
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        },
    }
