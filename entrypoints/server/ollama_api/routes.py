"""Ollama's routes: chats and prompts, streamed as lines of JSON, and what is told of the model."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from entrypoints.server.context import ServerContext
from entrypoints.server.encoding import json_response
from entrypoints.server.error_shape import error_body
from entrypoints.server.errors import describe
from entrypoints.server.fields import Body
from entrypoints.server.names import is_one_of
from entrypoints.server.ollama_api.embed import EmbedOneRequest, EmbedRequest, embed, embed_one
from entrypoints.server.ollama_api.errors import PREFIX, in_ollamas_words
from entrypoints.server.ollama_api.fields import ChatRequest, GenerateRequest, ShowRequest
from entrypoints.server.ollama_api.handler import ChatHandler, GenerateHandler, OllamaHandler
from entrypoints.server.ollama_api.models import Models
from entrypoints.server.streaming import EventStream, answer, event_stream
from entrypoints.server.structured import blamed_on

_Handler = Callable[[Request], Coroutine[Any, Any, Response]]

API_VERSION = "0.12.11"
"""the release of Ollama whose API this is: clients ask for it, and refuse older ones"""


class LineStream(EventStream):
    """Its clients read every line as JSON: there is none that says nothing."""

    media_type = "application/x-ndjson"


def failure(error: Exception, request_id: str) -> bytes:
    """What ends a stream that fails."""
    return msgspec.json.encode(in_ollamas_words(describe(error, request_id)[1])) + b"\n"


def any_content_type(bounded: type[APIRoute]) -> type[APIRoute]:
    """Ollama reads every body as JSON, and what its documentation sends with curl says that it is a form. A browser
    names the page that it sends for, and has to say JSON: it asks this server's leave for that first."""

    class AnyContentType(bounded):  # type: ignore[valid-type, misc]
        def get_route_handler(self) -> _Handler:
            handle: _Handler = super().get_route_handler()

            async def as_json(request: Request) -> Response:
                if "origin" not in request.headers:
                    headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
                    request.scope["headers"] = [*headers, (b"content-type", b"application/json")]
                return await handle(Request(request.scope, request.receive))

            return as_json

    return AnyContentType


async def respond(handler: OllamaHandler[Any], request: Request) -> Response:
    if not handler.asks:
        return json_response(handler.loaded())
    with blamed_on("format"):
        if handler.body.stream:
            return await event_stream(request, handler.lines(), failure, alive=None, kind=LineStream)
        return json_response(await answer(request, handler.whole()))


class OllamaRoutes:
    """`add` puts them into an application."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.models = Models(context)

    def check(self, name: str | None, body: Body, request: Request, generates: bool = False) -> None:
        """And take note of fields that nobody knows. What `generates` may name an adapter, as it was loaded."""
        context = self.context
        context.take_note(body, request)
        if not name:
            context.check_model(None)
        elif not is_one_of(name, context.names) and not (generates and context.adapters.get(name)):
            message = f"model '{name[:100]}' not found: this server serves '{context.served_name}'"
            raise HTTPException(404, error_body(message, "invalid_request_error", "model", "model_not_found"))

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        self.check(body.model, body, request, generates=True)
        return await respond(ChatHandler(self.context, body), request)

    async def generate(self, body: GenerateRequest, request: Request) -> Response:
        self.check(body.model, body, request, generates=True)
        return await respond(GenerateHandler(self.context, body), request)

    async def embed(self, body: EmbedRequest, request: Request) -> Response:
        self.check(body.model, body, request)
        return json_response(await answer(request, embed(self.context, body)))

    async def embeddings(self, body: EmbedOneRequest, request: Request) -> Response:
        self.check(body.model, body, request)
        return json_response(await answer(request, embed_one(self.context, body)))

    async def tags(self) -> Response:
        return json_response(await self.models.listed())

    async def show(self, body: ShowRequest, request: Request) -> Response:
        self.check(body.model or body.name, body, request)
        return json_response(await self.models.shown())

    async def ps(self) -> Response:
        return json_response(await self.models.running())

    async def version(self) -> dict[str, str]:
        return {"version": API_VERSION}

    def add(self, app: FastAPI) -> None:
        own_class = any_content_type(app.router.route_class)

        def serve(method: str, path: str, endpoint: Callable[..., Any]) -> None:
            app.router.add_api_route(f"{PREFIX}{path}", endpoint, methods=[method], route_class_override=own_class)

        for endpoint in (self.chat, self.generate, self.embed, self.embeddings, self.show):
            serve("POST", f"/{endpoint.__name__}", endpoint)
        for told in (self.tags, self.ps, self.version):
            serve("GET", f"/{told.__name__}", told)

        @app.head("/", include_in_schema=False)
        async def root() -> Response:
            """By which Ollama's own command sees that somebody is there."""
            return Response()


def add_routes(app: FastAPI, context: ServerContext) -> None:
    OllamaRoutes(context).add(app)
