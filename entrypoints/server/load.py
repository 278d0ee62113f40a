"""How many requests are being answered: vLLM's `/load`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from entrypoints.server.classes import CLASSIFY
from entrypoints.server.classes import POOLING as PATH
from entrypoints.server.paths import route_path
from entrypoints.server.scores import RERANK_PATHS, SCORE_PATHS

GENERATING = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/responses/compact",
        "/infill",
        "/api/chat",
        "/api/generate",
    }
)
POOLING = frozenset({"/v1/embeddings", *SCORE_PATHS, *RERANK_PATHS, CLASSIFY, PATH, "/api/embed", "/api/embeddings"})
COUNTED = GENERATING | POOLING


class Load:
    """`requests`: of routes that ask the model, from their headers to their last byte, and turns of WebSockets."""

    def __init__(self) -> None:
        self.requests = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1


class CountsLoad:
    """Plain ASGI, so that routes still see disconnects."""

    def __init__(self, app: ASGIApp, load: Load) -> None:
        self._app, self._load = app, load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) not in COUNTED:
            await self._app(scope, receive, send)
            return
        with self._load.one():
            await self._app(scope, receive, send)
