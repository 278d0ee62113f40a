"""POST /v1/completions: one or many prompts, n samples each, echo, log-probabilities, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from fastapi import Request
from fastapi.responses import Response

from engine.errors import InvalidRequestError
from engine.frontend.failures import fails_alone
from engine.frontend.fill_in import FillIn, Gap
from engine.request import CompletionOutput, RequestOutput
from entrypoints.server.context import EnginePrompt, Outputs, ServerContext, last
from entrypoints.server.encoding import json_response
from entrypoints.server.logprobs import CompletionLogprobs, CompletionScores, PromptLogprobs, prompt_logprobs
from entrypoints.server.protocol import CompletionRequest, StreamOptions
from entrypoints.server.responses import Completion, CompletionChoice, UsageCount, new_id, now
from entrypoints.server.streaming import DONE, answer, event, event_stream, merge
from entrypoints.server.structured import blamed_on


class CompletionHandler:
    """Serves one request body; holds what its choices need while they stream."""

    def __init__(self, context: ServerContext, body: CompletionRequest) -> None:
        self.context, self.body = context, body
        self.id, self.created = new_id("cmpl"), now()
        self.score_only = bool(body.echo) and body.max_tokens == 0
        """echo with max_tokens 0 scores the prompt: one token is generated and not sent"""
        self.echo_scores = bool(body.echo) and body.logprobs is not None
        wanted = [k for k in (body.prompt_logprobs, body.logprobs if body.echo else None) if k is not None]
        self.structured_by, structure = body.structure()
        self.params = body.sampling_params(
            context.engine.default_sampling_params(),
            1 if self.score_only else body.token_limit(context.recommended_max_tokens),
            body.logprobs,
            max(wanted, default=None),
            structure,
            body.best_of,
        )
        self.prompts = body.prompts()
        self.fill_in = context.fill_in("suffix") if body.suffix else None
        if self.fill_in is not None:
            self.params = self.fill_in.params(self.params)
        context.engine.config.limits.check("prompts", len(self.prompts), "prompt")
        if self.params.kv_transfer is not None and len(self.prompts) > 1:
            raise InvalidRequestError("kv_transfer_params are of one prompt: send each by itself", "kv_transfer_params")
        self.suffix_ids: list[int] = []
        """of what stands behind every gap"""
        self.prompt_texts: dict[int, str] = {}
        """of token ids that are to be echoed"""
        self.usage = UsageCount()
        self.prompt_scores: dict[int, PromptLogprobs] = {}
        self.held: dict[int, list[CompletionOutput]] = {}
        self.scores: dict[int, CompletionScores] = {}
        self.started: set[int] = set()

    async def stream(self, prompt_index: int, *, delta: bool) -> Outputs:
        given = self.prompts[prompt_index]
        prompt: EnginePrompt = given if isinstance(given, str) else {"prompt_token_ids": given}
        name = f"{self.id}-{prompt_index}"
        if self.fill_in is not None:
            return self.filled(self.fill_in, given, name, delta=delta)
        if self.body.echo and not isinstance(given, str):
            self.prompt_texts[prompt_index] = await self.context.engine.detokenize(given, field="prompt")
        if isinstance(given, str) and self.body.add_special_tokens is False:
            ids = await self.context.engine.tokenize(given, add_special_tokens=False)
            prompt = {"prompt": given, "prompt_token_ids": ids}
        return self.context.generate(prompt, self.params, self.body, name, delta=delta)

    async def filled(self, fill_in: FillIn, given: str | list[int], name: str, *, delta: bool) -> Outputs:
        """Of many prompts each is made when its turn comes."""
        gap = await fill_in.read(given, self.suffix_ids)
        if self.params.truncate_prompt_tokens is None:
            fill_in.check_size(gap, "prompt")
        prompt: EnginePrompt = {"prompt_token_ids": fill_in.prompt(gap)}
        async with aclosing(self.context.generate(prompt, self.params, self.body, name, delta=delta)) as outputs:
            async for output in outputs:
                yield output

    async def streams(self, *, delta: bool) -> list[Outputs]:
        if self.fill_in is not None:
            self.suffix_ids = await self.fill_in.encode_behind(self.body.suffix or "", "suffix")
            if self.params.truncate_prompt_tokens is None:
                self.fill_in.check_size(Gap([], self.suffix_ids, []), "suffix")
        streams = [await self.stream(i, delta=delta) for i in range(len(self.prompts))]
        at_once = max(self.context.engine.config.scheduler.max_waiting // (2 * self.params.num_samples), 1)
        if len(streams) <= at_once:
            return streams
        turn = asyncio.Semaphore(at_once)
        return [_in_turn(stream, turn) for stream in streams]

    def choice(self, prompt_index: int, output: RequestOutput, part: CompletionOutput) -> CompletionChoice:
        """The choice (or, when streaming, what is new of it) for one sample."""
        index = prompt_index * self.params.n + part.index
        text = "" if self.score_only else part.text
        echoed = None
        if self.body.echo and index not in self.started:
            echoed = self.prompt_texts.get(prompt_index, output.prompt or "")
            text = echoed + text
        choice = CompletionChoice(index, text, None, part.finish_reason, part.stop_reason)
        if self.body.return_token_ids:
            choice.token_ids = [] if self.score_only else part.token_ids
            if index not in self.started:
                choice.prompt_token_ids = output.prompt_token_ids
        self.started.add(index)
        if part.schema_error is not None:
            choice.schema_error = part.schema_error
        if self.score_only and part.finished:
            choice.finish_reason, choice.stop_reason = "length", None
        if self.body.logprobs is not None:
            choice.logprobs = self._logprobs(index, prompt_index, output, part, echoed)
        return choice

    def _logprobs(
        self, index: int, prompt_index: int, output: RequestOutput, part: CompletionOutput, echoed: str | None
    ) -> CompletionLogprobs:
        if index not in self.scores:
            skip = self.body.skip_special_tokens
            self.scores[index] = CompletionScores(self.context.texts, self.body.logprobs or 0, skip_special_tokens=skip)
        ids = output.prompt_token_ids
        prompt = None
        if echoed is not None:
            prompt = (echoed, ids, self.prompt_scores.get(prompt_index) or [None] * len(ids))
        if self.score_only:
            return self.scores[index].next([], [], prompt)
        return self.scores[index].next(part.token_ids, part.logprobs or [], prompt)

    def take(self, prompt_index: int, output: RequestOutput) -> list[CompletionOutput]:
        """Count an output and return what of it may be shown. The scores of an echoed prompt come once, with any
        sample: until they are there, the others are held back."""
        self.usage.add(prompt_index, output)
        if self.score_only:
            self.usage.drop_completion(sum(len(o.token_ids) for o in output.outputs))
        if output.prompt_logprobs is not None:
            self.prompt_scores[prompt_index] = output.prompt_logprobs
        parts = [*self.held.pop(prompt_index, ()), *output.outputs]
        if self.echo_scores and prompt_index not in self.prompt_scores and not output.finished:
            self.held[prompt_index] = parts
            return []
        return parts

    def envelope(self, choices: list[CompletionChoice]) -> Completion:
        fingerprint = self.context.fingerprint
        return Completion(
            self.id, self.created, self.context.name_of(self.body.model), choices, system_fingerprint=fingerprint
        )

    def _event(self, prompt_index: int, output: RequestOutput, part: CompletionOutput, with_usage: bool) -> bytes:
        with fails_alone("making a part of the answer"):
            chunk = self.envelope([self.choice(prompt_index, output, part)])
            chunk.usage = self.usage.usage() if with_usage else None
            return event(chunk)

    def _moved(self, options: StreamOptions | None) -> bytes | None:
        if options is None or not options.include_moves or not (moves := self.usage.moved()):
            return None
        return event(msgspec.structs.replace(self.envelope([]), num_moves=moves))

    async def whole(self) -> Completion:
        tasks = [asyncio.ensure_future(last(s)) for s in await self.streams(delta=False)]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        with fails_alone("making the answer"):
            return self.reply(outputs)

    def reply(self, outputs: Sequence[RequestOutput]) -> Completion:
        choices = []
        for i, output in enumerate(outputs):
            made = [self.choice(i, output, part) for part in self.take(i, output)]
            if self.body.prompt_logprobs is not None and output.prompt_logprobs is not None:
                shown = prompt_logprobs(output.prompt_logprobs, self.body.prompt_logprobs)
                for choice in made:
                    choice.prompt_logprobs = shown
            choices += made
        completion = self.envelope(choices)
        completion.usage = self.usage.usage()
        if self.body.kv_transfer_params:
            completion.kv_transfer_params = outputs[0].kv_transfer_params
        return completion

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options
        each = bool(options and options.continuous_usage_stats)
        streams = await self.streams(delta=True)
        if len(streams) == 1:  # nothing to wait for at once: no task between the engine and the client
            async with aclosing(streams[0]) as only:
                async for output in only:
                    for part in self.take(0, output):
                        if told := self._moved(options):
                            yield told
                        yield self._event(0, output, part, each)
        else:
            async with aclosing(merge(streams)) as outputs:
                async for i, output in outputs:
                    for part in self.take(i, output):
                        if told := self._moved(options):
                            yield told
                        yield self._event(i, output, part, each)
        if options and options.include_usage:
            final = self.envelope([])
            final.usage = self.usage.usage()
            yield event(final)
        yield DONE


async def _in_turn(stream: Outputs, turn: asyncio.Semaphore) -> Outputs:
    """Nobody is refused because of others of the same body: half of a queue is theirs."""
    async with turn, aclosing(stream) as outputs:
        async for output in outputs:
            yield output


async def create_completion(context: ServerContext, body: CompletionRequest, request: Request) -> Response:
    context.check_model(body.model, generates=True)
    handler = CompletionHandler(context, body)
    with blamed_on(handler.structured_by):
        if body.stream:
            return await event_stream(request, handler.chunks())
        return json_response(await answer(request, handler.whole()))
