"""The proxy before servers that compute prompts and servers that decode."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import httpx
from fastapi import HTTPException
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.limits import Limits
from entrypoints.router.servers import Server, Servers
from entrypoints.router.two_hops import RefusedError, about_tokens, decode_body, over_two_servers, prefill_body
from entrypoints.server.bodies import Bodies

T = TypeVar("T")
logger = logging.getLogger("pageloom.router")

_NOT_PASSED_ON = frozenset({"host", "content-length", "connection", "transfer-encoding", "accept-encoding", "expect"})
_NOT_PASSED_BACK = frozenset(
    {"content-length", "connection", "transfer-encoding", "content-encoding", "date", "server"}
)
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)
"""after these alone another server is asked: nothing is done twice, and what ends one server does not end the next"""
_BUSY = (429, 503)
PREFILL_S = 600.0
"""for the first hop"""


class _Client(httpx.AsyncClient):
    async def send(self, request: httpx.Request, **named: Any) -> httpx.Response:
        """An error is one of `_NOT_SENT` only where nothing of the request was written."""
        written = False

        async def note(event: str, _: object) -> None:
            nonlocal written
            written = written or event.endswith(".send_request_headers.started")

        request.extensions["trace"] = note
        try:
            return await super().send(request, **named)
        except AttributeError as error:  # anyio's, of a connection that was reset as soon as it was made
            kind = httpx.ReadError if written else httpx.ConnectError
            raise kind(f"it has left: {error}") from error


class Router:
    def __init__(self, prefill: list[str], decode: list[str], limits: Limits) -> None:
        self.prefill, self.decode = Servers(prefill), Servers(decode)
        self._limits, self.bodies = limits, Bodies(limits)
        self.client = _Client(timeout=httpx.Timeout(None, connect=5.0), limits=httpx.Limits(max_connections=None))
        self.two_hops = self.one_hop = self.prefill_failures = 0
        """requests since the start; first hops that brought nothing"""

    def app(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            watches = [asyncio.create_task(servers.watch(self.client)) for servers in (self.prefill, self.decode)]
            yield
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            await self.client.aclose()

        methods = ["GET", "POST", "DELETE", "OPTIONS"]
        routes = [
            Route("/health", self._health),
            Route("/ready", self._health),
            Route("/metrics", self._metrics),
            Route("/{path:path}", self._pass_on, methods=methods),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def _health(self, request: Request) -> Response:
        """It serves while any decode server lives: that computes prompts, too."""
        status = {
            kind: {server.url: server.lives for server in servers.all}
            for kind, servers in (("prefill", self.prefill), ("decode", self.decode))
        }
        return JSONResponse(status, status_code=200 if self.decode.any_lives else 503)

    async def _metrics(self, request: Request) -> Response:
        lines = [
            f"pageloom_router_two_hops_total {self.two_hops}",
            f"pageloom_router_one_hop_total {self.one_hop}",
            f"pageloom_router_prefill_failures_total {self.prefill_failures}",
        ]
        for kind, servers in (("prefill", self.prefill), ("decode", self.decode)):
            for server in servers.all:
                labels = f'{{kind="{kind}",server="{server.url}"}}'
                lines.append(f"pageloom_router_server_up{labels} {int(server.lives)}")
                lines.append(f"pageloom_router_server_prompt_tokens{labels} {server.prompt_tokens}")
                lines.append(f"pageloom_router_server_failures_total{labels} {server.failures}")
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _pass_on(self, request: Request) -> Response:
        try:
            return await self._answer(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it

    async def _answer(self, request: Request) -> Response:
        held = _Body()
        try:
            work = self._read_and_answer(request, held)
            return await _unless(held.gave_way.wait(), work, _GaveWayError())
        except _GaveWayError:
            return _error(503, self._limits.message("bodies_bytes"))
        except HTTPException as refusal:
            return JSONResponse(refusal.detail, refusal.status_code, refusal.headers)
        finally:
            self.bodies.drop(held)

    async def _read_and_answer(self, request: Request, held: _Body) -> Response:
        if not {".", ".."}.isdisjoint(request.scope["path"].split("/")):  # a client or a server may resolve them
            return _error(400, "the path has a segment . or .., which is not passed on: write it without")
        async for part in request.stream():
            held.pieces += part
            if len(held.pieces) > self._limits.body_bytes:
                return _error(413, self._limits.message("body_bytes"))
            self.bodies.add(held, len(part))
        body = bytes(held.pieces)
        held.pieces = bytearray()
        try:
            given = await self._looked_into(request, held, body)
        except RefusedError as error:
            return _error(400, str(error))
        if given is None:
            self.one_hop += 1
        else:
            prefilled = await _or_left(request, self._prefill(request, prefill_body(given)))
            taken = None if prefilled is None else decode_body(given, prefilled)
            self.two_hops += taken is not None
            self.one_hop += taken is None
            body = taken or body
        return await self._decode(request, body)

    async def _looked_into(self, request: Request, held: _Body, body: bytes) -> dict[str, Any] | None:
        """What `over_two_servers` makes of it. Nothing passes that cannot be looked into, but files."""
        said = request.headers.get("content-type", "").lower()
        is_form = said.startswith("multipart/form-data") and body.startswith(b"--")  # as no JSON does
        if request.method != "POST" or not body or is_form:
            return None
        self.bodies.drop(held)  # it is counted while it is over_two_servers, too
        try:
            given = await self.bodies.decode(held, body)
        except ValueError as error:
            raise RefusedError(f"the body is no JSON: {error}") from None
        self.bodies.add(held, len(body))
        return over_two_servers(request.scope["path"], given)

    async def _prefill(self, request: Request, body: bytes) -> bytes | None:
        """What a server answers that computes the prompt; None: none does."""
        for server in self.prefill.in_order():
            try:
                with server.answering(about_tokens(body)):
                    work = self.client.post(
                        _url(server, request), content=body, headers=_headers(request), timeout=PREFILL_S
                    )
                    answer = await _unless(server.unwell.wait(), work, httpx.ReadTimeout("it makes no progress"))
            except httpx.HTTPError as error:
                server.failed()
                logger.warning("prefill server %s: %r", server.url, error)
                if not isinstance(error, _NOT_SENT):
                    break  # what it had no answer to, another may have none to either
                continue
            if answer.status_code == 200:
                return answer.content
            if answer.status_code not in _BUSY:
                break  # the decode server says what is wrong with the request
        self.prefill_failures += 1
        return None

    async def _decode(self, request: Request, body: bytes) -> Response:
        for server in self.decode.in_order() or self.decode.all:
            tokens = about_tokens(body)
            sent = self.client.build_request(
                request.method,
                _url(server, request),
                content=_once(body),
                headers=[*_headers(request), (b"content-length", str(len(body)).encode())],
            )
            server.prompt_tokens += tokens
            try:
                answer = await _or_left(request, _unless_gone(server, self.client.send(sent, stream=True)))
            except httpx.HTTPError as error:
                server.prompt_tokens -= tokens
                server.failed()
                logger.warning("decode server %s: %r", server.url, error)
                if isinstance(error, _NOT_SENT):
                    continue
                return _error(502, "the server that this was sent to has left, and may have done it: ask again")
            except BaseException:
                server.prompt_tokens -= tokens
                raise
            return _Passed(answer, server, tokens)
        return _error(503, "no decode server answers")


class _GaveWayError(Exception):
    pass


class _Body:
    """A client's, until a server answers that decodes."""

    def __init__(self) -> None:
        self.pieces = bytearray()
        self.gave_way = asyncio.Event()

    def discard(self) -> None:
        self.gave_way.set()


class _Passed(Response):
    """A server's answer as it comes. Who leaves early ends the request there, too."""

    def __init__(self, answer: httpx.Response, server: Server, tokens: int) -> None:
        super().__init__(status_code=answer.status_code)
        self._answer, self._server, self._tokens = answer, server, tokens
        self.raw_headers = [
            (name.lower(), value) for name, value in answer.headers.raw if name.decode().lower() not in _NOT_PASSED_BACK
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            with suppress(ClientDisconnect):
                await _unless(_left(receive), _unless_gone(self._server, self._pass(send)), ClientDisconnect())
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        self._server.prompt_tokens -= self._tokens
        self._tokens = 0
        await self._answer.aclose()

    async def _pass(self, send: Send) -> None:
        async for part in self._answer.aiter_raw():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _or_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Raises `ClientDisconnect` where the client leaves before."""
    return await _unless(_left(request.receive), work, ClientDisconnect())


async def _unless_gone(server: Server, work: Coroutine[Any, Any, T]) -> T:
    """Raises `httpx.ReadTimeout` where the server no longer answers anything."""
    return await _unless(server.gone.wait(), work, httpx.ReadTimeout("it answers nothing, its health neither"))


async def _unless(end: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T], error: Exception) -> T:
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
        if isinstance(came, (httpx.Response, _Passed)):  # as the end came
            await came.aclose()
        raise
    ending.cancel()
    return task.result()


async def _once(body: bytes) -> AsyncIterator[bytes]:
    """For one that is not kept as long as its answer is."""
    yield body


def _url(server: Server, request: Request) -> str:
    """As the client wrote it: %2F and / are not the same."""
    path, query = (request.scope[name].decode("latin-1") for name in ("raw_path", "query_string"))
    return f"{server.url}/{path.removeprefix('/')}" + (f"?{query}" if query else "")


def _headers(request: Request) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in request.headers.raw if name.decode().lower() not in _NOT_PASSED_ON]
    return [*kept, (b"accept-encoding", b"identity")]


def _error(status: int, message: str) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)
