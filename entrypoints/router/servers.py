"""The servers behind a router: which of them live, and which has least to do."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

logger = logging.getLogger(__name__)

CHECK_S = 1.0
"""between looks at each server's health"""
MISSED = 3
"""looks in a row that were not answered"""
CHARACTERS_A_TOKEN = 4
"""what a prompt's size is guessed by"""


class Server:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.lives = True
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

    async def watch(self, client: httpx.AsyncClient) -> None:
        """For ever."""
        while True:
            began = time.monotonic()
            looks = (self._look_at(client, server) for server in self.all)
            for found in await asyncio.gather(*looks, return_exceptions=True):
                if isinstance(found, Exception):
                    logger.error("a server could not be looked at", exc_info=found)
            await asyncio.sleep(max(CHECK_S - (time.monotonic() - began), 0.1))

    @staticmethod
    async def _look_at(client: httpx.AsyncClient, server: Server) -> None:
        lives = None
        try:
            lives = (await client.get(f"{server.url}/health", timeout=CHECK_S)).status_code == 200
        except httpx.ConnectError:
            lives = False
        except httpx.HTTPError:
            pass  # busy, or stopped: several in a row tell
        server.told_health(lives)
