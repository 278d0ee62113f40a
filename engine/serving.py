"""What runs while an `AsyncEngine` serves: streams that wait, and the one task that listens to the core for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from engine.config import EngineConfig
from engine.core.client import CoreClient
from engine.core.wire import AbortRequests, CoreReady, CoreStats, StepOutputs, UnpinPrefix
from engine.errors import CoreDiedError, RequestFailedError
from engine.frontend.admission import Admission, AdmittedRequest
from engine.frontend.failures import CONTROL
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.pins import PinnedPrefixes
from engine.frontend.tokenizer import Tokenizer
from engine.models.description import ModelDescription
from engine.observability.metrics import EngineMetrics
from engine.observability.timings import RequestTimings
from engine.request import RequestOutput

logger = logging.getLogger(__name__)


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


class Serving:
    """All that exists once the engine serves; its own type, so that no field is half there. Made on the event loop
    that it serves."""

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
        self.pinned = PinnedPrefixes(config.limits)
        self.death: CoreDiedError | None = None
        self.streams: dict[str, _News] = {}
        self._receiver = asyncio.get_running_loop().create_task(self._receive())

    async def stream(
        self, admitted: AdmittedRequest, arrival: float, *, delta: bool = False, final_only: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        """One request's outputs, the last one finished. Closing it aborts the request. Raises what ends it."""
        if self.death is not None:
            raise self.death
        name = admitted.request_id
        self.processor.add(admitted, now=arrival, delta=delta, final_only=final_only)
        news = self.streams[name] = _News()
        try:
            self._submit(admitted)
            finished = False
            while not finished:
                await news.next()
                error = self.processor.error(name)
                if error is not None:
                    raise error
                # What arrived before the core died is worth having; the news of its death is not lost.
                output = self.processor.take(name)
                if output is None and self.death is not None:
                    raise self.death
                if output is not None:
                    finished = output.finished
                    if self.death is not None:
                        news.set()
                    yield output
        finally:
            del self.streams[name]
            self._end(*self.processor.remove(name, time.monotonic()))

    def _submit(self, admitted: AdmittedRequest) -> None:
        try:
            self.client.send(admitted.message)
        except BaseException:  # the core does not know it, so nobody tells it of its end
            self.processor.remove(admitted.request_id, time.monotonic())
            raise

    async def pin(self, name: str, admitted: AdmittedRequest) -> int:
        """Its number of tokens. The name is reserved; whatever goes wrong, and whoever leaves, gives it back, and the
        core keeps nothing under it."""
        finished = False
        try:
            async with aclosing(self.stream(admitted, time.monotonic(), final_only=True)) as outputs:
                async for output in outputs:
                    finished = output.outputs[0].finish_reason in ("length", "stop")
            if not finished:
                raise RequestFailedError(f"the prefix {name!r} was not pinned: its request was aborted")
        except BaseException:
            self.pinned.release(name)
            self._tell(UnpinPrefix(name=name))
            raise
        return self.pinned.complete(name, len(admitted.prompt_token_ids))

    def abort(self, name: str) -> None:
        """Its stream ends with what there is; an unknown name is ignored."""
        self._end(*self.processor.abort(name, time.monotonic()))
        if name in self.streams:
            self.streams[name].set()

    def die(self, error: CoreDiedError) -> None:
        """Every stream learns of it, and nothing is served any more. The first cause counts."""
        if self.death is None:
            self.death = error
        for news in self.streams.values():
            news.set()

    async def stop(self, reason: str) -> None:
        """Stop listening, close the core, free everything."""
        self.die(CoreDiedError(reason))
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        await asyncio.to_thread(self.client.close)
        self.tokenizer.close()

    async def _receive(self) -> None:
        """The one task that listens to the core. Whatever ends it is told to every stream and to health."""
        try:
            while True:
                self._take_in(await self.client.recv_async())
        except CoreDiedError as error:
            self.die(error)
        except CONTROL:
            raise
        except BaseException as error:
            logger.exception("the engine's receiver failed")
            self.die(CoreDiedError(f"the engine's receiver failed: {error!r}"))
        finally:
            self.die(CoreDiedError("the engine's receiver ended"))

    def _take_in(self, outputs: StepOutputs) -> None:
        self.metrics.stats = outputs.stats
        progress = self.processor.process(outputs.deltas, time.monotonic())
        if progress.aborts:
            self.client.send(AbortRequests(request_ids=progress.aborts))
        for timings in progress.finished:
            self.metrics.observe_request(timings)
        for name in progress.touched:
            self.streams[name].set()

    def _end(self, core_ids: list[str], timings: RequestTimings | None) -> None:
        """Tell the core and the metrics of a request that ended before its time."""
        if timings is not None:
            self.metrics.observe_request(timings)
        if core_ids:
            self._tell(AbortRequests(request_ids=core_ids))

    def _tell(self, message: AbortRequests | UnpinPrefix) -> None:
        """What a dead core need not know."""
        if self.death is None:
            try:
                self.client.send(message)
            except CoreDiedError as error:
                self.die(error)
