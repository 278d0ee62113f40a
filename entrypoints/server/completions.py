"""POST /v1/completions: one or many prompts, n samples each, echo, log-probabilities, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.responses import Response

from engine.errors import InvalidRequestError
from engine.request import CompletionOutput, LogprobsAt, RequestOutput
from entrypoints.server.context import EnginePrompt, ServerContext, last
from entrypoints.server.encoding import json_response
from entrypoints.server.logprobs import completion_logprobs
from entrypoints.server.protocol import CompletionRequest
from entrypoints.server.responses import Completion, CompletionChoice, UsageCount, new_id, now
from entrypoints.server.streaming import DONE, EventStream, answer, event, merge, primed


class CompletionHandler:
    """Serves one request body; holds what its choices need while they stream."""

    def __init__(self, context: ServerContext, body: CompletionRequest) -> None:
        self.context, self.body = context, body
        self.id, self.created = new_id("cmpl"), now()
        self.echo = bool(body.echo)
        self.score_only = self.echo and body.max_tokens == 0
        """echo with max_tokens 0 scores the prompt: one token is generated and not sent"""
        want_prompt = (
            body.prompt_logprobs if body.prompt_logprobs is not None else (body.logprobs if self.echo else None)
        )
        if body.prompt_logprobs is not None and not self.echo:
            raise InvalidRequestError("prompt_logprobs are returned with echo; set echo to true", "prompt_logprobs")
        max_tokens = 1 if self.score_only else body.max_tokens
        self.params = body.sampling_params(max_tokens, body.logprobs, want_prompt)
        self.prompts: list[EnginePrompt] = [
            p if isinstance(p, str) else {"prompt_token_ids": p} for p in body.prompts()
        ]
        self.usage = UsageCount()
        self.offsets: dict[int, int] = {}
        self.started: set[int] = set()

    def streams(self, *, delta: bool) -> list[AsyncIterator[RequestOutput]]:
        return [
            self.context.generate(p, self.params, self.body, f"{self.id}-{i}", delta=delta)
            for i, p in enumerate(self.prompts)
        ]

    def choice(self, prompt_index: int, output: RequestOutput, part: CompletionOutput) -> CompletionChoice:
        """The choice (or, when streaming, what is new of it) for one sample."""
        index = prompt_index * self.params.n + part.index
        text, tokens = part.text, list(zip(part.token_ids, part.logprobs or ()))
        scored: list[tuple[int, LogprobsAt | None]] = [(t, at) for t, at in tokens]
        if self.score_only:
            text, scored = "", []
        if self.echo and index not in self.started:
            text = self._prompt_text(output) + text
            scored = self._prompt_scores(output) + scored
        self.started.add(index)
        choice = CompletionChoice(index, text, None, part.finish_reason, part.stop_reason)
        if self.body.logprobs is not None:
            offset = self.offsets.get(index, 0)
            choice.logprobs, self.offsets[index] = completion_logprobs(scored, self.body.logprobs, offset)
        return choice

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self.context.engine.detokenize(output.prompt_token_ids)

    def _prompt_scores(self, output: RequestOutput) -> list[tuple[int, LogprobsAt | None]]:
        ids = output.prompt_token_ids
        return list(zip(ids, output.prompt_logprobs or [None] * len(ids)))

    def count(self, prompt_index: int, output: RequestOutput) -> None:
        self.usage.add(prompt_index, output)
        if self.score_only:
            self.usage.drop_completion(sum(len(o.token_ids) for o in output.outputs))

    def envelope(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(self.id, self.created, self.context.served_name, choices)

    async def whole(self) -> Completion:
        tasks = [asyncio.ensure_future(last(s)) for s in self.streams(delta=False)]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for i, output in enumerate(outputs):
            self.count(i, output)
        completion = self.envelope([self.choice(i, o, part) for i, o in enumerate(outputs) for part in o.outputs])
        completion.usage = self.usage.usage()
        return completion

    async def chunks(self) -> AsyncIterator[bytes]:
        options = self.body.stream_options
        each = bool(options and options.continuous_usage_stats)
        outputs = merge(self.streams(delta=True))
        try:
            async for i, output in outputs:
                self.count(i, output)
                for part in output.outputs:
                    chunk = self.envelope([self.choice(i, output, part)])
                    chunk.usage = self.usage.usage() if each else None
                    yield event(chunk)
        finally:
            await outputs.aclose()
        if options and options.include_usage:
            final = self.envelope([])
            final.usage = self.usage.usage()
            yield event(final)
        yield DONE


async def create_completion(context: ServerContext, body: CompletionRequest, request: Request) -> Response:
    context.check_model(body.model)
    handler = CompletionHandler(context, body)
    if body.stream:
        return EventStream(await answer(request, primed(handler.chunks())))
    return json_response(await answer(request, handler.whole()))
