"""What the routes share: the engine, the served name, and how one HTTP request becomes engine streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import HTTPException

from engine import AsyncEngine, SamplingParams
from engine.request import LogprobsAt, RequestOutput
from entrypoints.server.errors import model_not_found
from entrypoints.server.protocol import SamplingFields

EnginePrompt = str | dict[str, list[int]]


@dataclass(frozen=True)
class ServerContext:
    engine: AsyncEngine
    served_name: str

    def check_model(self, name: str | None) -> None:
        """OpenAI clients must name a model; a wrong name is a 404, none means the one served."""
        if name is not None and name != self.served_name:
            raise HTTPException(404, model_not_found(name, self.served_name))

    def generate(
        self, prompt: EnginePrompt, params: SamplingParams, body: SamplingFields, request_id: str, *, delta: bool
    ) -> AsyncIterator[RequestOutput]:
        return self.engine.generate(
            prompt, params, request_id, priority=body.priority, cache_salt=body.cache_salt, delta=delta
        )


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The final state of a request whose outputs are cumulative."""
    final: RequestOutput | None = None
    async for output in stream:
        final = output
    assert final is not None, "a stream ends with a finished output"
    return final


PromptLogprobs = list[LogprobsAt | None] | None
