"""A server's answer on its way to the client, as it comes; where it breaks off the client is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from entrypoints.router.servers import Server
from entrypoints.server import messages_api
from entrypoints.server.errors import ServerEndsError, ServerLeftError
from entrypoints.server.messages_errors import is_anthropics
from entrypoints.server.ollama_api import routes as ollama_api
from entrypoints.server.ollama_api.errors import is_ollamas
from entrypoints.server.request_ids import HEADER
from entrypoints.server.streaming import Unanswered, failure

T = TypeVar("T")
logger = logging.getLogger("pageloom.router")

_NOT_PASSED_BACK = frozenset(
    {"content-length", "connection", "transfer-encoding", "content-encoding", "date", "server"}
)
_EVENTS, _LINES = "text/event-stream", "application/x-ndjson"


class Passed(Response):
    """Who leaves early ends the request at the server, too."""

    def __init__(self, answer: httpx.Response, server: Server, tokens: int, unanswered: Unanswered) -> None:
        """`tokens`: that the server is answering, until this has ended."""
        super().__init__(status_code=answer.status_code)
        self._answer, self._server, self._tokens, self._unanswered = answer, server, tokens, unanswered
        self._kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        self.raw_headers = [
            (name.lower(), value) for name, value in answer.headers.raw if name.decode().lower() not in _NOT_PASSED_BACK
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            work = self._unanswered.run(unless_gone(self._server, self._pass(send)))
            await unless(left(receive), work, ClientDisconnect())
        except ClientDisconnect:
            pass
        except ServerEndsError as error:
            await self._break_off(error, scope, send)
        except httpx.HTTPError as error:
            self._server.failed()
            logger.warning("decode server %s, in the middle of an answer: %r", self._server.url, error)
            await self._break_off(ServerLeftError(), scope, send)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        self._server.prompt_tokens -= self._tokens
        self._tokens = 0
        await self._answer.aclose()

    async def _pass(self, send: Send) -> None:
        """Of a stream whole lines, so that an error may stand behind whatever has come."""
        held = b""
        async for part in self._answer.aiter_raw():
            if self._kind in (_EVENTS, _LINES):
                lines, newline, rest = part.rpartition(b"\n")
                part, held = (held + lines + newline, rest) if newline else (b"", held + rest)
            if part:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": held, "more_body": False})

    async def _break_off(self, error: Exception, scope: Scope, send: Send) -> None:
        """A stream ends with the error, in the words of its API; of another answer the connection breaks."""
        if self._kind in (_EVENTS, _LINES):
            last = _failure_of(scope["path"])(error, self._answer.headers.get(HEADER, "-"))
            end = b"\n" if self._kind == _EVENTS else b""  # of an event whose last line is missing
            await send({"type": "http.response.body", "body": end + last, "more_body": False})


def _failure_of(path: str) -> Callable[[Exception, str], bytes]:
    if is_anthropics(path):
        return messages_api.failure
    return ollama_api.failure if is_ollamas(path) else failure


async def left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def or_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Raises `ClientDisconnect` where the client leaves before."""
    return await unless(left(request.receive), work, ClientDisconnect())


async def unless_gone(server: Server, work: Coroutine[Any, Any, T]) -> T:
    """Raises `httpx.ReadTimeout` where the server no longer answers anything."""
    return await unless(server.gone.wait(), work, httpx.ReadTimeout("it answers nothing, its health neither"))


async def unless(end: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T], error: Exception) -> T:
    """Raises the error where the end comes before; the work is cancelled then."""
    task, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise error
    except BaseException:
        for each in (task, ending):
            each.cancel()
        came, _ = await asyncio.gather(task, ending, return_exceptions=True)
        if isinstance(came, (httpx.Response, Passed)):  # as the end came
            await came.aclose()
        raise
    ending.cancel()
    return task.result()
