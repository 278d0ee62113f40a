"""`AsyncEngine`: many requests at once on one event loop, each an async iterator. The server is one user of it.

What serves is `engine.serving`; here it is started, asked and shut down. Tokenizing and templates run in threads and
helper processes, the model in the core's process: the event loop only moves messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Self

from msgspec.structs import replace

from engine.adapters.request import LoRARequest
from engine.administration import Administered
from engine.config import EngineArgs, EngineConfig
from engine.core.client import CoreClient
from engine.core.wire import CoreReady, CoreStats
from engine.errors import EngineError, InvalidRequestError, ShutDownError
from engine.frontend.adapters import check_adapter
from engine.frontend.admission import PROMPT_ONLY, Prompt, parse_prompt
from engine.frontend.conversation import ChatMessage
from engine.frontend.failures import fails_alone
from engine.frontend.tokenizer import Tokenizer
from engine.limits import check_token_ids
from engine.models.description import ModelDescription
from engine.observability.metrics import EngineMetrics
from engine.observability.request_watch import RequestWatch
from engine.plan import resolve_with_plan
from engine.pooling import PoolingParams, PoolingRequestOutput, pooled_output
from engine.replicas.choice import local_client, process_client
from engine.request import NOBODY, RequestOutput, RequestOutputKind, SamplingParams, Tenant
from engine.serving import Serving, start_serving

_COMPILED_POLL_S = 0.05


class AsyncEngine(Administered):
    """Starts at `start` or at the first request; belongs to the event loop that started it. `shutdown` closes it."""

    def __init__(
        self,
        args: EngineArgs,
        *,
        in_process: bool = False,
        client_factory: Callable[[EngineConfig], CoreClient] | None = None,
        resolve: Callable[[EngineArgs], tuple[ModelDescription, EngineConfig]] = resolve_with_plan,
    ) -> None:
        """`in_process` runs the core on the event loop (debugging: each step holds the loop up). `client_factory`
        brings another core and overrides it; `resolve`: another configuration than what follows from `args`."""
        self._args = args
        self._client_factory = client_factory or (local_client if in_process else process_client)
        self._resolve = resolve
        self._start_task: asyncio.Task[Serving] | None = None
        self._client: CoreClient | None = None
        self._engine: Serving | None = None
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

    async def __aexit__(self, *exception: object) -> None:
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
        final_only: bool = False,
        lora_request: LoRARequest | None = None,
        tenant: Tenant = NOBODY,
        timeout_s: float | None = None,
        arrived_at: float | None = None,
        watch: RequestWatch | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs as they come: cumulative, with `delta` only what is new, with `final_only` one, at the end; without
        either, as the parameters' `output_kind` has it. The last one is `finished`. `tenant`: whose share of the
        engine it takes (`scheduling_policy="fair"`). `timeout_s`: in which it must end; what cannot be served so soon
        is refused at once. It counts from `arrived_at`, on `time.monotonic`'s clock; None: from when the first output
        is asked for. `watch` is told of the end, whatever it is.

        A consumer that is slow gets several steps in one output. Closing or cancelling the iterator aborts the request.
        Raises `InvalidRequestError`, `QueueFullError`, `DeadlineError`, `RequestFailedError`, `CoreDiedError`.
        """
        arrival = time.monotonic() if arrived_at is None else arrived_at
        with watch or nullcontext():
            engine = await self._started()
            self.check_health()
            if delta and final_only:
                raise InvalidRequestError("delta and final_only exclude each other", "final_only")
            admitted = await engine.admit_async(
                parse_prompt(prompt),
                sampling_params,
                request_id,
                priority,
                cache_salt,
                lora_request=lora_request,
                tenant=tenant,
            )
            if not delta and not final_only:
                kind = admitted.params.output_kind
                delta, final_only = kind is RequestOutputKind.DELTA, kind is RequestOutputKind.FINAL_ONLY
            with engine.stream(
                admitted, arrival, delta=delta, final_only=final_only, watch=watch, timeout_s=timeout_s
            ) as stream:
                finished = False
                while not finished:
                    output = await stream.next()
                    finished = output.finished
                    yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: Tenant = NOBODY,
        timeout_s: float | None = None,
        arrived_at: float | None = None,
        watch: RequestWatch | None = None,
    ) -> AsyncIterator[PoolingRequestOutput]:
        """The prompt as a vector, once. Closing or cancelling the iterator aborts the request. Raises as `generate`."""
        arrival = time.monotonic() if arrived_at is None else arrived_at
        with watch or nullcontext():
            engine = await self._started()
            self.check_health()
            pooling = engine.resolve_pooling(pooling_params)
            parsed = parse_prompt(prompt)
            ids = await engine.token_ids(parsed, pooling_params or PoolingParams())
            salt = cache_salt if cache_salt is not None else parsed.cache_salt
            given = replace(parsed, token_ids=engine.truncated(ids, pooling_params))
            admitted = await engine.admit_async(
                given, PROMPT_ONLY, request_id, priority, salt, pooling=pooling.kind, tenant=tenant
            )
            with engine.stream(admitted, arrival, final_only=True, watch=watch, timeout_s=timeout_s) as stream:
                yield pooled_output(await stream.next(), pooling)

    async def pin_prefix(self, name: str, prefix: Prompt) -> int:
        """As `LLM.pin_prefix`; raises as `generate`. Whoever cancels it leaves nothing pinned."""
        engine = await self._started()
        self.check_health()
        engine.pinned.reserve(name)
        try:
            admitted = await engine.admit_async(parse_prompt(prefix), PROMPT_ONLY, None, 0, None, pin=name)
        except BaseException:
            engine.pinned.release(name)
            raise
        return await engine.pin(name, admitted)

    def unpin_prefix(self, name: str) -> None:
        self.check_health()
        self._require().unpin(name)

    def pinned_prefixes(self) -> dict[str, int]:
        return self._require().pinned.list()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests where they stand: their streams end with finish_reason "abort". Unknown ids are ignored."""
        engine = self._require()
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            engine.abort(name)

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
            raise ShutDownError("this engine was shut down")
        if self._engine is not None:
            self._engine.check_alive()

    def stalled(self) -> str | None:
        """Why the core, which has work, seems to make no progress, long before it counts as dead; or None."""
        return self._require().client.stalled()

    @property
    def num_streams(self) -> int:
        """Requests that were handed to the core and have not ended."""
        return len(self._engine.streams) if self._engine is not None else 0

    def abandon(self) -> None:
        """Kill the core where it stands, also while it starts; from any thread and from a signal handler."""
        if self._client is not None:
            self._client.abandon()

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Also of a text that is longer than a prompt may be. Raises `InvalidRequestError`."""
        engine = await self._started()
        contexts = engine.config.limits.contexts_translated
        engine.tokenizer.bound.check(text, contexts=contexts)
        return await engine.tokenizer.encode_async(
            text, add_special_tokens=add_special_tokens, max_ids=contexts * self.max_model_len
        )

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, field: str = "tokens"
    ) -> str:
        """Raises `InvalidRequestError` naming `field` for what are no token ids, or too many."""
        engine = await self._started()
        contexts = engine.config.limits.contexts_translated
        if len(token_ids) > (limit := contexts * self.max_model_len):
            most = f"at most {limit} are detokenized at a time (--limit contexts_translated={contexts})"
            raise InvalidRequestError(f"{field}: {len(token_ids)} ids; {most}", field)
        if not set(map(type, token_ids)) <= {int}:
            raise InvalidRequestError(f"{field} must be token ids", field)
        check_token_ids(field, token_ids, engine.config.model.vocab_size)
        with fails_alone("detokenizing"):
            return await engine.tokenizer.decode_async(token_ids, skip_special_tokens=skip_special_tokens)

    async def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> tuple[str, list[int]]:
        """The rendered conversation and its token ids. Templates write special tokens out, so none are added by
        default.

        Raises `InvalidRequestError`, also for many times what the context holds.
        """
        engine = await self._started()
        tokenizer, contexts = engine.tokenizer, engine.config.limits.contexts_translated
        text = await tokenizer.apply_chat_template_async(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        tokenizer.bound.check(text, "messages", contexts=contexts)
        max_ids = contexts * self.max_model_len
        return text, await tokenizer.encode_async(
            text, add_special_tokens=add_special_tokens, field="messages", max_ids=max_ids
        )

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
        """Token ids of the rendered conversation (`render_chat`)."""
        _, token_ids = await self.render_chat(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
            add_special_tokens=add_special_tokens,
        )
        return token_ids

    async def checked_lora(self, adapter: LoRARequest) -> LoRARequest:
        """Its files are such that requests may name it, and they are to stay so. Raises `InvalidRequestError`."""
        from engine.adapters.peft import check_files  # torch comes with it

        engine = await self._started()
        check_adapter(adapter, engine.config.lora is not None, engine.config.limits)
        version = await asyncio.to_thread(check_files, adapter, engine.model.spec, engine.config.lora)
        return replace(adapter, version=version)

    def stats(self) -> CoreStats:
        """The core's gauges and counters as of its latest step."""
        return self._require().metrics.stats

    def default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where none are given: the model's generation config, else the defaults."""
        return self._require().default_sampling_params()

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
        if self._engine is not None:
            await self._engine.stop(ShutDownError("this engine was shut down"))

    def shutdown_soon(self) -> None:
        """`shutdown` for those who do not await it: streams end now, the core when the event loop turns next."""
        self._closed = True
        if self._engine is not None:
            self._engine.stop_soon(ShutDownError("this engine was shut down"))
        else:
            self.abandon()

    def _require(self) -> Serving:
        if self._engine is None:
            raise EngineError("the engine has not started: `await engine.start()` first")
        return self._engine

    async def _started(self) -> Serving:
        self.check_health()
        if self._engine is not None:
            return self._engine
        if self._start_task is None:
            self._start_task = asyncio.get_running_loop().create_task(self._start())
        # A caller that gives up does not stop the start: others wait for it, and `shutdown` takes it down in order.
        return await asyncio.shield(self._start_task)

    async def _start(self) -> Serving:
        serving = await start_serving(self._args, self._new_client, self._resolve)
        if self._closed:  # meanwhile, by somebody who does not wait
            await serving.stop(ShutDownError("this engine was shut down"))
            self.check_health()
        self._engine = serving
        return serving

    def _new_client(self, config: EngineConfig) -> CoreClient:
        self._client = self._client_factory(config)
        return self._client
