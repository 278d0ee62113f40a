"""A WebSocket as a connection: the place that it keeps, and who does not read. Messages are bounded by uvicorn
(`ws_max_size`), which takes one at a time, and pings: a client that does not answer is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from engine.limits import Limits
from entrypoints.server.unread import Unread


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """`gone` is called once the connection is lost."""

    def __init__(self, *, limits: Limits, gone: Callable[[], None], **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits, self._gone = limits, gone
        self._unread: Unread | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._unread = Unread(cast(asyncio.Transport, transport), self._limits.read_timeout_s, self.loop)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._unread is not None:
            self._unread.caught_up()
        super().connection_lost(exc)
        self._gone()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.handshake_initiated:  # the request came whole, and is none that it understands
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        assert self._unread is not None
        self._unread.behind()

    def resume_writing(self) -> None:
        assert self._unread is not None
        self._unread.caught_up()
        super().resume_writing()

    def shutdown(self) -> None:
        """The server ends. An open one is closed by its session (`Sockets.drain`), when its turns have ended."""
        if not self.handshake_complete:
            super().shutdown()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()  # closing alone would wait for the client to read
