"""POST /v1/chat/completions: messages through the model's chat template, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import Request
from fastapi.responses import Response
from msgspec import UNSET

from engine.dialects.forms import Piece
from engine.errors import InvalidRequestError
from engine.frontend.failures import fails_alone
from engine.request import CompletionOutput, RequestOutput
from entrypoints.server.answers import Answers
from entrypoints.server.chat_parts import ChatParts
from entrypoints.server.context import Outputs, ServerContext, last
from entrypoints.server.encoding import json_response
from entrypoints.server.logprobs import ChatLogprob, ChatLogprobs, chat_logprobs, prompt_logprobs
from entrypoints.server.prompting import Conversation, outputs_of
from entrypoints.server.protocol import ChatCompletionRequest
from entrypoints.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Delta,
    Usage,
    UsageCount,
    new_id,
    now,
)
from entrypoints.server.streaming import DONE, Frames, answer, event, event_stream
from entrypoints.server.structured import blamed_on


class ChatHandler:
    """Serves one request body. Rendering the template is part of `whole` and `chunks`, so it is cancelled with them."""

    def __init__(self, context: ServerContext, body: ChatCompletionRequest) -> None:
        self.context, self.body = context, body
        self.id, self.created = new_id("chatcmpl"), now()
        self.top = (body.top_logprobs or 0) if body.logprobs else None
        limit = context.engine.config.max_logprobs
        if self.top is not None and not 0 <= self.top <= limit:
            raise InvalidRequestError(
                f"top_logprobs must be in [0, {limit}] (--max-logprobs), got {self.top}", "top_logprobs"
            )
        max_tokens = body.token_limit(context.recommended_max_tokens)
        defaults = context.engine.default_sampling_params()
        self.structured_by, structure = body.structure()
        self.params = body.sampling_params(defaults, max_tokens, self.top, body.prompt_logprobs, structure)
        use = body.tool_use(context.engine.config.limits)
        self.answers = Answers(context.speech, use, structure, body.thinking_token_budget, stream=bool(body.stream))
        self.shown = ChatParts(context.settings.reasoning_field if body.include_reasoning else None, self.answers.use)
        self.held: dict[int, list[ChatLogprob]] = {}
        """of tokens whose text has not been given out"""
        self.held_ids: dict[int, list[int]] = {}
        self.echoed = ""
        self.usage = UsageCount()
        options = body.stream_options
        self.counts = bool(options and options.continuous_usage_stats)
        """each chunk says how many tokens there have been"""
        self.frames: dict[int, Frames] = {}
        """of a sample's chunks that hold content and nothing else"""

    async def stream(self, *, delta: bool) -> Outputs:
        body = self.body
        switches = self.context.speech.template_switches(body.reasoning_effort, body.thinks())
        asked = Conversation(
            messages=body.messages,
            tools=self.answers.use.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs={**switches, **(body.chat_template_kwargs or {})},
            add_special_tokens=bool(body.add_special_tokens),
        )
        outputs = await outputs_of(self.context, asked, self.params, self.answers, body, self.id, delta=delta)
        self.echoed = asked.answer_so_far() if body.echo else ""
        return outputs

    def logprobs(self, part: CompletionOutput) -> ChatLogprobs | None:
        if self.top is None:
            return None
        return chat_logprobs(self.context.texts, part.token_ids, part.logprobs or [], self.top)

    async def whole(self) -> ChatCompletion:
        output = await last(await self.stream(delta=False))
        with fails_alone("making the answer"):
            return self.reply(output)

    def choice(self, part: CompletionOutput) -> ChatChoice:
        message = self.shown.message(self.answers.pieces(part), self.echoed)
        reason, error = self.answers.finish_reason(part), self.answers.schema_error(part)
        ids = part.token_ids if self.body.return_token_ids else UNSET
        return ChatChoice(part.index, message, self.logprobs(part), reason, part.stop_reason, error or UNSET, ids)

    def reply(self, output: RequestOutput) -> ChatCompletion:
        self.usage.add(0, output)
        choices = [self.choice(part) for part in output.outputs]
        reply = ChatCompletion(
            self.id,
            self.created,
            self.context.name_of(self.body.model),
            choices,
            system_fingerprint=self.context.fingerprint,
            usage=self.usage.usage(self.answers.reasoning_tokens),
        )
        if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            reply.prompt_logprobs = prompt_logprobs(output.prompt_logprobs, self.body.prompt_logprobs)
        if self.body.return_token_ids:
            reply.prompt_token_ids = output.prompt_token_ids
        if self.body.kv_transfer_params:
            reply.kv_transfer_params = output.kv_transfer_params
        return reply

    def opening(self, output: RequestOutput) -> list[ChatChunk]:
        """What comes before the first token, of each sample."""
        chunks = [self.envelope([ChatChunkChoice(i, Delta("assistant", self.echoed))]) for i in range(self.params.n)]
        if self.body.return_token_ids:
            chunks[0].prompt_token_ids = output.prompt_token_ids
        return chunks

    def envelope(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        context = self.context
        return ChatChunk(
            self.id,
            self.created,
            context.name_of(self.body.model),
            choices,
            system_fingerprint=context.fingerprint,
            usage=usage,
        )

    def events_of(self, part: CompletionOutput) -> list[bytes]:
        """None while all that is new may be a mark's beginning. What ends an answer comes with its last chunk."""
        pieces = self.answers.pieces(part)
        bare = self.top is None and not self.counts and not self.body.return_token_ids
        if bare and len(pieces) == 1 and part.finish_reason is None and pieces[0].content:
            return [self.frame(part.index).event(pieces[0].content)]
        return [event(chunk) for chunk in self.chunks_of(part, pieces)]

    def frame(self, index: int) -> Frames:
        frame = self.frames.get(index)
        if frame is None:
            made = Frames(lambda text: self.envelope([ChatChunkChoice(index, Delta(content=text))]))
            frame = self.frames[index] = made
        return frame

    def chunks_of(self, part: CompletionOutput, pieces: list[Piece]) -> list[ChatChunk]:
        deltas = self.shown.deltas(part.index, pieces)
        logprobs = self.logprobs(part)
        if logprobs is not None:
            logprobs.content[:0] = self.held.pop(part.index, [])
        ids = [*self.held_ids.pop(part.index, []), *part.token_ids] if self.body.return_token_ids else UNSET
        if not deltas:
            if part.finished or not self.answers.reads:
                deltas = [Delta() if part.finished else Delta(content="")]
            else:
                if logprobs is not None:
                    self.held[part.index] = logprobs.content
                if ids is not UNSET:
                    self.held_ids[part.index] = ids
        choices = [ChatChunkChoice(part.index, delta) for delta in deltas]
        if choices:
            choices[0].logprobs, choices[0].token_ids = logprobs, ids
            end = choices[-1]
            end.finish_reason, end.stop_reason = self.answers.finish_reason(part), part.stop_reason
            end.schema_error = self.answers.schema_error(part) or UNSET
        usage = self.usage.usage(self.answers.reasoning_tokens) if self.counts else None
        return [self.envelope([choice], usage) for choice in choices]

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        opened, options = False, self.body.stream_options
        async with aclosing(await self.stream(delta=True)) as outputs:
            async for output in outputs:
                if not opened:
                    opened = True
                    for chunk in self.opening(output):
                        yield event(chunk)
                self.usage.add(0, output)
                if options and options.include_moves and (moves := self.usage.moved()):
                    yield event(msgspec.structs.replace(self.envelope([]), num_moves=moves))
                for part in output.outputs:
                    with fails_alone("making a part of the answer"):
                        events = self.events_of(part)
                    for each in events:
                        yield each
        if options and options.include_usage:
            yield event(self.envelope([], self.usage.usage(self.answers.reasoning_tokens)))
        yield DONE


async def create_chat_completion(context: ServerContext, body: ChatCompletionRequest, request: Request) -> Response:
    context.check_model(body.model, generates=True)
    context.check_generates()
    handler = ChatHandler(context, body)
    with blamed_on(handler.structured_by):
        if body.stream:
            return await event_stream(request, handler.chunks())
        return json_response(await answer(request, handler.whole()))
