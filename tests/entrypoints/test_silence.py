"""Streams of events say that they are alive while nothing else comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from openai._streaming import SSEDecoder

from entrypoints.server.messages_parts import Ping, named_event
from entrypoints.server.streaming import ALIVE, EventStream, Primed, failure

SILENCE_S = 0.02


class Client:
    """Whoever is connected; `quiet` counts what tells it that the server is alive."""

    def __init__(self, alive: bytes, enough: int) -> None:
        self.sent: list[bytes] = []
        self.heard_enough, self._alive, self._enough = asyncio.Event(), alive, enough

    async def send(self, message: Any) -> None:
        self.sent.append(message.get("body", b""))
        if self.sent.count(self._alive) >= self._enough:
            self.heard_enough.set()

    async def receive(self) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize("alive", [ALIVE, named_event(Ping())])
@pytest.mark.parametrize("first_is_late", [False, True])
def test_silence_is_filled_and_read_as_nothing(alive: bytes, first_is_late: bool) -> None:
    async def go() -> list[bytes]:
        client = Client(alive, enough=3)

        async def chunks() -> AsyncGenerator[bytes, None]:
            if not first_is_late:
                yield b"data: 1\n\n"
            await client.heard_enough.wait()
            yield b"data: 2\n\n"

        stream = EventStream(await Primed(chunks()).prime(SILENCE_S), SILENCE_S, alive=alive)
        await stream({"type": "http"}, client.receive, client.send)
        return client.sent

    sent = asyncio.run(go())
    assert sent.count(alive) >= 3 and sent[-1] == b"" and sent[-2] == b"data: 2\n\n"
    events = [(event.event, event.data) for event in SSEDecoder().iter_bytes(iter(sent))]
    wanted = [(None, "1")] * (not first_is_late) + [(None, "2")]
    assert [each for each in events if each[0] != "ping"] == wanted
    assert alive != ALIVE or events == wanted


def test_a_client_that_leaves_before_the_first_event_ends_the_work() -> None:
    async def go() -> bool:
        ended = asyncio.Event()

        async def chunks() -> AsyncGenerator[bytes, None]:
            try:
                await asyncio.Event().wait()
                yield b""
            finally:
                ended.set()

        async def leaves() -> Any:
            return {"type": "http.disconnect"}

        client = Client(ALIVE, enough=1)
        stream = EventStream(await Primed(chunks()).prime(0.01), 60.0)
        await stream({"type": "http"}, leaves, client.send)
        return ended.is_set()

    assert asyncio.run(go())


def test_an_early_error_is_raised_and_a_late_one_told() -> None:
    async def fails(after: asyncio.Event) -> AsyncGenerator[bytes, None]:
        await after.wait()
        raise ValueError("no")
        yield b""

    async def go() -> list[bytes]:
        now = asyncio.Event()
        now.set()
        with pytest.raises(ValueError, match="no"):
            await Primed(fails(now)).prime(60.0)
        client = Client(ALIVE, enough=1)
        stream = EventStream(await Primed(fails(client.heard_enough)).prime(0.01), SILENCE_S)
        await stream({"type": "http"}, client.receive, client.send)
        return client.sent

    sent = asyncio.run(go())
    assert sent[-2] == failure(ValueError("no"), "-") and ALIVE in sent
