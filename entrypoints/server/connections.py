"""What a connection may cost before the application hears of it: time, headers, pipelined requests, and its place.

uvicorn's protocol has one timeout, between requests. Here every wait for a client ends: for headers and for a body
with 408. Where all places are taken, the connection that has been silent longest, among those that owe us the next
word, gives way to a new one. Whoever is refused reads why: the answer is written, our side of the connection closed,
and what still arrives is dropped for a moment, since closing at once would discard the answer on its way.
"""

from __future__ import annotations

import asyncio
import resource
from asyncio import TimerHandle
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Literal

import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from engine.limits import Limits
from entrypoints.server.error_shape import error_body
from entrypoints.server.request_ids import new_request_id
from entrypoints.server.unread import Unread
from entrypoints.server.websockets import BoundedWebSocket

LINGER_S = 2.0
"""how long a client that is still sending may take to read why it was refused"""
OTHER_DESCRIPTORS = 256
"""sockets to the core, files, libraries"""
MAX_BACKLOG = 2048

Part = Literal["headers", "body", "answer", "idle", "closing", "upgraded"]
"""what a connection is at: whose headers or body is arriving, whose answer is owed, between requests, refused, or a
WebSocket"""


class Connections:
    """All open connections of a server, and which of them wait for their client, the longest silent first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: set[BoundedProtocol] = set()
        self._waiting: OrderedDict[BoundedProtocol, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: BoundedProtocol) -> bool:
        """False when no connection can give way to this one: each is owed an answer."""
        if len(self._open) >= self.limit:
            if not self._waiting:
                return False
            oldest, _ = self._waiting.popitem(last=False)
            self.forget(oldest)
            oldest.give_way()
        self._open.add(connection)
        return True

    def heard(self, connection: BoundedProtocol, waiting: bool) -> None:
        """Something came from it, or went to it; `waiting`: the next word is the client's."""
        if not waiting or connection not in self._open:
            self._waiting.pop(connection, None)
        else:
            self._waiting[connection] = None
            self._waiting.move_to_end(connection)

    def forget(self, connection: BoundedProtocol) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *, limits: Limits, connections: Connections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._table = connections
        self._part: Part = "headers"
        self._timer: TimerHandle | None = None
        self._unread: Unread | None = None
        self._begun = False
        """the first byte of the headers is here"""
        self._raw_bytes = 0
        """that came for the headers, or for the body, before the latest piece"""
        self._body_bytes = 0
        self._head_bytes = 0
        self._refusal: tuple[int, str] | None = None
        self._running: RequestResponseCycle | None = None
        self.ws_protocol_class = partial(BoundedWebSocket, limits=limits, gone=self._leave)  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unread = Unread(transport, self._limits.read_timeout_s, self.loop)
        if self._table.admit(self):
            self._await("headers", self._limits.header_timeout_s)
        else:
            self._refuse(503, self._limits.message("connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._unread is not None:
            self._unread.caught_up()
        self._leave()
        super().connection_lost(exc)

    def _leave(self) -> None:
        self._table.forget(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        assert self._unread is not None
        self._unread.behind()

    def resume_writing(self) -> None:
        assert self._unread is not None
        self._unread.caught_up()
        super().resume_writing()

    def handle_websocket_upgrade(self) -> None:
        """The connection keeps its place, and does not give way: what it is at its session knows."""
        bodies = (b"content-length", b"transfer-encoding")
        if self._answering or any(name in bodies for name, _ in self.headers):
            self._refuse(400, "a WebSocket begins without a body, when all requests before it have been answered")
            return
        self._stop_timer()
        self._part = "upgraded"
        super().handle_websocket_upgrade()

    def data_received(self, data: bytes) -> None:
        if self._part == "closing":
            return
        if self._part == "idle":
            self._await("headers", self._limits.header_timeout_s)
        self._raw_bytes += len(data)
        super().data_received(data)
        if self._part == "headers" and self._raw_bytes > self._limits.header_bytes:
            self._refuse(431, self._limits.message("header_bytes"))
        # What is neither body nor the framing of chunks: trailers, which the parser keeps.
        framing = self._raw_bytes - self._body_bytes * (1 + self._limits.chunk_framing)
        if self._part == "body" and framing > self._limits.header_bytes:
            self._refuse(431, self._limits.message("header_bytes"))
        self._note()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._raw_bytes = self._head_bytes = 0
        if self._part != "headers":  # behind another request, in one piece with it
            self._await("headers", self._limits.header_timeout_s)
        self._begun = True

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        if self._part == "body":
            return  # a trailer: the application has its headers
        if len(self.headers) >= self._limits.headers:
            self._stop_parsing(431, self._limits.message("headers"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= self._limits.pipelined:
            self._stop_parsing(400, self._limits.message("pipelined"))
        super().on_headers_complete()
        self._raw_bytes = self._body_bytes = self._head_bytes = 0
        self._await("body", self._limits.body_timeout_s)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self.cycle.response_complete and self._body_bytes > self._limits.drained_bodies * self._limits.body_bytes:
            self._part = "closing"
            self.transport.abort()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.parser.should_upgrade() and self._should_upgrade():
            return
        self._stop_timer()
        if self.cycle.response_complete:  # an answer that came before the end of the question
            self._await("idle", self._limits.keep_alive_s)
        else:
            self._part = "answer"

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._part == "answer" and not self._answering:
            self._await("idle", self._limits.keep_alive_s)
        if self.transport.is_closing():
            self._close()
        self._note()

    def shutdown(self) -> None:
        """The server ends: who has not sent a whole request has none that could be answered."""
        if self._waits_for_client:
            self._close()
        else:
            super().shutdown()
            if self.transport.is_closing():
                self._close()

    def send_400_response(self, msg: str) -> None:
        status, message = self._refusal or (400, "this is not HTTP/1.1")
        self._refuse(status, message)

    def give_way(self) -> None:
        self._part = "closing"
        self._disconnect_application()
        self.transport.abort()

    @property
    def _waits_for_client(self) -> bool:
        if self._part == "body":
            return not self.pipeline
        return self._part not in ("answer", "upgraded") and not self._answering

    @property
    def _answering(self) -> bool:
        """Whether a request that came whole has not been answered."""
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    def _note(self) -> None:
        self._table.heard(self, self._waits_for_client)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.header_bytes:
            self._stop_parsing(431, self._limits.message("header_bytes"))

    def _stop_parsing(self, status: int, message: str) -> None:
        """From within the parser, which ends with what a callback raises and has `send_400_response` called."""
        self._refusal = status, message
        raise ValueError(message)

    def _await(self, part: Part, seconds: float) -> None:
        """`part` begins, and must end in time."""
        self._part = part
        if part == "headers":
            self._raw_bytes = 0
            self._begun = False
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._late, seconds)
        self._note()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        """When all that was written has been read, or is not read in time."""
        self._stop_timer()
        self.transport.close()
        self._timer = self.loop.call_later(self._limits.read_timeout_s, self.transport.abort)

    def _late(self, seconds: float) -> None:
        if self._part == "idle" or (self._part == "headers" and not self._begun and not self._answering):
            self._close()  # nothing was asked, so nothing is answered
        elif self.pipeline or (self._part == "headers" and self._answering):
            self._timer = self.loop.call_later(seconds, self._late, seconds)  # we make it wait ourselves
        elif self._part == "headers":
            self._refuse(408, self._limits.message("header_timeout_s"))
        elif self.cycle.response_started:
            self._close()
        else:
            self._refuse(408, self._limits.message("body_timeout_s"))

    def _refuse(self, status: int, message: str) -> None:
        """Answer what did not reach the application, or no longer will, and close."""
        if self._part == "closing" or self.transport.is_closing():
            return
        if self._answering and self.cycle.response_started:
            self._close()
            return
        self._disconnect_application()
        self._part = "closing"
        self.transport.write(_answer(status, message, self.server_state.default_headers))
        if not self.transport.can_write_eof():
            self._close()
            return
        self.transport.write_eof()
        self._stop_timer()
        self._timer = self.loop.call_later(LINGER_S, self.transport.abort)
        self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _disconnect_application(self) -> None:
        """Whatever still works for this connection must not write to it; not only the newest request."""
        for cycle in (self._running, self.cycle):
            if cycle is not None:
                cycle.disconnected = True
                cycle.waiting_for_100_continue = False
                cycle.message_event.set()


def _answer(status: int, message: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = msgspec.json.encode(error_body(message, kind))
    lines = [
        *headers,
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", new_request_id().encode()),
        (b"connection", b"close"),
    ]
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
    return head + b"".join(name + b": " + value + b"\r\n" for name, value in lines) + b"\r\n" + body


def make_room(wanted: int) -> tuple[int, int]:
    """(connections that descriptors allow, of `wanted`; how many may wait to be accepted). Raises the soft limit of
    open files as far as that needs and the hard limit permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + MAX_BACKLOG + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    free = needed if soft == resource.RLIM_INFINITY else max(16, soft - OTHER_DESCRIPTORS)
    # Connections are accepted in bursts of up to the backlog, before one of them can be turned away.
    backlog = min(MAX_BACKLOG, max(8, free // 4))
    return min(wanted, max(8, free - backlog)), backlog


def protocol_of(limits: Limits, connections: Connections) -> Callable[..., asyncio.Protocol]:
    """What uvicorn makes a connection with."""

    def make(**uvicorns: Any) -> asyncio.Protocol:
        return BoundedProtocol(limits=limits, connections=connections, **uvicorns)

    return make
