"""Whatever bytes arrive in whatever pieces: nothing raises, nobody is left behind, and who asks properly is served."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest
from sockets import Door, post, serving
from test_connections import GET, Recorder, until

from engine.limits import Limits

SEEDS = [
    GET,
    GET.replace(b"/x", b"/early"),
    post(b'{"a":1}'),
    b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nT: x\r\n\r\n",
    b"POST /x HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
    b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"GET /early HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /x HTTP/1.0\r\n\r\n",
    b"GET http://h HTTP/1.1\r\n\r\n",
]
INSERTED = [b"\r\n", b"0", b"Content-Length: 5\r\n", b"\x00", b"Transfer-Encoding: chunked\r\n", b"\xff\xfe"]


def damaged(draw: random.Random) -> bytes:
    data = bytearray(b"".join(draw.choices(SEEDS, k=draw.randint(1, 4))))
    for _ in range(draw.randint(0, 4)):
        at, kind = draw.randrange(len(data)), draw.random()
        if kind < 0.4:
            data[at] = draw.randrange(256)
        elif kind < 0.7:
            del data[at : at + draw.randint(1, 10)]
        else:
            data[at:at] = draw.choice(INSERTED)
        data = data or bytearray(b"x")
    return bytes(data)


async def send_damaged(door: Door, draw: random.Random) -> None:
    caller = await door.connect()
    data = damaged(draw)
    leaves = draw.random() < 0.3
    try:
        while data:
            size = draw.randint(1, len(data))
            caller.send(data[:size])
            data = data[size:]
            await asyncio.sleep(0)
        if not leaves:
            await caller.end()
    finally:
        caller.close()


def test_damaged_requests_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    unhandled: list[object] = []
    limits = Limits(header_timeout_s=0.2, body_timeout_s=0.2, keep_alive_s=0.2)

    async def go() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        draw = random.Random(16)
        async with serving(Recorder(), limits, connections=60) as door:  # fewer places than callers
            for _ in range(6):
                await asyncio.gather(*(send_damaged(door, draw) for _ in range(100)))
                caller = await door.connect(GET)
                assert (await caller.answer())[0] == 200
                caller.close()
            await until(lambda: not door.table and not door.state.connections and not door.state.tasks)

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(go(), 120))
    assert not unhandled and not caplog.records
