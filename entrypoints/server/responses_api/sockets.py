"""`/v1/responses` as a WebSocket: each message `response.create` is a turn, whose events are messages. Turns of one
`stream_id` come one after another, those of several at once. What is not to be stored can be gone on from as long as
the socket is open."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import aclosing, nullcontext
from functools import partial
from json import JSONDecodeError
from typing import Any

import msgspec
from fastapi import FastAPI, HTTPException
from pydantic import ValidationError
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from engine.errors import InvalidRequestError
from entrypoints.server.bodies import IN_PLACE_BYTES, Bodies, decode
from entrypoints.server.caller import CALLER, Caller
from entrypoints.server.context import ServerContext
from entrypoints.server.error_shape import ErrorBody, error_body
from entrypoints.server.errors import describe, error_response, validation_body
from entrypoints.server.keys import CLIENT
from entrypoints.server.load import Load
from entrypoints.server.request_ids import new_request_id
from entrypoints.server.responses_api.builder import Event
from entrypoints.server.responses_api.fields import ResponsesRequest
from entrypoints.server.responses_api.handler import handler_of
from entrypoints.server.responses_api.store import PassingResponses, ResponseStore

PATH = "/v1/responses"
_LANE_CHARS = 128
_OF_SOCKETS = frozenset({"type", "stream_id", "generate", "background"})
_GOING_AWAY, _SERVICE_RESTART = 1001, 1012
_TOO_OLD = "websocket_connection_limit_reached"
_GONE = (WebSocketDisconnect, WebSocketDisconnected)
_encoder = msgspec.json.Encoder()
Lane = str | None
"""a client's `stream_id`"""


class Sockets:
    """All that are open; told when the server ends."""

    def __init__(
        self,
        context: ServerContext,
        stores: tuple[ResponseStore, ResponseStore],
        bodies: Bodies,
        load: Load,
    ) -> None:
        """`stores`: of what is to be stored, and of what is not."""
        self.context, self.bodies, self.load = context, bodies, load
        self.stores = stores
        self._open: OrderedDict[Session, None] = OrderedDict()
        """the longest silent first"""
        self._draining = False

    async def serve(self, socket: WebSocket) -> None:
        refused = self._refusal()
        if refused is not None:
            await socket.send_denial_response(error_response(socket.scope, *refused))
            return
        session = Session(socket, self)
        self._open[session] = None
        try:
            await session.run()
        finally:
            del self._open[session]

    def _refusal(self) -> tuple[int, ErrorBody] | None:
        if self._draining:
            return 503, error_body("the server is shutting down", "server_error", None, "shutting_down")
        limits = self.context.engine.config.limits
        if len(self._open) >= limits.websockets:
            idle = next((each for each in self._open if each.is_idle), None)
            if idle is None:
                return 503, error_body(limits.message("websockets"), "server_overloaded", None, _TOO_OLD)
            idle.end(_GOING_AWAY, error_body(limits.message("websockets"), "server_error", None, _TOO_OLD))
            self._open.move_to_end(idle)
        return None

    def heard(self, session: Session) -> None:
        self._open.move_to_end(session)

    def drain(self) -> None:
        self._draining = True
        for session in list(self._open):
            session.end(_SERVICE_RESTART, None)


class Session:
    """One socket."""

    def __init__(self, socket: WebSocket, sockets: Sockets) -> None:
        self._socket, self._sockets = socket, sockets
        self._limits = sockets.context.engine.config.limits
        self._store = PassingResponses(*sockets.stores)
        self._lanes: dict[Lane, deque[Event]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._end: tuple[int, ErrorBody | None] | None = None
        self._woken = asyncio.Event()

    @property
    def is_idle(self) -> bool:
        return not self._lanes and self._end is None

    def end(self, code: int, why: ErrorBody | None) -> None:
        """No further turn is taken; the socket is closed when those before have ended."""
        if self._end is None:
            self._end = code, why
            self._woken.set()

    def discard(self) -> None:
        """A message that is long, of so many that it gives way."""

    async def run(self) -> None:
        await self._socket.accept()
        work = [asyncio.create_task(each) for each in (self._receive_all(), self._close_in_time())]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = [*work, *self._tasks]
            for task in ended:
                task.cancel()
            await asyncio.gather(*ended, return_exceptions=True)
            await asyncio.to_thread(self._store.forget)

    async def _receive_all(self) -> None:
        """Until the client leaves."""
        while True:
            try:
                raw = await self._socket.receive()
                if raw["type"] == "websocket.disconnect":
                    return
                given = raw.get("text")
                await self._take((raw.get("bytes") or b"") if given is None else given.encode())
            except _GONE:
                return

    async def _close_in_time(self) -> None:
        try:
            async with asyncio.timeout(self._limits.websocket_s):
                await self._woken.wait()
        except TimeoutError:
            message = self._limits.message("websocket_s")
            self.end(_GOING_AWAY, error_body(message, "invalid_request_error", None, _TOO_OLD))
        while self._tasks:
            await asyncio.wait(list(self._tasks))
        assert self._end is not None
        code, why = self._end
        try:
            if why is not None:
                await self._socket.send_text(_message(None, _error(400, why)))
            await self._socket.close(code)
        except _GONE:
            pass

    async def _take(self, raw: bytes) -> None:
        """One message. What is wrong with it is told, and ends nothing else."""
        self._sockets.heard(self)
        lane: Lane = None
        try:
            given = await self._decoded(raw)
            lane = _lane_of(given)
            if given.get("type") != "response.create":
                raise InvalidRequestError("type must be response.create: other events are not supported", "type")
            if self._end is not None:
                raise InvalidRequestError("this WebSocket takes no further turn", None, _TOO_OLD)
            self._limits.check("pipelined", sum(map(len, self._lanes.values())), "response.create")
        except Exception as error:
            await self._socket.send_text(_message(lane, _told(error, new_request_id())))
            return
        waiting = self._lanes.setdefault(lane, deque())
        waiting.append(given)
        if len(waiting) == 1:
            task = asyncio.create_task(self._run_lane(lane, waiting))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _decoded(self, raw: bytes) -> Event:
        limits = self._limits
        given = decode(raw, limits) if len(raw) <= IN_PLACE_BYTES else await self._sockets.bodies.decode(self, raw)
        if not isinstance(given, dict):
            raise InvalidRequestError("a message must be a JSON object", None)
        return given

    async def _run_lane(self, lane: Lane, waiting: deque[Event]) -> None:
        try:
            while waiting:
                await self._turn(lane, waiting[0])
                waiting.popleft()
        except _GONE:
            pass  # whoever receives ends the rest
        finally:
            del self._lanes[lane]
            self._sockets.heard(self)

    async def _turn(self, lane: Lane, given: Event) -> None:
        name = new_request_id()
        CALLER.set(Caller(name, PATH, self._socket.scope["headers"], set(), time.monotonic()))
        encode = partial(_message, lane)
        try:
            client = CLIENT.get()
            if client is not None and "infer" not in client.scopes:  # since the socket was opened
                raise InvalidRequestError("the key is not valid any more", None, "invalid_api_key")
            with self._sockets.load.one(), nullcontext() if client is None else client.one():
                await self._serve(given, name, encode)
        except _GONE:
            raise
        except Exception as error:
            await self._socket.send_text(encode(_told(error, name)))

    async def _serve(self, given: Event, name: str, encode: Callable[[Event], str]) -> None:
        if given.get("background"):
            raise InvalidRequestError("background is not supported over a WebSocket", "background")
        fields = {key: given[key] for key in given if key not in _OF_SOCKETS}
        body = ResponsesRequest.model_validate({**fields, "stream": True})
        unanswered = self._socket.app.state.unanswered
        handler = await unanswered.run(handler_of(self._sockets.context, self._store, body, self._socket))
        if given.get("generate") is False:
            for event in await unanswered.run(handler.warmed()):
                await self._socket.send_text(encode(event))
            return
        async with aclosing(handler.told(name, encode)) as told:
            messages = await unanswered.run(anext(told, None))
            while messages is not None:
                for message in messages:
                    await self._socket.send_text(message)
                messages = await anext(told, None)


def _message(lane: Lane, event: Event) -> str:
    return _encoder.encode(event if lane is None else {**event, "stream_id": lane}).decode()


def _lane_of(given: Event) -> Lane:
    lane = given.get("stream_id")
    if lane is not None and not (isinstance(lane, str) and 0 < len(lane) <= _LANE_CHARS):
        raise InvalidRequestError(f"stream_id must be a text of 1 to {_LANE_CHARS} characters", "stream_id")
    return lane


def _error(status: int, body: ErrorBody) -> Event:
    return {"type": "error", "status": status, **body}


def _told(error: Exception, request_id: str) -> Event:
    if isinstance(error, HTTPException):
        detail: Any = error.detail
        return _error(error.status_code, detail)
    if isinstance(error, ValidationError):
        return _error(400, validation_body(error.errors(), "application/json"))
    if isinstance(error, JSONDecodeError):
        return _error(400, error_body(f"a message must be JSON: {error}", "invalid_request_error"))
    status, body, _ = describe(error, request_id)
    return _error(status, body)


def add_socket(app: FastAPI, sockets: Sockets) -> None:
    app.state.sockets = sockets
    app.add_api_websocket_route(PATH, sockets.serve)
