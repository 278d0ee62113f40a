"""What runs while an `AsyncEngine` serves: streams that wait, and the one task that listens to the core for them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from engine.adapters.request import LoRARequest
from engine.config import EngineArgs, EngineConfig
from engine.core.client import CoreClient
from engine.core.wire import CoreReady
from engine.errors import ConfigError, CoreDiedError, DeadlineError, EngineError, ShutDownError
from engine.front_ends.client import FrontEndClient
from engine.frontend.admission import AdmittedRequest, ParsedPrompt, spellings
from engine.frontend.failures import CONTROL, fails_alone
from engine.frontend.texts import check_name, check_params, check_text
from engine.frontend.tokenizer import Tokenizer
from engine.launched import leave_unless_first
from engine.models.description import ModelDescription
from engine.observability.request_watch import RequestWatch
from engine.pooling import PoolingParams
from engine.replicas.client import ReplicatedClient
from engine.request import NOBODY, RequestOutput, SamplingParams, Tenant
from engine.session import Session, load_tokenizer
from engine.step import Pooling

logger = logging.getLogger(__name__)


async def start_serving(
    args: EngineArgs,
    make_client: Callable[[EngineConfig], CoreClient],
    resolve: Callable[[EngineArgs], tuple[ModelDescription, EngineConfig]],
) -> Serving:
    """Load a model and start its core, off the event loop. Raises `ConfigError` and the like, or `CoreDiedError`."""
    await asyncio.to_thread(leave_unless_first, args)
    model, config = await asyncio.to_thread(resolve, args)
    client = make_client(config)
    ready, tokenizer = await asyncio.gather(
        asyncio.to_thread(client.start),
        asyncio.to_thread(load_tokenizer, args, config),
        return_exceptions=True,
    )
    if isinstance(ready, BaseException) or isinstance(tokenizer, BaseException):
        await asyncio.to_thread(client.close)
        if isinstance(tokenizer, BaseException):
            raise tokenizer
        tokenizer.close()
        assert isinstance(ready, BaseException)
        raise ready
    tokenizer.start_renderer()
    return Serving(model, config, tokenizer, client, ready)


class Stream:
    """One request in flight. No generator and no `asyncio.Event`, since each streamed token pays for them: one task
    alone waits here."""

    def __init__(
        self, serving: Serving, admitted: AdmittedRequest, watch: RequestWatch | None, deadline: float | None = None
    ) -> None:
        """`deadline`: on `time.monotonic`'s clock."""
        self._serving, self._admitted, self._watch = serving, admitted, watch
        self._told: dict[int, str | None] = {}
        self._news = False
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._is_late = self._gave_late = False
        left = None if deadline is None else deadline - time.monotonic()
        self._timer = None if left is None else self._loop.call_later(left, self._be_late)
        serving.streams[admitted.request_id] = self

    def _be_late(self) -> None:
        """What there is by the next call may still be had; then it ends."""
        self._is_late = True
        self.tell()

    def tell(self) -> None:
        """There is something new."""
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> RequestOutput:
        """Its next output, until one is `finished`. Raises what ends it."""
        serving, name = self._serving, self._admitted.request_id
        processor = serving.processor
        while True:
            if not self._news and not self._is_late:
                self._waiter = self._loop.create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None
            self._news = False
            error = processor.error(name)
            if error is not None:
                raise error
            # What arrived before the core died is worth having; the news of its death is not lost.
            output = None if self._gave_late else processor.take(name)
            self._gave_late = self._is_late
            if output is None:
                if self._is_late:
                    raise DeadlineError("the time is over that the request was given")
                serving.check_alive()
                continue
            if serving.death is not None:
                self._news = True
            if self._admitted.params.structured_outputs is not None:
                await serving.grammars.validate_async(self._admitted.params, processor.texts(output), self._told)
            return output

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Aborts it, where it has not ended."""
        serving, name = self._serving, self._admitted.request_id
        if self._timer is not None:
            self._timer.cancel()
        del serving.streams[name]
        if self._watch is not None:
            serving.processor.show(name, self._watch, time.monotonic())
        serving.forget([name])


class Serving(Session):
    """A session with one stream for each request, made on the event loop that it serves."""

    def __init__(
        self,
        model: ModelDescription,
        config: EngineConfig,
        tokenizer: Tokenizer,
        client: CoreClient,
        ready: CoreReady,
    ) -> None:
        super().__init__(model, config, tokenizer, client, ready)
        self.streams: dict[str, Stream] = {}
        if isinstance(client, FrontEndClient):
            self.config, client.on_change = client.config, self._take_change
        with suppress(EngineError):  # a core that is dead is the receiver's to find
            self.tell_vocabulary()  # while nobody streams: the core does nothing else until it has taken it in
        self._receiver = asyncio.get_running_loop().create_task(self._receive())

    def stream(
        self,
        admitted: AdmittedRequest,
        arrival: float,
        *,
        delta: bool = False,
        final_only: bool = False,
        watch: RequestWatch | None = None,
        timeout_s: float | None = None,
    ) -> Stream:
        """Begins to be computed; leaving it as a context ends it, and so does its time, which begins with its
        `arrival`. Raises `QueueFullError`, `CoreDiedError`, `DeadlineError`."""
        deadline = None if timeout_s is None else arrival + timeout_s
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise DeadlineError("the time is over that the request was given, before it could begin")
            admitted = replace(admitted, message=replace(admitted.message, deadline_s=left))
        self.submit(admitted, arrival, delta=delta, final_only=final_only)
        return Stream(self, admitted, watch, deadline)

    async def token_ids(self, prompt: ParsedPrompt, params: SamplingParams | PoolingParams) -> list[int]:
        """Raises `InvalidRequestError`."""
        if prompt.token_ids is not None:
            return prompt.token_ids
        text, longest = self.text_of(prompt, params), self.config.model.max_model_len
        most = longest - 1 if isinstance(params, SamplingParams) else longest
        max_ids = most if params.truncate_prompt_tokens is None else None
        return await self.tokenizer.encode_async(text, max_ids=max_ids)

    async def admit_async(
        self,
        parsed: ParsedPrompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        pin: str | None = None,
        pooling: Pooling | None = None,
        lora_request: LoRARequest | None = None,
        tenant: Tenant = NOBODY,
    ) -> AdmittedRequest:
        """Raises `InvalidRequestError`; changes nothing then."""
        name = secrets.token_hex(8) if request_id is None else check_name(request_id, "request_id", self.config.limits)
        given = params if params is not None else self.default_sampling_params()
        checked = check_params(given)
        self.admission.check_params(checked)
        salt = cache_salt if cache_salt is not None else parsed.cache_salt
        if salt is not None:
            check_text(salt, "cache_salt")
        token_ids = await self.token_ids(parsed, checked)
        structured = checked.structured_outputs
        grammar = None if structured is None else await self.grammars.check_async(structured)
        with fails_alone("admitting the request"):
            bad_words = await self.tokenizer.encode_batch_async(spellings(checked), add_special_tokens=False)
            return self.admission.admit(
                name,
                parsed.text,
                self.admission.truncated(token_ids, checked),
                checked,
                priority=priority,
                tenant=tenant,
                cache_salt=salt,
                pin=pin,
                wait_s=self.config.limits.waiting_s,
                bad_words=bad_words,
                grammar=grammar,
                pooling=pooling,
                is_pair=parsed.is_pair,
                lora_request=lora_request,
            )

    async def pin(self, name: str, admitted: AdmittedRequest) -> int:
        """Its number of tokens. The name is reserved; whatever goes wrong, and whoever leaves, gives it back."""
        try:
            with self.stream(admitted, time.monotonic(), final_only=True) as stream:
                ended = (await stream.next()).outputs[0]
            return self.pin_completed(name, len(admitted.prompt_token_ids), ended)
        except BaseException:
            self.pin_failed(name)
            raise

    def abort(self, name: str) -> None:
        super().abort(name)
        if name in self.streams:
            self.streams[name].tell()

    def die(self, error: CoreDiedError) -> None:
        """Every stream learns of it."""
        super().die(error)
        for stream in self.streams.values():
            stream.tell()

    def _take_change(self, config: EngineConfig, ready: CoreReady) -> None:
        self.config, self.ready = config, ready

    @property
    def replicated(self) -> ReplicatedClient | FrontEndClient:
        """The cores, where there are several. Raises `ConfigError`."""
        if not isinstance(self.client, ReplicatedClient | FrontEndClient) or self.config.parallel.data == 1:
            raise ConfigError("data_parallel_size is 1: only an engine that was started with more replicas is scaled")
        return self.client

    async def stop(self, reason: ShutDownError) -> None:
        """Stop listening, close the core, free everything."""
        self.die(reason)
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        await asyncio.to_thread(self.close)

    def stop_soon(self, reason: ShutDownError) -> None:
        """The same without waiting for it: when the event loop turns next, also where that ends."""
        self.die(reason)
        if self._receiver.done():
            self.close()
        else:
            self._receiver.add_done_callback(lambda _: self.close())
            self._receiver.cancel()

    async def _receive(self) -> None:
        """The one task that listens to the core. Whatever ends it is told to every stream and to health."""
        try:
            while True:
                for name in self.take_in(await self.client.recv_async()):
                    self.streams[name].tell()
        except CoreDiedError as error:
            self.die(error)
        except CONTROL:
            raise
        except BaseException as error:
            logger.exception("the engine's receiver failed")
            self.die(CoreDiedError(f"the engine's receiver failed: {error!r}"))
        finally:
            self.die(CoreDiedError("the engine's receiver ended"))
