"""A client that is behind: while it takes READ_BYTES in each timeout it keeps its place."""

from __future__ import annotations

import asyncio
from asyncio import TimerHandle
from contextlib import suppress
from socket import IPPROTO_TCP

TCP_NOTSENT_LOWAT = 25
"""Linux's; the socket module does not always name it"""
READ_BYTES = 64 * 1024


class Unread:
    """What a connection's client has yet to take. `behind` when writing pauses, `caught_up` when it goes on."""

    def __init__(self, transport: asyncio.Transport, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._seconds, self._loop = transport, seconds, loop
        self._timer: TimerHandle | None = None
        with suppress(OSError, AttributeError):  # else little of what is read is seen here, megabytes at a time
            transport.get_extra_info("socket").setsockopt(IPPROTO_TCP, TCP_NOTSENT_LOWAT, READ_BYTES)

    def behind(self) -> None:
        self.caught_up()
        unread = self._transport.get_write_buffer_size()  # nothing is added to it before writing resumes

        def look() -> None:
            if self._transport.get_write_buffer_size() > unread - READ_BYTES:
                self._transport.abort()
            else:
                self.behind()

        self._timer = self._loop.call_later(self._seconds, look)

    def caught_up(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
