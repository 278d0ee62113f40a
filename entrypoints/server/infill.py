"""llama.cpp's POST /infill: what belongs between the text before a cursor and the text behind it, whole or streamed.

Editors send more than fits (they know no context length), so what is farthest from the cursor is left out, as
llama.cpp does. What there is about one server's slots and batches has no effect here, and neither have `samplers` (the
order is the engine's) and `t_max_predict_ms` (`n_predict` bounds the answer).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field

from engine import SamplingParams
from engine.errors import InvalidRequestError
from engine.frontend.failures import fails_alone
from engine.frontend.fill_in import Gap
from engine.limits import Limits
from engine.request import CompletionOutput, RequestOutput
from entrypoints.server.context import Outputs, ServerContext, last
from entrypoints.server.durations import durations_of
from entrypoints.server.encoding import json_response
from entrypoints.server.fields import Body, NoEffect, Objects, Texts
from entrypoints.server.llama_options import LlamaOptions
from entrypoints.server.responses import new_id
from entrypoints.server.streaming import answer, event, event_stream
from entrypoints.server.structured import StructuredFields, blamed_on

PATH = "/infill"
_FIELDS = ("input_prefix", "input_suffix", "input_extra")


class InfillRequest(LlamaOptions, StructuredFields, Body):
    UNSUPPORTED: ClassVar = {**LlamaOptions.UNSUPPORTED, "logit_bias": (), "lora": (), "n_indent": (), "n_probs": ()}

    model: str | None = None
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Objects | None = None
    """other files, ``{"filename": …, "text": …}`` each; the last are the most important"""
    prompt: str = ""
    """what the line of the cursor begins with, where `input_prefix` ends before it"""
    n_predict: int = -1
    """negative: what the context holds; 0: the prompt is computed, for the prefix cache"""
    stream: bool = False
    ignore_eos: bool = False
    response_fields: Texts | None = None
    """of the whole answer, or of a stream's last part, as ``timings/prompt_n``: which to send, and under that name"""
    return_tokens: bool = False
    priority: int = 0
    cache_salt: str | None = Field(default=None, min_length=1)
    cache_prompt: NoEffect = None
    id_slot: NoEffect = None
    n_cache_reuse: NoEffect = None
    n_keep: NoEffect = None
    penalize_nl: NoEffect = None
    post_sampling_probs: NoEffect = None
    samplers: NoEffect = None
    t_max_predict_ms: NoEffect = None
    t_max_prompt_ms: NoEffect = None
    timings_per_token: NoEffect = None

    def files(self, limits: Limits) -> list[tuple[str, str]]:
        """Raises `InvalidRequestError`."""
        limits.check("files", len(self.input_extra or ()), "input_extra")
        found = []
        for number, given in enumerate(self.input_extra or ()):
            name, text = given.get("filename", "file"), given.get("text")
            if not isinstance(name, str) or not isinstance(text, str):
                where = f"input_extra[{number}]"
                raise InvalidRequestError(f"{where} must have a text, and may have a filename", "input_extra")
            found.append((name, text))
        return found

    def sampling_params(self, defaults: SamplingParams) -> tuple[str | None, SamplingParams]:
        """And the field that a grammar comes from. Raises `InvalidRequestError`."""
        structured_by, structure = self.structure()
        most = None if self.n_predict < 0 else max(self.n_predict, 1)
        with blamed_on("n_predict", "max_tokens"):
            return structured_by, self.params(defaults, most, structure, ignore_eos=self.ignore_eos)


class Timings(msgspec.Struct):
    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillPart(msgspec.Struct, kw_only=True):
    """Of a stream."""

    content: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens: list[int] = []
    index: int = 0
    id_slot: int = -1
    stop: bool = False


class Infilled(InfillPart, kw_only=True):
    """What ends a stream has no content. `truncated`: not all that was sent fitted into the prompt."""

    model: str
    timings: Timings
    generation_settings: dict[str, Any]
    truncated: bool
    has_new_line: bool
    stop_type: str
    stopping_word: str
    tokens_cached: int
    stop: bool = True


class InfillHandler:
    """Serves one request body."""

    def __init__(self, context: ServerContext, body: InfillRequest) -> None:
        """Raises `InvalidRequestError`."""
        self.context, self.body = context, body
        self.fill_in = context.fill_in("input_suffix")
        limits = context.engine.config.limits
        limits.check("response_fields", len(body.response_fields or ()), "response_fields")
        self.files = body.files(limits)
        self.structured_by, params = body.sampling_params(context.engine.default_sampling_params())
        self.params = self.fill_in.params(params)
        self.truncated = self.has_new_line = False
        self.predicted = 0

    async def stream(self, *, delta: bool) -> Outputs:
        body = self.body
        gap = await self.fill_in.read(body.input_prefix + body.prompt, body.input_suffix, self.files, _FIELDS)
        prompt = {"prompt_token_ids": self.prompt(gap)}
        return self.context.generate(prompt, self.params, body, new_id("infill"), delta=delta)

    def prompt(self, gap: Gap) -> list[int]:
        """Room is left for the answer, in half of the context at most."""
        context = self.context.engine.max_model_len
        wanted = context // 4 if self.params.max_tokens is None else self.params.max_tokens
        whole = self.fill_in.prompt(gap)
        room = context - min(wanted, context // 2)
        self.truncated = len(whole) > room
        return self.fill_in.prompt(gap, room) if self.truncated else whole

    def part(self, output: RequestOutput) -> InfillPart:
        """What is new."""
        (new,) = output.outputs
        shown = self.body.n_predict != 0
        self.predicted += len(new.token_ids) if shown else 0
        self.has_new_line |= shown and "\n" in new.text
        return InfillPart(
            content=new.text if shown else "",
            tokens=new.token_ids if shown and self.body.return_tokens else [],
            tokens_predicted=self.predicted,
            tokens_evaluated=len(output.prompt_token_ids),
        )

    def whole_of(self, output: RequestOutput, content: str, tokens: list[int]) -> Any:
        (new,) = output.outputs
        infilled = Infilled(
            content=content,
            tokens=tokens,
            tokens_predicted=self.predicted,
            tokens_evaluated=len(output.prompt_token_ids),
            model=self.context.name_of(self.body.model),
            timings=self.timings(output),
            generation_settings=self.settings(),
            truncated=self.truncated,
            has_new_line=self.has_new_line,
            stop_type=self.stop_type(new),
            stopping_word=new.stop_reason if isinstance(new.stop_reason, str) else "",
            tokens_cached=output.num_cached_tokens,
        )
        wanted = self.body.response_fields
        return infilled if not wanted else _chosen(msgspec.to_builtins(infilled), wanted)

    def stop_type(self, part: CompletionOutput) -> str:
        if part.finish_reason == "length":
            return "limit"
        return "word" if isinstance(part.stop_reason, str) else "eos"

    def settings(self) -> dict[str, Any]:
        params = self.params
        names = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos")
        return {name: getattr(params, name) for name in names} | {
            "n_predict": self.body.n_predict,
            "repeat_penalty": params.repetition_penalty,
            "seed": -1 if params.seed is None else params.seed,
            "stop": params.stop_strings,
            "stream": self.body.stream,
        }

    def timings(self, output: RequestOutput) -> Timings:
        took = durations_of(output)
        computed = len(output.prompt_token_ids) - output.num_cached_tokens
        prompt, predicted = _rates(computed, took.prompt_s), _rates(self.predicted, took.answer_s)
        return Timings(output.num_cached_tokens, computed, *prompt, self.predicted, *predicted)

    async def whole(self) -> Any:
        output = await last(await self.stream(delta=False))
        with fails_alone("making the answer"):
            part = self.part(output)
            return self.whole_of(output, part.content, part.tokens)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(await self.stream(delta=True)) as outputs:
            async for output in outputs:
                with fails_alone("making a part of the answer"):
                    part = self.part(output)
                    shown = event(part) if part.content or part.tokens else b""
                    if output.finished:
                        shown += event(self.whole_of(output, "", []))
                if shown:
                    yield shown


def _rates(tokens: int, seconds: float) -> tuple[float, float, float]:
    """Milliseconds, of each token, tokens a second."""
    took_ms = seconds * 1e3
    return took_ms, took_ms / tokens if tokens else 0.0, tokens / seconds if seconds else 0.0


def _chosen(whole: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Those that there are; what stands within others by its path, as ``timings/prompt_n``."""
    found: dict[str, Any] = {}
    for path in wanted:
        value: Any = whole
        for name in path.split("/", 2):
            value = value.get(name, msgspec.UNSET) if isinstance(value, Mapping) else msgspec.UNSET
        if value is not msgspec.UNSET:
            found[path] = value
    return found


async def create_infill(context: ServerContext, body: InfillRequest, request: Request) -> Response:
    context.check_model(body.model, generates=True)
    handler = InfillHandler(context, body)
    with blamed_on(handler.structured_by):
        if body.stream:
            return await event_stream(request, handler.chunks())
        return json_response(await answer(request, handler.whole()))


def add_routes(app: FastAPI, context: ServerContext) -> None:
    @app.post(PATH)
    async def infill(body: InfillRequest, request: Request) -> Response:
        context.take_note(body, request)
        return await create_infill(context, body, request)
