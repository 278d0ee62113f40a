"""vLLM's `AsyncLLM` (`AsyncLLMEngine`) over `AsyncEngine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Self, cast

from engine.adapters.request import LoRARequest
from engine.async_engine import AsyncEngine
from engine.config import EngineArgs, ModelConfig
from engine.errors import CoreDiedError
from engine.frontend.admission import Prompt
from engine.request import RequestOutput, SamplingParams
from engine.vllm.offline import refuse

if TYPE_CHECKING:
    import transformers


class AsyncEngineArgs(EngineArgs, frozen=True, kw_only=True):
    """`EngineArgs`, which takes vLLM's names, too."""


class AsyncLLM:
    """Starts at the first request, on the event loop that makes it. `engine` has all that vLLM has no name for."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: None = None,
    ) -> Self:
        """What follows `engine_args` has no effect."""
        return cls(AsyncEngine(engine_args))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: object = None,
        trace_headers: object = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `sampling_params.output_kind` has it. Closing the iterator aborts the request. Raises as
        `AsyncEngine.generate`."""
        refuse(tokenization_kwargs=tokenization_kwargs, trace_headers=trace_headers)
        stream = self.engine.generate(prompt, sampling_params, request_id, priority=priority, lora_request=lora_request)
        async with aclosing(cast("AsyncGenerator[RequestOutput, None]", stream)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Their streams end with finish_reason "abort". Unknown ids are ignored."""
        await self.engine.start()
        await self.engine.abort(request_id)

    async def get_tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        await self.engine.start()
        return await asyncio.to_thread(lambda: self.engine.tokenizer.hf)

    async def get_model_config(self) -> ModelConfig:
        await self.engine.start()
        return self.model_config

    @property
    def model_config(self) -> ModelConfig:
        """Raises `EngineError` before the start."""
        return self.engine.config.model

    async def check_health(self) -> None:
        """Raises `CoreDiedError`."""
        self.engine.check_health()

    @property
    def errored(self) -> bool:
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def dead_error(self) -> CoreDiedError | None:
        """What ended the core, or `ShutDownError`."""
        try:
            self.engine.check_health()
        except CoreDiedError as error:
            return error
        return None

    async def reset_prefix_cache(self) -> bool:
        await self.engine.start()
        self.engine.reset_prefix_cache()
        return True

    def shutdown(self, timeout: float | None = None) -> None:
        """Whoever waits learns of it now; the core is stopped when the event loop turns next. `timeout` has no effect:
        nothing is waited for."""
        self.engine.shutdown_soon()


class AsyncLLMEngine(AsyncLLM):
    """The older name."""
