"""What the routes share: the engine, the served name, and how one HTTP request becomes engine streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing

from fastapi import HTTPException

from engine import AsyncEngine, SamplingParams
from engine.request import RequestOutput
from entrypoints.server.errors import model_not_found
from entrypoints.server.protocol import SamplingFields
from entrypoints.server.token_text import TokenTexts

EnginePrompt = str | Mapping[str, object]
Outputs = AsyncGenerator[RequestOutput, None]


class ServerContext:
    """The engine must be started."""

    def __init__(self, engine: AsyncEngine, served_name: str) -> None:
        self.engine = engine
        self.served_name = served_name
        self.texts = TokenTexts(engine.tokenizer)
        recommended = engine.model.generation_defaults.get("max_new_tokens")
        self.recommended_max_tokens = None if recommended is None else int(recommended)
        """for requests that leave it out"""

    def check_model(self, name: str | None) -> None:
        """OpenAI clients must name a model; a wrong name is a 404, none means the one served."""
        if name is not None and name != self.served_name:
            raise HTTPException(404, model_not_found(name, self.served_name))

    def generate(
        self, prompt: EnginePrompt, params: SamplingParams, body: SamplingFields, request_id: str, *, delta: bool
    ) -> Outputs:
        stream: AsyncIterator[RequestOutput] = self.engine.generate(
            prompt,
            params,
            request_id,
            priority=body.priority,
            cache_salt=body.cache_salt,
            delta=delta,
            final_only=not delta,
        )
        assert isinstance(stream, AsyncGenerator), "closing it is what aborts the request"
        return stream


async def last(stream: Outputs) -> RequestOutput:
    """The one output of a request of which only the end is wanted."""
    final: RequestOutput | None = None
    async with aclosing(stream):
        async for output in stream:
            final = output
    assert final is not None, "a stream ends with a finished output"
    return final
