"""An ASGI application behind real sockets, in this event loop, and a client that sends any bytes at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from engine.limits import Limits
from entrypoints.server.connections import Connections, protocol_of

GUARD_S = 60
"""no test waits that long; one that would hang fails"""


@dataclass
class Door:
    port: int
    table: Connections
    state: ServerState

    async def connect(self, data: bytes = b"") -> Caller:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        caller = Caller(reader, writer)
        caller.send(data)
        return caller


@dataclass
class Caller:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """(status, headers, body) of the next answer."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), GUARD_S)
        status, *lines = head.split(b"\r\n")[:-2]
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
        body = await self.reader.readexactly(int(headers.get(b"content-length", b"0")))
        return int(status.split()[1]), headers, body

    async def end(self) -> bytes:
        """What comes until the server closes."""
        try:
            return await asyncio.wait_for(self.reader.read(), GUARD_S)
        except ConnectionError:
            return b""

    def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def serving(app: Any, limits: Limits, connections: int = 100) -> AsyncIterator[Door]:
    table = Connections(connections)
    config = uvicorn.Config(
        app,
        http=protocol_of(limits, table),
        lifespan="off",
        log_config=None,
        ws="none",
        ws_max_size=limits.websocket_bytes,
    )  # type: ignore[arg-type]
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()

    def make() -> asyncio.Protocol:
        return config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]

    server = await loop.create_server(make, "127.0.0.1", 0)
    try:
        yield Door(server.sockets[0].getsockname()[1], table, state)
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


def post(body: bytes, path: str = "/v1/completions", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body
