"""Anthropic's POST /v1/messages, whole or streamed, and POST /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import FastAPI, Request
from fastapi.responses import Response

from engine.frontend.failures import fails_alone
from engine.request import CompletionOutput, RequestOutput
from entrypoints.server.answers import Answers
from entrypoints.server.context import Outputs, ServerContext, last
from entrypoints.server.encoding import json_response
from entrypoints.server.errors import describe
from entrypoints.server.messages_errors import PATH, in_anthropics_words
from entrypoints.server.messages_fields import CountTokensRequest, MessagesRequest
from entrypoints.server.messages_parts import (
    Block,
    Blocks,
    End,
    Event,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    TokenCount,
    named_event,
    usage_of,
)
from entrypoints.server.prompting import outputs_of
from entrypoints.server.request_ids import add_header, request_id_of
from entrypoints.server.responses import UsageCount, new_id
from entrypoints.server.streaming import answer, event, event_stream
from entrypoints.server.structured import blamed_on

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesHandler:
    """Serves one request body."""

    def __init__(self, context: ServerContext, body: MessagesRequest) -> None:
        """Raises `InvalidRequestError`."""
        self.context, self.body = context, body
        self.id = new_id("msg", "_")
        self.structured_by, structure = body.structure()
        self.params = body.sampling_params(context.engine.default_sampling_params(), structure)
        use = body.tool_use(context.engine.config.limits)
        self.answers = Answers(context.speech, use, structure, stream=body.stream)
        self.blocks = Blocks(body.shows_thinking)
        self.usage = UsageCount()
        self.opened = False

    async def stream(self, *, delta: bool) -> Outputs:
        context, answers = self.context, self.answers
        limits = context.engine.config.limits
        asked = await asyncio.to_thread(self.body.conversation, context.speech, answers.use, limits)
        return await outputs_of(context, asked, self.params, answers, self.body, self.id, delta=delta)

    def message(self, content: list[Block]) -> Message:
        return Message(self.id, self.context.name_of(self.body.model), content, usage_of(self.usage.usage()))

    def end(self, part: CompletionOutput) -> End:
        reason = self.answers.finish_reason(part)
        if reason == "stop" and isinstance(part.stop_reason, str):
            return End("stop_sequence", part.stop_reason)
        return End(_STOP_REASONS.get(reason or "", "end_turn"), None)

    async def whole(self) -> Message:
        output = await last(await self.stream(delta=False))
        with fails_alone("making the answer"):
            self.usage.add(0, output)
            (part,) = output.outputs
            message = self.message(self.blocks.whole(self.answers.pieces(part)))
            end = self.end(part)
            message.stop_reason, message.stop_sequence = end.stop_reason, end.stop_sequence
            return message

    def events_of(self, output: RequestOutput) -> list[Event]:
        """The first tells what the prompt took, so it comes when the engine has begun with it."""
        self.usage.add(0, output)
        events: list[Event] = [] if self.opened else [MessageStart(self.message([])), Ping()]
        self.opened = True
        for part in output.outputs:
            events += self.blocks.events(self.answers.pieces(part))
            if part.finished:
                events += self.blocks.end()
                events += [MessageDelta(self.end(part), usage_of(self.usage.usage())), MessageStop()]
        return events

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(await self.stream(delta=True)) as outputs:
            async for output in outputs:
                with fails_alone("making a part of the answer"):
                    shown = b"".join(map(named_event, self.events_of(output)))
                if shown:
                    yield shown


def failure(error: Exception, request_id: str) -> bytes:
    """What ends a stream that fails."""
    status, body, _ = describe(error, request_id)
    return b"event: error\n" + event(in_anthropics_words(status, body, request_id)[1])


async def create_message(context: ServerContext, body: MessagesRequest, request: Request) -> Response:
    context.check_model(body.model, generates=True)
    with blamed_on("stop_sequences", "stop"):
        handler = MessagesHandler(context, body)
        with blamed_on(handler.structured_by):
            if body.stream:
                return await event_stream(request, handler.chunks(), failure, named_event(Ping()))
            return json_response(await answer(request, handler.whole()))


async def count_tokens(context: ServerContext, body: CountTokensRequest) -> TokenCount:
    limits = context.engine.config.limits
    asked = await asyncio.to_thread(body.conversation, context.speech, body.tool_use(limits), limits)
    _, token_ids = await asked.render(context.engine)
    return TokenCount(len(token_ids))


def add_routes(app: FastAPI, context: ServerContext) -> None:
    def take_note(body: CountTokensRequest, request: Request) -> None:
        add_header(request.scope, "request-id", request_id_of(request.scope))
        context.take_note(body, request)

    @app.post(PATH)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        take_note(body, request)
        return await create_message(context, body, request)

    @app.post(f"{PATH}/count_tokens")
    async def tokens(body: CountTokensRequest, request: Request) -> Response:
        take_note(body, request)
        context.check_model(body.model, generates=True)
        return json_response(await answer(request, count_tokens(context, body)))
