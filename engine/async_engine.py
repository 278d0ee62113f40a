"""`AsyncEngine`: many requests at once on one event loop, each an async iterator. The server is one user of it.

One task receives the core's outputs and wakes the streams concerned; each stream renders what it has not shown.
Tokenizing and templates run in threads, the model in the core's process: the event loop only moves messages.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.config import EngineArgs, EngineConfig
from engine.core.client import CoreClient, InProcessClient, ProcessClient
from engine.core.wire import AbortRequests, CoreReady, CoreStats, ResetPrefixCache, UnpinPrefix
from engine.errors import CoreDiedError, EngineError
from engine.frontend.admission import (
    PIN_PARAMS,
    Admission,
    AdmittedRequest,
    PinnedPrefixes,
    Prompt,
    default_sampling_params,
    parse_prompt,
)
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.tokenizer import ChatMessage, Tokenizer
from engine.models.description import ModelDescription
from engine.observability.metrics import EngineMetrics
from engine.observability.timings import RequestTimings
from engine.request import RequestOutput, SamplingParams
from engine.resolve import resolve_here

logger = logging.getLogger(__name__)

_COMPILED_POLL_S = 0.05


class _News:
    """Something new for one stream, which alone waits for it. `asyncio.Event` for one: a third of the cost, and every
    streamed token pays it."""

    __slots__ = ("_come", "_waiter")

    def __init__(self) -> None:
        self._come = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._come = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> None:
        """Returns once there is news since the last call."""
        if not self._come:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._come = False


class _Started:
    """All that exists once the engine serves; its own type, so that no field is half there."""

    def __init__(
        self,
        model: ModelDescription,
        config: EngineConfig,
        tokenizer: Tokenizer,
        client: CoreClient,
        ready: CoreReady,
    ) -> None:
        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        self.client = client
        self.ready = ready
        self.admission = Admission(config, tokenizer)
        self.processor = OutputProcessor(tokenizer)
        self.metrics = EngineMetrics(config.model.served_name)
        self.metrics.stats = CoreStats(compiling=ready.compiling)
        self.pinned = PinnedPrefixes()
        self.streams: dict[str, _News] = {}
        self.receiver: asyncio.Task[None] | None = None
        self.death: CoreDiedError | None = None


class AsyncEngine:
    """Starts at `start` or at the first request; belongs to the event loop that started it. Close it with
    `shutdown`."""

    def __init__(
        self,
        args: EngineArgs,
        *,
        in_process: bool = False,
        client_factory: Callable[[EngineConfig], CoreClient] | None = None,
    ) -> None:
        """`in_process` runs the core on the event loop (debugging: each step holds the loop up). `client_factory`
        brings another core and overrides it."""
        self._args = args
        self._client_factory = client_factory or (InProcessClient if in_process else ProcessClient)
        self._start_task: asyncio.Task[_Started] | None = None
        self._client: CoreClient | None = None
        self._engine: _Started | None = None
        self._closed = False

    @classmethod
    def from_args(cls, args: EngineArgs, *, in_process: bool = False) -> Self:
        return cls(args, in_process=in_process)

    async def start(self) -> CoreReady:
        """Load the model and wait until it serves; once. Raises `ConfigError` and the like, or `CoreDiedError`."""
        return (await self._started()).ready

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        delta: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come: cumulative, or with `delta` only what is new. The last one is `finished`.

        A consumer that is slow gets several steps in one output. Closing or cancelling the iterator aborts the request.
        Raises `InvalidRequestError`, `QueueFullError`, `RequestFailedError`, `CoreDiedError`.
        """
        arrival = time.monotonic()
        engine = await self._started()
        self.check_health()
        admitted = await self._admit(engine, prompt, sampling_params, request_id, priority, cache_salt)
        async with aclosing(self._stream(engine, admitted, arrival, delta)) as outputs:
            async for output in outputs:
                yield output

    async def _stream(
        self, engine: _Started, admitted: AdmittedRequest, arrival: float, delta: bool
    ) -> AsyncGenerator[RequestOutput, None]:
        self.check_health()
        name = admitted.request_id
        engine.processor.add(admitted, now=arrival, delta=delta)
        news = engine.streams[name] = _News()
        try:
            engine.client.send(admitted.message)
            finished = False
            while not finished:
                await news.next()
                # What arrived before the core died is worth having; the news of its death is not lost.
                output = engine.processor.take(name)
                error = engine.processor.error(name) or (engine.death if output is None else None)
                if error is not None:
                    raise error
                if output is not None:
                    finished = output.finished
                    if engine.death is not None:
                        news.set()
                    yield output
        finally:
            del engine.streams[name]
            self._end(engine, *engine.processor.remove(name, time.monotonic()))

    async def pin_prefix(self, name: str, prefix: Prompt) -> int:
        """As `LLM.pin_prefix`; raises as `generate`."""
        engine = await self._started()
        engine.pinned.check_new(name)
        admitted = await self._admit(engine, prefix, PIN_PARAMS, None, 0, None, pin=name)
        async for _ in self._stream(engine, admitted, time.monotonic(), delta=False):
            pass
        return engine.pinned.add(name, len(admitted.prompt_token_ids))

    def unpin_prefix(self, name: str) -> None:
        self.check_health()
        self._require().pinned.remove(name)
        self._require().client.send(UnpinPrefix(name=name))

    def pinned_prefixes(self) -> dict[str, int]:
        return self._require().pinned.list()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests where they stand: their streams end with finish_reason "abort". Unknown ids are ignored."""
        engine = self._require()
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            self._end(engine, *engine.processor.abort(name, time.monotonic()))
            if name in engine.streams:
                engine.streams[name].set()

    async def wait_compiled(self) -> None:
        """Return once no compilation goes on behind the serving engine (`stats().compiling`); benchmarks begin there.
        Raises `CoreDiedError`."""
        engine = await self._started()
        while engine.metrics.stats.compiling:
            self.check_health()
            await asyncio.sleep(_COMPILED_POLL_S)

    def check_health(self) -> None:
        """Raises `CoreDiedError` when requests can not be served: the core died, or `shutdown` was called."""
        if self._closed:
            raise CoreDiedError("this engine was shut down")
        if self._engine is not None and self._engine.death is not None:
            raise self._engine.death

    def stalled(self) -> str | None:
        """Why the core, which has work, seems to make no progress, long before it counts as dead; or None."""
        return self._require().client.stalled()

    @property
    def num_streams(self) -> int:
        """Requests that were handed to the core and have not ended."""
        return len(self._engine.streams) if self._engine is not None else 0

    def abandon(self) -> None:
        """Kill the core where it stands, also while it starts; from any thread and from a signal handler. `shutdown`
        is quick then."""
        if self._client is not None:
            self._client.abandon()

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await (await self._started()).tokenizer.encode_async(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._require().tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of the rendered conversation. Templates write special tokens out, so none are added by default."""
        tokenizer = (await self._started()).tokenizer
        text = await tokenizer.apply_chat_template_async(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return await tokenizer.encode_async(text, add_special_tokens=add_special_tokens)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no sequence uses."""
        self.check_health()
        self._require().client.send(ResetPrefixCache())

    def stats(self) -> CoreStats:
        """The core's gauges and counters as of its latest step."""
        return self._require().metrics.stats

    def default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where none are given: the model's generation config, else the defaults."""
        return default_sampling_params(self._require().model.generation_defaults)

    @property
    def ready(self) -> CoreReady:
        return self._require().ready

    @property
    def config(self) -> EngineConfig:
        return self._require().config

    @property
    def model(self) -> ModelDescription:
        return self._require().model

    @property
    def max_model_len(self) -> int:
        return self._require().config.model.max_model_len

    @property
    def served_name(self) -> str:
        return self._require().config.model.served_name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._require().tokenizer

    @property
    def metrics(self) -> EngineMetrics:
        return self._require().metrics

    async def shutdown(self) -> None:
        """Stop the core and free everything; streams that still wait raise `CoreDiedError`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._start_task is not None and self._engine is None:
            with suppress(EngineError):
                await self._start_task
        if self._engine is None:
            return
        receiver = self._engine.receiver
        if receiver is not None:
            receiver.cancel()
            await asyncio.gather(receiver, return_exceptions=True)
        self._die(self._engine, CoreDiedError("this engine was shut down"))
        await asyncio.to_thread(self._engine.client.close)
        self._engine.tokenizer.close()

    def _require(self) -> _Started:
        if self._engine is None:
            raise EngineError("the engine has not started: `await engine.start()` first")
        return self._engine

    async def _started(self) -> _Started:
        self.check_health()
        if self._engine is not None:
            return self._engine
        if self._start_task is None:
            self._start_task = asyncio.get_running_loop().create_task(self._start())
        # A caller that gives up does not stop the start: others wait for it, and `shutdown` takes it down in order.
        return await asyncio.shield(self._start_task)

    async def _start(self) -> _Started:
        model, config = await asyncio.to_thread(resolve_here, self._args)
        client = self._client = self._client_factory(config)
        ready, tokenizer = await asyncio.gather(
            asyncio.to_thread(client.start),
            asyncio.to_thread(Tokenizer.load, config.model.tokenizer, Path(config.compile.cache_dir)),
            return_exceptions=True,
        )
        if isinstance(ready, BaseException) or isinstance(tokenizer, BaseException):
            await asyncio.to_thread(client.close)
            if isinstance(tokenizer, BaseException):
                raise tokenizer
            tokenizer.close()
            assert isinstance(ready, BaseException)
            raise ready
        engine = self._engine = _Started(model, config, tokenizer, client, ready)
        engine.receiver = asyncio.get_running_loop().create_task(self._receive(engine))
        return engine

    async def _admit(
        self,
        engine: _Started,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        pin: str | None = None,
    ) -> AdmittedRequest:
        parsed = parse_prompt(prompt)
        token_ids = parsed.token_ids
        if token_ids is None:
            token_ids = await engine.tokenizer.encode_async(parsed.text or "")
        return engine.admission.admit(
            request_id if request_id is not None else secrets.token_hex(8),
            parsed.text,
            token_ids,
            params if params is not None else default_sampling_params(engine.model.generation_defaults),
            priority=priority,
            cache_salt=cache_salt if cache_salt is not None else parsed.cache_salt,
            pin=pin,
        )

    async def _receive(self, engine: _Started) -> None:
        """The one task that listens to the core. Whatever ends it is told to every stream."""
        try:
            while True:
                outputs = await engine.client.recv_async()
                engine.metrics.stats = outputs.stats
                progress = engine.processor.process(outputs.deltas, time.monotonic())
                if progress.aborts:
                    engine.client.send(AbortRequests(request_ids=progress.aborts))
                for timings in progress.finished:
                    engine.metrics.observe_request(timings)
                for name in progress.touched:
                    engine.streams[name].set()
        except CoreDiedError as error:
            self._die(engine, error)
        except Exception as error:
            logger.exception("the engine's receiver failed")
            self._die(engine, CoreDiedError(f"the engine's receiver failed: {error!r}"))

    def _die(self, engine: _Started, error: CoreDiedError) -> None:
        if engine.death is None:
            engine.death = error
        for news in engine.streams.values():
            news.set()

    def _end(self, engine: _Started, core_ids: list[str], timings: RequestTimings | None) -> None:
        """Tell the core and the metrics of a request that ended before its time."""
        if timings is not None:
            engine.metrics.observe_request(timings)
        if core_ids and engine.death is None:
            try:
                engine.client.send(AbortRequests(request_ids=core_ids))
            except CoreDiedError as error:
                self._die(engine, error)
