"""A router in a thread, in front of servers without a model."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import uvicorn
from fake_servers import FakeServer

from engine.limits import Limits
from entrypoints.router.app import Router, RouterServer

BODY = {"prompt": "a b c", "max_tokens": 9, "stream_options": None, "n": 1, "temperature": 0.5}

LIMITS = Limits(body_bytes=10_000, bodies_bytes=20_000, json_values=1_000)


class Served:
    def __init__(self, grace_s: float = 1.0, prefill: FakeServer | None = None, **decode: object) -> None:
        """`decode`: what the decode servers' health says of pages."""
        self.prefill = prefill or FakeServer()
        self.decode, self.other = FakeServer(**decode), FakeServer(**decode)
        self.router = Router([self.prefill.url], [self.decode.url, self.other.url], LIMITS)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = RouterServer(uvicorn.Config(self.router.app(), log_config=None), self.router, grace_s)
        run = lambda: asyncio.run(self._server.serve(sockets=[listener]))  # noqa: E731
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def post(self, body: dict[str, Any], path: str = "/v1/completions", **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=20, **more)

    @property
    def decoded(self) -> list[dict[str, Any]]:
        return self.decode.asked + self.other.asked

    def every(self, mode: str) -> None:
        self.decode.mode = self.other.mode = mode

    def signal(self) -> None:
        """As Ctrl-C."""
        self._server.handle_exit(signal.SIGINT, None)

    def close(self) -> None:
        self.signal()
        self._thread.join()
        for each in (self.prefill, self.decode, self.other):
            each.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
