"""Server-sent events, and work that stops the moment its client leaves.

Starlette notices a closed connection only when it next sends; a request that waits for its first token would keep its
KV blocks until then. Here a listener waits for the disconnect beside the work and cancels it, which aborts the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from entrypoints.server.errors import ServerEndsError, describe
from entrypoints.server.request_ids import request_id_of, send_of

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


class ClientLeftError(Exception):
    """The connection was closed before the answer was complete."""


def event(body: object) -> bytes:
    """One server-sent event holding `body` as JSON."""
    return b"data: " + _encoder.encode(body) + b"\n\n"


class Frames:
    """Events that differ in one text, so that nothing else of them is made anew."""

    def __init__(self, body: Callable[[str], object]) -> None:
        """`body`: with a text in its place."""
        mark = secrets.token_hex(8)
        self._head, self._tail = event(body(mark)).split(_encoder.encode(mark))

    def event(self, text: str) -> bytes:
        return self._head + _encoder.encode(text) + self._tail


def failure(error: Exception, request_id: str) -> bytes:
    """What ends a stream that fails, in OpenAI's shape."""
    return event(describe(error, request_id)[1])


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`; when the client leaves first, `work` is cancelled and `ClientLeftError` raised."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError
    finally:
        for t in (task, gone):
            t.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class Unanswered:
    """Work for requests of which nothing has been answered, so that all of it can be ended at once."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended = False

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises `ServerEndsError` when `end` comes first."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        except asyncio.CancelledError:
            if self._ended:
                raise ServerEndsError from None
            raise
        finally:
            self._tasks.discard(task)

    def end(self) -> None:
        self._ended = True
        for task in list(self._tasks):
            task.cancel()


async def answer(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` for a request whose body has been read: all of it, or what comes before the first piece of a stream.
    Raises `ClientLeftError`, `ServerEndsError`."""
    unanswered: Unanswered = request.app.state.unanswered
    return await _first_of(unanswered.run(work), request.receive)


class Primed:
    """Chunks whose first is already there, so that an early error can still become an HTTP status; where it takes too
    long it comes later. Closing it closes the chunks, also when none was sent."""

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        self.rest = chunks
        self._first: asyncio.Task[bytes | None] | None = None

    async def prime(self, seconds: float | None) -> Primed:
        """Raises what the first chunk raises within `seconds`; None: whenever it comes."""
        self._first = asyncio.ensure_future(anext(self.rest, None))
        try:
            await asyncio.wait({self._first}, timeout=seconds)
            if self._first.done():
                self._first.result()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def first(self) -> bytes | None:
        """None where there is none; `rest` comes behind it."""
        return None if self._first is None else await self._first

    async def aclose(self) -> None:
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self.rest.aclose()


ALIVE = b": keep-alive\n\n"
"""a comment, which nobody who reads events is shown"""


class EventStream(Response):
    """Sends chunks as they come; closes them when they end or the client leaves. `alive` is sent after each `silence_s`
    without one, so that nobody on the way takes a request that waits for a connection that is dead; None: nothing is.
    `failure`: their last where they fail."""

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: Primed,
        silence_s: float,
        failure: Callable[[Exception, str], bytes] = failure,
        alive: bytes | None = ALIVE,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._failure, self._alive, self._silence_s = chunks, failure, alive, silence_s
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientLeftError, OSError):
                await _first_of(self._send_all(scope, send), receive)
        finally:
            await self._chunks.aclose()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        send = send_of(scope, send)
        clock = asyncio.get_running_loop().time
        self._sent_at = clock()
        alive = None if self._alive is None else asyncio.ensure_future(self._keep_alive(send, clock, self._alive))
        try:
            first = await self._chunks.first()
            if first is not None:
                self._sent_at = clock()
                await send({"type": "http.response.body", "body": first, "more_body": True})
            async for chunk in self._chunks.rest:
                self._sent_at = clock()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except OSError:
            raise  # the connection, not the work
        except Exception as error:  # the status line is gone: the error travels as an event
            last = self._failure(error, request_id_of(scope))
            await send({"type": "http.response.body", "body": last, "more_body": True})
        finally:
            if alive is not None:
                alive.cancel()
                await asyncio.gather(alive, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send, clock: Callable[[], float], alive: bytes) -> None:
        while True:
            left = self._sent_at + self._silence_s - clock()
            if left > 0:
                await asyncio.sleep(left)
            else:
                self._sent_at = clock()
                await send({"type": "http.response.body", "body": alive, "more_body": True})


async def event_stream(
    request: Request,
    chunks: AsyncGenerator[bytes, None],
    failure: Callable[[Exception, str], bytes] = failure,
    alive: bytes | None = ALIVE,
    kind: type[EventStream] = EventStream,
) -> EventStream:
    """The answer of a request whose body has been read. Raises as `answer` does, and what the first chunk raises where
    it is not long in coming."""
    silence_s: float = request.app.state.limits.silence_s
    primed = await answer(request, Primed(chunks).prime(None if alive is None else silence_s))
    return kind(primed, silence_s, failure, alive)


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several generators as they come, each with its generator's index; all are closed when this one is."""
    queue: asyncio.Queue[tuple[int, T | None, Exception | None]] = asyncio.Queue(maxsize=64)

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with contextlib.aclosing(stream) as items:
                async for item in items:
                    await queue.put((index, item, None))
            await queue.put((index, None, None))
        except Exception as error:
            await queue.put((index, None, error))

    tasks = [asyncio.create_task(pump(i, s)) for i, s in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            index, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
