"""One response: from its items to a prompt, and from the model's answer to output items."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import HTTPConnection

from engine.errors import InvalidRequestError
from engine.frontend.failures import fails_alone
from engine.frontend.texts import too_many_tokens
from engine.limits import Limits
from engine.request import RequestOutput
from entrypoints.server.answers import Answers
from entrypoints.server.context import Outputs, ServerContext
from entrypoints.server.errors import describe
from entrypoints.server.logprobs import ChatLogprob, chat_logprobs
from entrypoints.server.prompting import Conversation, outputs_of
from entrypoints.server.responses import UsageCount, new_item_id, now
from entrypoints.server.responses_api.builder import Event, ResponseBuilder
from entrypoints.server.responses_api.fields import (
    ENCRYPTED_REASONING,
    LOGPROBS,
    ContextFields,
    InputTokensDetails,
    NamedTools,
    OutputTokensDetails,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    tools_of,
)
from entrypoints.server.responses_api.items import Messages, resolved
from entrypoints.server.responses_api.store import Item, Responses, Stored
from entrypoints.server.structured import blamed_on

T = TypeVar("T")
_encoder = msgspec.json.Encoder()
logger = logging.getLogger("pageloom.server")


class StoredItems:
    """What one request goes on from: so many bytes and values at most, counted each time that it names them."""

    def __init__(self, store: Responses, limits: Limits) -> None:
        self._store, self._limits = store, limits
        self._bytes = self._values = 0

    def item(self, name: str) -> Item | None:
        """Raises `InvalidRequestError`."""
        return self._store.item(name, partial(self._take, "input"))

    def before(self, name: str | None) -> list[list[Item]]:
        """Of a response and all before it, the first one first. Raises `InvalidRequestError`."""
        field, turns = "previous_response_id", list[list[Item]]()
        while name is not None:
            self._limits.check("messages", len(turns) + 1, field)
            turn = self._store.turn(name, partial(self._take, field))
            if turn is None:
                message = f"Previous response with id '{name[:100]}' not found."
                raise InvalidRequestError(message, field, "previous_response_not_found")
            turns.append(turn.items)
            name = turn.previous
        return turns[::-1]

    def _take(self, field: str, size: int, values: int) -> None:
        self._bytes += size
        self._values += values
        self._limits.check("continued_bytes", self._bytes, field)
        self._limits.check("continued_values", self._values, field)


class Items:
    """What `body` goes on from, as messages. Raises `InvalidRequestError`."""

    def __init__(self, context: ServerContext, store: Responses, body: ContextFields) -> None:
        self.context, self.body = context, body
        self.tools: NamedTools = tools_of(body, context.engine.config.limits)
        given = body.items()
        context.engine.config.limits.check("messages", len(given), "input")
        stored = StoredItems(store, context.engine.config.limits)
        self.items = [{"id": new_item_id(_prefix(item)), **item} for item in resolved(given, stored.item)]
        messages = Messages(self.tools.namespaces, context.engine.config.limits)
        if body.instructions:
            messages.messages.append({"role": "system", "content": body.instructions})
        if body.previous_response_id is not None:
            for items in stored.before(body.previous_response_id):
                messages.add(items)
        messages.add(self.items)
        if not messages.messages:
            raise InvalidRequestError("input must hold at least one item", "input")
        self.messages = messages.messages

    def prompt(self) -> Conversation:
        body = self.body
        effort = body.reasoning.effort if body.reasoning is not None else None
        switches = self.context.speech.template_switches(effort, None)
        kwargs = {**switches, **(body.chat_template_kwargs or {})}
        return Conversation(messages=self.messages, tools=self.tools.use.tools, template_kwargs=kwargs)

    async def render(self) -> tuple[str, list[int]]:
        """Raises `InvalidRequestError`."""
        with in_input():
            text, token_ids = await self.prompt().render(self.context.engine)
            most = self.context.engine.max_model_len
            if len(token_ids) >= most:
                raise too_many_tokens(len(token_ids), most, "messages")
            return text, token_ids


def in_input() -> AbstractContextManager[None]:
    """What is wrong with messages is wrong with what they were made of."""
    return blamed_on("input", "messages")


def _prefix(item: dict[str, Any]) -> str:
    kind = str(item.get("type", "message"))
    known = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
    return known.get(kind, "item")


class ResponseHandler:
    """Serves one body. Raises `InvalidRequestError`."""

    def __init__(self, context: ServerContext, store: Responses, body: ResponsesRequest) -> None:
        self.context, self.store, self.body = context, store, body
        self.structured_by, structure = body.wanted_structure()
        self.conversation = Items(context, store, body)
        use = self.conversation.tools.use
        self.answers = Answers(context.speech, use, structure, stream=bool(body.stream))
        include = body.include or ()
        limit = context.engine.config.max_logprobs
        self.top = (body.top_logprobs or 0) if body.top_logprobs or LOGPROBS in include else None
        if self.top is not None and not 0 <= self.top <= limit:
            raise InvalidRequestError(f"top_logprobs must be in [0, {limit}] (--max-logprobs)", "top_logprobs")
        most = body.max_output_tokens or context.recommended_max_tokens
        defaults = context.engine.default_sampling_params()
        self.params = body.sampling_params(defaults, most, self.top, None, structure)
        self.usage = UsageCount()
        self.builder = ResponseBuilder(
            self._new_response(),
            custom=use.custom,
            namespaces=self.conversation.tools.namespaces,
            with_logprobs=self.top is not None,
            seals=ENCRYPTED_REASONING in include,
        )

    @property
    def response(self) -> ResponseObject:
        return self.builder.response

    def _new_response(self) -> ResponseObject:
        body, params = self.body, self.params
        reasoning = {"effort": body.reasoning.effort if body.reasoning else None, "summary": None}
        form = body.text.format if body.text is not None and body.text.format else {"type": "text"}
        extra = {name: getattr(body, name) for name in ("metadata", "safety_identifier", "prompt_cache_key", "user")}
        return ResponseObject(
            id=new_item_id("resp"),
            created_at=now(),
            model=self.context.name_of(self.body.model),
            status="in_progress",
            background=bool(body.background),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=extra.pop("metadata") or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            previous_response_id=body.previous_response_id,
            reasoning=reasoning,
            store=bool(body.keep),
            temperature=params.temperature,
            text={"format": form},
            tool_choice=body.tool_choice if body.tool_choice is not None else "auto",
            tools=[_shown_tool(tool) for tool in body.tools or ()],
            top_logprobs=self.top or 0,
            top_p=params.top_p,
            **extra,
        )

    async def outputs(self) -> Outputs:
        with in_input():
            asked = self.conversation.prompt()
            name = self.response.id
            return await outputs_of(self.context, asked, self.params, self.answers, self.body, name, delta=True)

    def take(self, output: RequestOutput) -> list[Event]:
        """What is new."""
        self.usage.add(0, output)
        events: list[Event] = []
        for part in output.outputs:
            logprobs: list[ChatLogprob] = []
            if self.top is not None:
                logprobs = chat_logprobs(self.context.texts, part.token_ids, part.logprobs or [], self.top).content
            events += self.builder.feed(self.answers.pieces(part), logprobs)
            if part.finish_reason is not None:
                error = self.answers.schema_error(part)
                events += self.builder.finish(part.finish_reason, self.counted(), error)
        return events

    def counted(self) -> ResponseUsage:
        usage, thought = self.usage.usage(), self.answers.reasoning_tokens
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else 0
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(cached),
            usage.completion_tokens,
            OutputTokensDetails(thought),
            usage.total_tokens,
        )

    def keep(self) -> None:
        """An answer is given whether it can be stored or not; it says which."""
        try:
            self.store.keep(Stored(self.response, self.conversation.items))
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            logger.error("response %s cannot be stored: %s", self.response.id, error)
            self.response.store = False

    async def answered(self) -> None:
        """To its end; it is not stored yet."""
        async with aclosing(await self.outputs()) as outputs:
            async for output in outputs:
                with fails_alone("making the answer"):
                    self.take(output)

    async def whole(self) -> ResponseObject:
        await self.answered()
        await asyncio.to_thread(self.keep)
        return self.response

    async def told(self, request_id: str, encode: Callable[[Event], T]) -> AsyncGenerator[list[T], None]:
        """Events as they come. What fails once it has begun is told in one."""
        async with aclosing(await self.outputs()) as outputs:
            begun = False
            try:
                async for output in outputs:
                    told = [] if begun else self.builder.start()
                    begun = True
                    with fails_alone("making a part of the answer"):
                        told += self.take(output)
                        shown = [encode(each) for each in told]
                    if output.finished:
                        await asyncio.to_thread(self.keep)
                    yield shown
            except Exception as error:
                if not begun:
                    raise
                _, described, _ = describe(error, request_id)
                info = described["error"]
                yield [encode(each) for each in self.builder.fail(info["code"] or info["type"], info["message"])]

    async def warmed(self) -> list[Event]:
        """The prompt is computed, so that who goes on from it finds it in the cache; nothing is generated."""
        self.params = msgspec.structs.replace(self.params, max_tokens=1, min_tokens=0, structured_outputs=None)
        async with aclosing(await self.outputs()) as outputs:
            async for output in outputs:
                self.usage.add(0, output)
        usage = self.counted()
        usage = msgspec.structs.replace(usage, output_tokens=0, total_tokens=usage.input_tokens)
        told = [*self.builder.start(), self.builder.end("completed", usage)]
        await asyncio.to_thread(self.keep)
        return told

    async def events(self, request_id: str) -> AsyncGenerator[bytes, None]:
        """Server-sent."""
        async with aclosing(self.told(request_id, encoded)) as told:
            async for events in told:
                for event in events:
                    yield event
        yield b"data: [DONE]\n\n"


async def handler_of(
    context: ServerContext, store: Responses, body: ResponsesRequest, request: HTTPConnection
) -> ResponseHandler:
    """Raises `InvalidRequestError`, `HTTPException`."""
    context.check_model(body.model, generates=True)
    handler = await asyncio.to_thread(ResponseHandler, context, store, body)  # it may go on from a lot
    context.take_note(body, request, handler.conversation.tools.ignored)
    return handler


def encoded(event: Event) -> bytes:
    name: str = event["type"]
    return b"event: " + name.encode() + b"\ndata: " + _encoder.encode(event) + b"\n\n"


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": False, **tool}
