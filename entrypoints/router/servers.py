"""The servers behind a router: which of them live, which has least to do, and which move pages between each other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import httpx
import msgspec

from engine.kv_transfer.layout import differences

logger = logging.getLogger("pageloom.router")

CHECK_S = 1.0
"""between looks at each server's health"""
MISSED = 3
"""looks in a row that were not answered"""
CHARACTERS_A_TOKEN = 4
"""what a prompt's size is guessed by"""


class Moves(msgspec.Struct, frozen=True):
    """What a server's `/health` says of pages."""

    kv_role: str | None
    """None: it gives none, and takes none"""
    kv_layout: dict[str, str]
    asleep: bool = False


class Server:
    def __init__(self, url: str) -> None:
        self.url = url
        self.lives = True
        self.moves: Moves | None = None
        """None: it has not said, as vLLM's"""
        self.prompt_tokens = 0
        """about how many the requests have that it is answering"""
        self.failures = 0
        self.gone = asyncio.Event()
        """it has not told its health for so long that nobody waits for it any more"""
        self.unwell = asyncio.Event()
        """the same, or it says itself that it makes no progress: who can do without its answer does"""
        self._missed = 0

    def told_health(self, lives: bool | None) -> None:
        """None: it did not answer."""
        self._missed = self._missed + 1 if lives is None else 0
        if lives is not None:
            self.lives = lives
        if self._missed >= MISSED:
            self.lives = False
            self.gone.set()
        elif lives:
            self.gone.clear()
            self.unwell.clear()
        if lives is False or self.gone.is_set():
            self.unwell.set()

    @contextmanager
    def answering(self, tokens: int) -> Iterator[None]:
        self.prompt_tokens += tokens
        try:
            yield
        finally:
            self.prompt_tokens -= tokens

    def failed(self) -> None:
        """It is left out until its health is looked at again."""
        self.lives = False
        self.failures += 1


def why_not(prefill: Server, decode: Server) -> str | None:
    """Why no page goes from one to the other, as far as they have said."""
    for server, kind, other in ((prefill, "prefill", "kv_consumer"), (decode, "decode", "kv_producer")):
        if server.moves is not None and server.moves.kv_role in (None, other):
            return f"{kind} server {server.url} has kv_role {server.moves.kv_role}: start it with --role {kind}"
    if prefill.moves is None or decode.moves is None:
        return None
    unlike = differences(prefill.moves.kv_layout, decode.moves.kv_layout)
    return f"prefill server {prefill.url} and decode server {decode.url} differ: {unlike}" if unlike else None


class Servers:
    """Of one kind."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Server(url) for url in urls]
        self._turn = 0

    def in_order(self) -> list[Server]:
        """Those that live, the one with the fewest outstanding prompt tokens first; among equals each in its turn."""
        self._turn += 1
        count = len(self.all)
        turned = [self.all[(self._turn + index) % count] for index in range(count)]
        return sorted((server for server in turned if server.lives), key=lambda server: server.prompt_tokens)

    @property
    def any_lives(self) -> bool:
        return any(server.lives for server in self.all)


class Watch:
    """Looks at the health of all, and says what does not work."""

    def __init__(self, prefill: Servers, decode: Servers, client: httpx.AsyncClient) -> None:
        self._prefill, self._decode, self._client = prefill, decode, client
        self._told: set[str] = set()
        """of pairs that move no pages: what the log was told, as long as it holds"""

    async def run(self) -> None:
        """For ever."""
        while True:
            began = time.monotonic()
            await self.look()
            await asyncio.sleep(max(CHECK_S - (time.monotonic() - began), 0.1))

    async def look(self) -> None:
        """Once."""
        looks = (self._look_at(server) for server in (*self._prefill.all, *self._decode.all))
        for found in await asyncio.gather(*looks, return_exceptions=True):
            if isinstance(found, Exception):
                logger.error("a server could not be looked at", exc_info=found)
        pairs = (why_not(prefill, decode) for prefill in self._prefill.all for decode in self._decode.all)
        reasons = {reason for reason in pairs if reason is not None}
        for reason in sorted(reasons - self._told):
            logger.warning("no pages move, and decode servers compute prompts: %s", reason)
        self._told = reasons

    async def _look_at(self, server: Server) -> None:
        lives = None
        try:
            answer = await self._client.get(f"{server.url}/health", timeout=CHECK_S)
            lives = answer.status_code == 200
            with suppress(msgspec.DecodeError):  # another engine's
                server.moves = msgspec.json.decode(answer.content, type=Moves) if lives else server.moves
                lives = lives and not (server.moves is not None and server.moves.asleep)
        except httpx.ConnectError:
            lives = False
        except httpx.HTTPError:
            pass  # busy, or stopped: several in a row tell
        server.told_health(lives)
