"""Connections that want no answer: silent ones, slow ones, and those with bodies without end."""

from __future__ import annotations

import asyncio
import contextlib
import resource

from server import KEY

_HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"


def allow_descriptors(number: int) -> int:
    """How many connections this process may hold of `number`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, number + 500), hard)
    )
    return min(number, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200)


async def silent(host: str, port: int, number: int, seconds: float) -> int:
    """Opens connections and says nothing; how many of them the server closes by itself within `seconds`."""
    writers = []
    for _ in range(number):
        with contextlib.suppress(OSError):
            writers.append(await asyncio.open_connection(host, port))
        if len(writers) % 100 == 0:
            await asyncio.sleep(0.02)
    closed, end = 0, asyncio.get_running_loop().time() + seconds
    while closed < number and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.5)
        closed = sum(reader.at_eof() or reader.exception() is not None for reader, _ in writers)
    for _, writer in writers:
        writer.close()
    return closed


async def slow_headers(host: str, port: int, number: int, seconds: float) -> int:
    """One header a second, for ever; how many the server ended before `seconds` were over."""

    async def drip() -> bool:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(_HEAD.encode())
            for place in range(int(seconds)):
                await asyncio.sleep(1)
                if reader.at_eof():
                    return True
                writer.write(f"X-{place}: y\r\n".encode())
                await writer.drain()
            return reader.at_eof()
        except OSError:
            return True
        finally:
            writer.close()

    return sum(await asyncio.gather(*(drip() for _ in range(number))))


async def huge_body(host: str, port: int, size_bytes: int, *, chunked: bool) -> int:
    """Sends a body of that size, or as much as the server takes; the status of the answer."""
    reader, writer = await asyncio.open_connection(host, port)
    piece = b"x" * 65536
    how = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size_bytes}"
    try:
        writer.write(f"{_HEAD}Content-Type: application/json\r\n{how}\r\n\r\n".encode())
        sent = 0
        with contextlib.suppress(OSError):
            while sent < size_bytes and not reader._buffer:  # type: ignore[attr-defined]  # an answer is there
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
                await writer.drain()
                sent += len(piece)
        line = await asyncio.wait_for(reader.readline(), 120)
        return int(line.split()[1]) if line else 0
    finally:
        writer.close()
