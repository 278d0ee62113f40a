"""The proxy before servers that compute prompts and servers that decode."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

import httpx
import uvicorn
from fastapi import HTTPException
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from engine.limits import Limits
from entrypoints.router.passing import Passed, or_left, unless, unless_gone
from entrypoints.router.servers import Server, Servers, Watch, why_not
from entrypoints.router.two_hops import (
    RefusedError,
    about_tokens,
    decode_body,
    over_two_servers,
    prefill_body,
    takes_one_token,
)
from entrypoints.server.bodies import Bodies
from entrypoints.server.ending import LAST_ERRORS_S, EndingServer, url_of
from entrypoints.server.error_shape import ErrorBody, error_body
from entrypoints.server.errors import ServerEndsError, ServerLeftError, describe, error_response
from entrypoints.server.request_ids import request_id_of
from entrypoints.server.streaming import Unanswered

logger = logging.getLogger("pageloom.router")

_NOT_PASSED_ON = frozenset({"host", "content-length", "connection", "transfer-encoding", "accept-encoding", "expect"})
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
        self._limits, self.bodies, self.unanswered = limits, Bodies(limits), Unanswered()
        self.client = _Client(timeout=httpx.Timeout(None, connect=5.0), limits=httpx.Limits(max_connections=None))
        self.draining = False
        self.two_hops = self.one_hop = self.prefill_failures = 0
        """requests since the start, by how they were answered; first hops that brought nothing, not for the client's
        fault"""

    def app(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            watch = Watch(self.prefill, self.decode, self.client)
            await watch.look()
            watching = asyncio.create_task(watch.run())
            yield
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self.client.aclose()

        methods = ["GET", "POST", "DELETE", "OPTIONS"]
        routes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
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

    async def _ready(self, request: Request) -> Response:
        if not self.draining:
            return await self._health(request)
        return JSONResponse(error_body("the router is shutting down", "server_error", None, "shutting_down"), 503)

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
            work = unless(held.gave_way.wait(), self._read_and_answer(request, held), _GaveWayError())
            return await self.unanswered.run(work)
        except _GaveWayError:
            return _error(request, 503, self._limits.message("bodies_bytes"))
        except HTTPException as refusal:
            return error_response(request.scope, refusal.status_code, cast(ErrorBody, refusal.detail), refusal.headers)
        except (ServerEndsError, ServerLeftError) as error:
            return error_response(request.scope, *describe(error, request_id_of(request.scope)))
        finally:
            self.bodies.drop(held)

    async def _read_and_answer(self, request: Request, held: _Body) -> Response:
        if not {".", ".."}.isdisjoint(request.scope["path"].split("/")):  # a client or a server may resolve them
            return _error(request, 400, "the path has a segment . or .., which is not passed on: write it without")
        async for part in request.stream():
            held.pieces += part
            if len(held.pieces) > self._limits.body_bytes:
                return _error(request, 413, self._limits.message("body_bytes"))
            self.bodies.add(held, len(part))
        body = bytes(held.pieces)
        held.pieces = bytearray()
        try:
            given = await self._looked_into(request, held, body)
        except RefusedError as error:
            return _error(request, 400, str(error))
        if given is None:
            targets = self._targets(body)
        elif takes_one_token(given):
            targets = [*(_Target(server, body) for server in self.prefill.in_order()), *self._targets(body)]
        else:
            source, answer = await or_left(request, self._prefill(request, prefill_body(given))) or (None, b"")
            targets = self._targets(body, source, decode_body(given, answer))
        return await self._ask(request, targets)

    def _targets(self, body: bytes, source: Server | None = None, handed: bytes | None = None) -> list[_Target]:
        """Decode servers; those first that can take over what `source` has handed over."""
        servers = self.decode.in_order() or self.decode.all
        if source is None or handed is None:
            return [_Target(server, body) for server in servers]
        can = [_Target(server, handed, True) for server in servers if why_not(source, server) is None]
        return [*can, *(_Target(server, body) for server in servers if why_not(source, server) is not None)]

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

    async def _prefill(self, request: Request, body: bytes) -> tuple[Server, bytes] | None:
        """Who has computed the prompt, and its answer; None: nobody that a decode server could take it from."""
        takers = self.decode.in_order()
        for server in self.prefill.in_order():
            if all(why_not(server, taker) for taker in takers):
                continue
            try:
                with server.answering(about_tokens(body)):
                    work = self.client.post(
                        _url(server, request), content=body, headers=_headers(request), timeout=PREFILL_S
                    )
                    answer = await unless(server.unwell.wait(), work, httpx.ReadTimeout("it makes no progress"))
            except httpx.HTTPError as error:
                server.failed()
                logger.warning("prefill server %s: %r", server.url, error)
                if not isinstance(error, _NOT_SENT):
                    break  # what it had no answer to, another may have none to either
                continue
            if answer.status_code == 200:
                return server, answer.content
            if answer.status_code not in _BUSY:
                if answer.status_code < 500:
                    return None  # the decode server says what is wrong with the request
                break
        self.prefill_failures += 1
        return None

    async def _ask(self, request: Request, targets: list[_Target]) -> Response:
        """The first that can be connected to; a prefill server that has no room is passed over. Raises
        `ServerLeftError`."""
        for server, body, took_over in targets:
            tokens = about_tokens(body)
            sent = self.client.build_request(
                request.method,
                _url(server, request),
                content=_once(body),
                headers=[*_headers(request), (b"content-length", str(len(body)).encode())],
            )
            server.prompt_tokens += tokens
            try:
                answer = await or_left(request, unless_gone(server, self.client.send(sent, stream=True)))
            except httpx.HTTPError as error:
                server.prompt_tokens -= tokens
                server.failed()
                logger.warning("server %s: %r", server.url, error)
                if isinstance(error, _NOT_SENT):
                    continue
                raise ServerLeftError from error
            except BaseException:
                server.prompt_tokens -= tokens
                raise
            passed = Passed(answer, server, tokens, self.unanswered)
            if answer.status_code in _BUSY and server in self.prefill.all:
                await passed.aclose()
                continue
            self.two_hops += took_over
            self.one_hop += not took_over
            return passed
        return _error(request, 503, "no decode server answers")


class RouterServer(EndingServer):
    def __init__(self, config: uvicorn.Config, router: Router, grace_s: float, notice_s: float = 0.0) -> None:
        super().__init__(config, grace_s, notice_s)
        self._router = router

    def announce_end(self) -> None:
        self._router.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        where = ", ".join(url_of(each, "https" if self.config.is_ssl else "http") for each in sockets or ())
        kinds = len(self._router.prefill.all), len(self._router.decode.all)
        logger.info("ready: %s passes on to %d prefill and %d decode servers", where, *kinds)

    @property
    def num_running(self) -> int:
        return len(self.server_state.tasks)

    async def end_running(self) -> None:
        self._router.unanswered.end()
        await asyncio.sleep(LAST_ERRORS_S)


class _Target(NamedTuple):
    server: Server
    body: bytes
    takes_over: bool = False
    """what another server has computed"""


class _GaveWayError(Exception):
    pass


class _Body:
    """A client's, until a server answers that decodes."""

    def __init__(self) -> None:
        self.pieces = bytearray()
        self.gave_way = asyncio.Event()

    def discard(self) -> None:
        self.gave_way.set()


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


def _error(request: Request, status: int, message: str) -> Response:
    """In the words of the API that was asked."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return error_response(request.scope, status, error_body(message, kind))
