"""One request of /api/chat or /api/generate: from its body to a prompt, and from the model's answer to parts."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from engine.dialects.forms import Call, Piece
from engine.errors import InvalidRequestError
from engine.frontend.failures import fails_alone
from engine.limits import Range
from engine.request import CompletionOutput, RequestOutput
from entrypoints.server.answers import Answers, joined
from entrypoints.server.context import Outputs, ServerContext, last
from entrypoints.server.durations import durations_of
from entrypoints.server.logprobs import ChatLogprob, chat_logprobs
from entrypoints.server.ollama_api.fields import ChatRequest, GenerateRequest, GenerationFields
from entrypoints.server.ollama_api.parts import ChatPart, GeneratePart, Message, Part, called, now
from entrypoints.server.ollama_api.turns import begun_answer, chat_of
from entrypoints.server.prompting import Conversation, behind, outputs_of
from entrypoints.server.responses import new_id
from entrypoints.server.tools import ToolUse

B = TypeVar("B", bound=GenerationFields)
_encoder = msgspec.json.Encoder()
_NS = 1_000_000_000


class OllamaHandler(ABC, Generic[B]):
    """Serves one body. Raises `InvalidRequestError`."""

    def __init__(self, context: ServerContext, body: B) -> None:
        self.context, self.body = context, body
        self.started_ns = time.monotonic_ns()
        self.name = body.model or context.served_name
        if body.thinks and not context.speech.thinks:
            raise InvalidRequestError(f"{self.name!r} does not support thinking", "think")
        Range(0, context.engine.config.max_logprobs).check("top_logprobs", body.top_logprobs)
        self.structure = body.structure()
        defaults, recommended = context.engine.default_sampling_params(), context.recommended_max_tokens
        top = body.top_logprobs if body.logprobs else None
        self.params = body.sampling_params(defaults, recommended, top, self.structure)
        self.answers = Answers(context.speech, self.tool_use(), self.structure)
        self.held: list[ChatLogprob] = []
        """of tokens whose text has not been given out"""
        self.generated: list[int] = []
        self.calls = 0

    @property
    @abstractmethod
    def asks(self) -> bool:
        """Otherwise the model is only to be loaded, or taken from memory."""

    @abstractmethod
    async def stream(self, *, delta: bool) -> Outputs: ...

    @abstractmethod
    def part(self, content: str, thinking: str = "", calls: Sequence[Call] = ()) -> Part: ...

    def tool_use(self) -> ToolUse:
        return ToolUse()

    def loaded(self) -> Part:
        """The model is there, and stays, whatever `keep_alive` says."""
        part = self.part("")
        part.done, part.done_reason = True, "load"
        return part

    def pieces(self, part: CompletionOutput) -> list[Piece]:
        """Thinking that was not wanted, and came all the same, is not shown."""
        found = self.answers.pieces(part)
        return found if self.body.thinks is not False else [piece for piece in found if not piece.reasoning]

    def count(self, part: CompletionOutput) -> None:
        self.generated += part.token_ids
        if self.body.logprobs:
            top = self.body.top_logprobs
            self.held += chat_logprobs(self.context.texts, part.token_ids, part.logprobs or [], top).content

    def with_logprobs(self, part: Part) -> Part:
        if self.body.logprobs:
            part.logprobs, self.held = self.held, []
        return part

    def ended(self, output: RequestOutput, part: Part) -> Part:
        """`part` is the last, or all."""
        (new,) = output.outputs
        took = durations_of(output)
        part.done, part.done_reason = True, "length" if new.finish_reason == "length" else "stop"
        part.schema_error = self.answers.schema_error(new) or UNSET
        part.total_duration = time.monotonic_ns() - self.started_ns
        part.load_duration = 0
        part.prompt_eval_count, part.eval_count = len(output.prompt_token_ids), len(self.generated)
        # Clients divide by them.
        part.prompt_eval_duration = max(round(took.prompt_s * _NS), 1)
        part.eval_duration = max(round(took.answer_s * _NS), 1)
        return part

    async def whole(self) -> Part:
        output = await last(await self.stream(delta=False))
        with fails_alone("making the answer"):
            (new,) = output.outputs
            self.count(new)
            return self.ended(output, self.with_logprobs(self.part(*joined(self.pieces(new)))))

    def parts(self, output: RequestOutput) -> list[Part]:
        """What is new. The last one has no text."""
        (new,) = output.outputs
        self.count(new)
        found = [
            self.part(piece.content, piece.reasoning, [piece.call] if piece.call else ()) for piece in self.pieces(new)
        ]
        if output.finished:
            found.append(self.ended(output, self.part("")))
        if found and self.held:
            self.with_logprobs(found[0])
        return found

    async def lines(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(await self.stream(delta=True)) as outputs:
            async for output in outputs:
                with fails_alone("making a part of the answer"):
                    shown = b"".join(line(part) for part in self.parts(output))
                if shown:
                    yield shown

    async def answered(self, asked: Conversation, *, delta: bool, before: Sequence[int] = ()) -> Outputs:
        name, answers = self.new_id(), self.answers
        return await outputs_of(self.context, asked, self.params, answers, self.body, name, delta=delta, before=before)

    def switches(self) -> dict[str, Any]:
        return self.context.speech.template_switches(self.body.effort, self.body.thinks)

    def new_id(self) -> str:
        return new_id("ollama")


class ChatHandler(OllamaHandler[ChatRequest]):
    @property
    def asks(self) -> bool:
        return bool(self.body.messages)

    def tool_use(self) -> ToolUse:
        return self.body.tool_use(self.context.engine.config.limits)

    async def stream(self, *, delta: bool) -> Outputs:
        messages = self.body.messages or []
        limits = self.context.engine.config.limits
        limits.check("messages", len(messages), "messages")
        chat = await asyncio.to_thread(chat_of, messages, limits)
        begun = begun_answer(chat)
        asked = Conversation(
            messages=chat,
            tools=self.answers.use.tools,
            add_generation_prompt=not begun,
            continue_final_message=begun,
            template_kwargs=self.switches(),
        )
        return await self.answered(asked, delta=delta)

    def part(self, content: str, thinking: str = "", calls: Sequence[Call] = ()) -> ChatPart:
        message = Message(content, thinking=thinking or UNSET)
        calls = [call for call in calls if call.complete]  # Ollama has no form for others
        if calls:
            message.tool_calls = [called(self.calls + number, call) for number, call in enumerate(calls)]
            self.calls += len(calls)
        return ChatPart(model=self.name, created_at=now(), message=message)


class GenerateHandler(OllamaHandler[GenerateRequest]):
    def __init__(self, context: ServerContext, body: GenerateRequest) -> None:
        super().__init__(context, body)
        self.fill_in = context.fill_in("suffix") if body.suffix else None
        self.templated = not body.raw and self.fill_in is None and context.engine.tokenizer.has_chat_template
        if body.system and not self.templated:
            raise InvalidRequestError("system: this model has no chat template: write it into the prompt", "system")
        if self.fill_in is not None:
            self.params = self.fill_in.params(self.params)

    @property
    def asks(self) -> bool:
        return bool(self.body.prompt)

    def pieces(self, part: CompletionOutput) -> list[Piece]:
        """What follows a prompt that is no conversation is text."""
        if self.templated:
            return super().pieces(part)
        return [Piece(content=part.text)] if part.text else []

    async def stream(self, *, delta: bool) -> Outputs:
        body, engine = self.body, self.context.engine
        if self.templated:
            told = [{"role": "system", "content": body.system}] if body.system else []
            chat = [*told, {"role": "user", "content": body.prompt}]
            asked = Conversation(messages=chat, template_kwargs=self.switches())
            return await self.answered(asked, delta=delta, before=body.context or [])
        if self.fill_in is not None:
            ids = self.fill_in.prompt(await self.fill_in.read(body.prompt, body.suffix))
        else:
            ids = await engine.tokenize(body.prompt)
        params = self.params
        if self.structure is not None:
            params = replace(params, structured_outputs=self.structure)
        ids = behind(body.context or [], ids, engine.model.bos_token_id)
        return self.context.generate({"prompt_token_ids": ids}, params, body, self.new_id(), delta=delta)

    def part(self, content: str, thinking: str = "", calls: Sequence[Call] = ()) -> GeneratePart:
        return GeneratePart(model=self.name, created_at=now(), response=content, thinking=thinking or UNSET)

    def ended(self, output: RequestOutput, part: Part) -> Part:
        ended = super().ended(output, part)
        if isinstance(ended, GeneratePart) and not self.body.raw:
            ended.context = [*output.prompt_token_ids, *self.generated]
        return ended


def line(part: Part) -> bytes:
    return _encoder.encode(part) + b"\n"
