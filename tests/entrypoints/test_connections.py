"""Every connection is bounded before the application hears of it, and none that is bounded hurts another."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sockets import GUARD_S, Caller, Door, serving

from engine.limits import Limits
from entrypoints.server.connections import make_room

GET = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
QUICK = Limits(header_timeout_s=0.2, body_timeout_s=0.2, keep_alive_s=0.2)


class Recorder:
    """Answers with what it was asked; holds what asks for /wait until it is released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.waiting = 0
        self.left = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close"})  # refused
            return
        if scope["path"] == "/early":
            await self._reply(send, 413, b"too much")
            return
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body += message["body"]
            if not message["more_body"]:
                break
        if scope["path"] == "/large":
            body = bytes(64 << 20)
        if scope["path"].startswith("/zeros"):
            body = bytes(int(scope["path"].removeprefix("/zeros")))
        if scope["path"] == "/wait":
            self.waiting += 1
            await self.released.wait()
        await self._reply(send, 200, scope["path"].encode() + b" " + body)

    async def _reply(self, send: Any, status: int, body: bytes) -> None:
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def run(
    scenario: Callable[[Door, Recorder], Awaitable[None]], limits: Limits | None = None, connections: int = 100
) -> None:
    async def go() -> None:
        app = Recorder()
        async with serving(app, limits or Limits(), connections) as door:
            await asyncio.wait_for(scenario(door, app), GUARD_S)

    asyncio.run(go())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def refused(caller: Caller, status: int) -> str:
    """The message of a refusal, after which the connection is closed."""
    got, headers, body = await caller.answer()
    assert got == status and headers[b"connection"] == b"close" and headers[b"x-request-id"]
    assert await caller.end() == b""
    caller.close()
    return str(json.loads(body)["error"]["message"])


def test_silent_connections_and_slow_headers_end_in_time() -> None:
    """5,000 of them cost a sweep of timers, not a place each for ever."""

    async def scenario(door: Door, app: Recorder) -> None:
        silent = [await door.connect() for _ in range(20)]
        slow = [await door.connect(GET[:5]) for _ in range(20)]
        again = [await door.connect(GET) for _ in range(5)]
        for caller in again:
            assert (await caller.answer())[0] == 200
            caller.send(GET[:-1])
        for _ in range(8):  # a byte now and then buys no time
            await asyncio.sleep(0.05)
            for caller in slow:
                caller.send(b"e")
        for caller in silent:
            assert await caller.end() == b""
        for caller in (*slow, *again):
            assert "header_timeout_s" in await refused(caller, 408)
        await until(lambda: not door.table and not door.state.connections)

    run(scenario, QUICK)


def test_who_does_not_read_his_answer_loses_his_place() -> None:
    async def scenario(door: Door, app: Recorder) -> None:
        caller = await door.connect(GET.replace(b"/x", b"/large"))
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: len(door.table) == 1)
        await until(lambda: not door.table and not door.state.connections)
        reads = await door.connect(GET.replace(b"/x", b"/large"))
        assert (await reads.answer())[0] == 200

    run(scenario, Limits(read_timeout_s=0.5))


def test_who_reads_slowly_keeps_his_place() -> None:
    """A large answer takes longer than the timeout; only standing still ends it."""

    async def scenario(door: Door, app: Recorder) -> None:
        caller = await door.connect(GET.replace(b"/x", b"/large"))
        await caller.reader.readuntil(b"\r\n\r\n")
        left = (64 << 20) + len(b"/large ")
        while left:
            piece = await caller.reader.readexactly(min(left, 2 << 20))
            left -= len(piece)
            await asyncio.sleep(0.08)

    run(scenario, Limits(read_timeout_s=1.0))


async def _silent(door: Door, path: str, receive_bytes: int) -> socket.socket:
    """A client that asks, reads nothing yet, and whose kernel takes little for it."""
    caller = socket.socket()
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    caller.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(caller, ("127.0.0.1", door.port))
    await loop.sock_sendall(caller, GET.replace(b"/x", path.encode()))
    await until(lambda: len(door.table) > 0)
    return caller


def test_a_connection_at_a_trickle_lives_on() -> None:
    """Twice what it has to take in each timeout, a little at a time."""

    async def scenario(door: Door, app: Recorder) -> None:
        with await _silent(door, "/large", 16 * 1024) as caller:
            loop = asyncio.get_running_loop()
            for _ in range(60):
                for _ in range(4):
                    assert await loop.sock_recv(caller, 4096)
                await asyncio.sleep(0.05)
            assert door.table

    run(scenario, Limits(read_timeout_s=1.0))


def test_what_little_is_never_read_holds_no_place() -> None:
    """Less than what makes the server stop writing, and more than the kernel takes for the client."""

    async def scenario(door: Door, app: Recorder) -> None:
        callers = [await _silent(door, f"/zeros{80_000 + 5_000 * i}", 4096) for i in range(8)]
        await until(lambda: not door.table and not door.state.connections)
        for caller in callers:
            caller.close()

    run(scenario, Limits(read_timeout_s=0.5, keep_alive_s=0.5))


def test_a_body_that_does_not_come_is_408_and_its_application_is_told() -> None:
    async def scenario(door: Door, app: Recorder) -> None:
        caller = await door.connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        assert "body_timeout_s" in await refused(caller, 408)
        await until(lambda: app.left == 1)

    run(scenario, QUICK)


def test_a_connection_between_requests_is_closed_without_a_word() -> None:
    async def scenario(door: Door, app: Recorder) -> None:
        caller = await door.connect(GET)
        assert (await caller.answer())[0] == 200
        assert await caller.end() == b""

    run(scenario, QUICK)


def test_no_timeout_counts_the_time_that_the_server_takes_itself() -> None:
    async def scenario(door: Door, app: Recorder) -> None:
        one = await door.connect(GET.replace(b"/x", b"/wait"))
        behind = await door.connect(GET.replace(b"/x", b"/wait"))
        behind.send(b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi")
        partly = await door.connect(GET.replace(b"/x", b"/wait"))
        partly.send(GET[:9])
        await until(lambda: app.waiting == 3)
        await asyncio.sleep(0.7)
        app.released.set()
        assert (await one.answer())[2] == b"/wait "
        assert [(await behind.answer())[2] for _ in range(2)] == [b"/wait ", b"/b hi"]
        assert (await partly.answer())[0] == 200
        partly.send(GET[9:])
        assert (await partly.answer())[0] == 200

    run(scenario, QUICK)


HEADERS = Limits(header_bytes=1024, headers=16)


@pytest.mark.parametrize(
    ("data", "limit"),
    [
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 2000, "header_bytes"),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 1020 + b"\r\n\r\n", "header_bytes"),
        (b"GET /" + b"x" * 2000, "header_bytes"),
        (b"GET / HTTP/1.1\r\n" + b"A" * 2000, "header_bytes"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 17 + b"\r\n", "limit headers="),
        (b"\r\n" * 2000, "header_bytes"),
        (
            b"POST /wait HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nA: " + b"x" * 2000,
            "header_bytes",
        ),
        (
            b"POST /wait HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + (b"a: " + b"x" * 99 + b"\r\n") * 20,
            "header_bytes",
        ),
    ],
)
def test_headers_and_trailers_are_bounded_while_they_arrive(data: bytes, limit: str) -> None:
    async def scenario(door: Door, app: Recorder) -> None:
        caller = await door.connect()
        for start in range(0, len(data), 500):
            caller.send(data[start : start + 500])
            await asyncio.sleep(0.002)
        assert limit in await refused(caller, 431)

    run(scenario, HEADERS)


def test_trailers_do_not_become_headers_and_small_chunks_are_no_trailers() -> None:
    async def scenario(door: Door, app: Recorder) -> None:
        chunks = b"".join(b"1\r\n%c\r\n" % (97 + i % 26) for i in range(3000)) + b"0\r\nAuthorization: x\r\n\r\n"
        caller = await door.connect(b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(chunks), 700):
            caller.send(chunks[start : start + 700])
            await asyncio.sleep(0)
        status, _, body = await caller.answer()
        assert status == 200 and len(body) == 3003
        caller.send(GET)
        assert (await caller.answer())[0] == 200, "the connection lives on"

    run(scenario, HEADERS)


def test_a_request_may_come_in_any_pieces() -> None:
    data = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc" + GET

    async def scenario(door: Door, app: Recorder) -> None:
        for cut in range(1, len(data)):
            caller = await door.connect(data[:cut])
            await asyncio.sleep(0)
            caller.send(data[cut:])
            assert [(await caller.answer())[2] for _ in range(2)] == [b"/a abc", b"/x "]
            caller.close()

    run(scenario)


def test_what_is_not_http_is_400() -> None:
    async def scenario(door: Door, app: Recorder) -> None:
        for data in (b"\x16\x03\x01\x00", b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"GET \xff HTTP/1.1\r\n\r\n"):
            assert await refused(await door.connect(data), 400)

    run(scenario)


def test_only_so_many_requests_wait_behind_one(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(door: Door, app: Recorder) -> None:
        wait = GET.replace(b"/x", b"/wait")
        few = await door.connect(wait + GET * Limits().pipelined)
        assert "wait on a connection" in await refused(await door.connect(wait + GET * (Limits().pipelined + 1)), 400)
        late = await door.connect(wait + GET + b"garbage \x00")
        assert await refused(late, 400)
        app.released.set()
        assert [(await few.answer())[0] for _ in range(Limits().pipelined + 1)] == [200] * (Limits().pipelined + 1)

    with caplog.at_level(logging.ERROR):
        run(scenario)
    assert not caplog.records, "no application wrote to a connection that was refused"


def test_the_longest_silent_connection_gives_way_and_none_that_is_owed_an_answer() -> None:
    async def scenario(door: Door, app: Recorder) -> None:
        busy = [await door.connect(GET.replace(b"/x", b"/wait")) for _ in range(2)]
        await until(lambda: app.waiting == 2)
        body = await door.connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        silent = await door.connect()
        used = await door.connect()
        await until(lambda: len(door.table) == 5)
        used.send(GET)
        assert (await used.answer())[0] == 200
        body.send(b"d")
        await asyncio.sleep(0.05)
        for served, other in enumerate((silent, used, body), 1):  # in the order of their last word
            newcomer = await door.connect(GET)
            assert (await newcomer.answer())[0] == 200, "who asks is served"
            assert await other.end() == b""
            newcomer.close()
            await until(lambda: len(door.table) == 4)
            busy.append(await door.connect(GET.replace(b"/x", b"/wait")))
            while app.waiting < 2 + served:
                await asyncio.sleep(0.005)
        assert len(door.table) == 5
        assert "connections" in await refused(await door.connect(GET), 503)
        app.released.set()
        for caller in busy:
            assert (await caller.answer())[0] == 200

    run(scenario, connections=5)


def test_an_answer_before_the_end_of_the_question_is_read_and_the_connection_lives_on() -> None:
    """A client that sends all before it reads anything sees the 413 too."""

    async def scenario(door: Door, app: Recorder) -> None:
        size = 4 * 1024 * 1024
        caller = await door.connect(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(64):
            caller.send(b"x" * (size // 64))
            await caller.writer.drain()
        assert (await caller.answer())[0] == 413
        caller.send(GET)
        assert (await caller.answer())[0] == 200

    run(scenario, Limits(body_bytes=1024 * 1024))


def test_a_body_that_goes_on_after_its_answer_ends() -> None:
    async def scenario(door: Door, app: Recorder) -> None:
        caller = await door.connect(b"POST /early HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            while True:
                caller.send(b"1000\r\n" + b"x" * 4096 + b"\r\n")
                await caller.writer.drain()
        await until(lambda: not door.table)

    run(scenario, Limits(body_bytes=10_000))


def test_connections_fit_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    for soft, hard, wanted in [(1024, 1 << 20, 16384), (1024, 4096, 16384), (256, 256, 16384), (1 << 20, 1 << 20, 10)]:
        asked.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=(soft, hard): limits)
        connections, backlog = make_room(wanted)
        allowed = asked[-1][0] if asked else soft
        assert 8 <= connections <= wanted and backlog >= 8
        assert connections == wanted or hard < 20000
        assert allowed <= hard and (connections + backlog < allowed or allowed <= 256)
