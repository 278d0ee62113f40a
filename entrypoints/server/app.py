"""The HTTP application around one AsyncEngine, compatible with OpenAI's, Anthropic's and Ollama's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from engine import AsyncEngine
from engine.front_ends.client import FrontEndClient
from engine.limits import Limits
from entrypoints.server import (
    adapters,
    classes,
    embeddings,
    errors,
    infill,
    looking_in,
    messages_api,
    operation,
    prefixes,
    scaling,
    scores,
    sleeping,
)
from entrypoints.server.api_key import ApiKeyGuard
from entrypoints.server.bodies import Bodies, bounded_route
from entrypoints.server.chat import create_chat_completion
from entrypoints.server.completions import create_completion
from entrypoints.server.context import IGNORED, ServerContext, ServerSettings
from entrypoints.server.key_usage import KeyCollector
from entrypoints.server.keys import Keyring
from entrypoints.server.load import CountsLoad, Load
from entrypoints.server.ollama_api import routes as ollama_api
from entrypoints.server.openapi import add_document
from entrypoints.server.origins import OriginGuard
from entrypoints.server.page import routes as page
from entrypoints.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from entrypoints.server.refusals import LogsRefusals
from entrypoints.server.request_ids import RequestIds
from entrypoints.server.responses_api import routes as responses_api
from entrypoints.server.responses_api.sockets import Sockets, add_socket
from entrypoints.server.responses_api.store import ResponseStore
from entrypoints.server.streaming import ClientLeftError, Unanswered, answer


class Application(FastAPI):
    """Request ids are outermost: answers to unexpected errors are made outside of every middleware."""

    def build_middleware_stack(self) -> ASGIApp:
        return RequestIds(super().build_middleware_stack(), lambda: bool(self.state.draining))


def create_app(
    engine: AsyncEngine,
    served_name: str,
    keyring: Keyring | None = None,
    allowed_origins: Sequence[str] = (),
    settings: ServerSettings = ServerSettings(),  # noqa: B008 (it is frozen)
    siblings: FrontEndClient | None = None,
) -> FastAPI:
    """The engine must be started; the app shuts it down when it ends. `allowed_origins`: web pages that may call.
    `siblings`: asks other processes that take requests for the same cores. Raises `ConfigError`."""
    store, passing = _stores(engine.config.limits, settings, siblings is not None)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        app.state.background.stop()
        await engine.shutdown()
        await context.close()
        store.close()
        passing.close()

    # A redirect would name the host that the client claims to have asked.
    app = Application(
        title="Pageloom",
        version=version("pageloom"),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    bodies = Bodies(engine.config.limits)
    app.router.route_class = bounded_route(bodies)
    app.state.unanswered = Unanswered()
    app.state.draining = False
    app.state.limits = engine.config.limits
    errors.install(app)
    app.add_exception_handler(ClientLeftError, _on_client_left)
    context = ServerContext(engine, served_name, settings)
    _openai_routes(app, context)
    messages_api.add_routes(app, context)
    embeddings.add_routes(app, context)
    scores.add_routes(app, context)
    classes.add_routes(app, context)
    infill.add_routes(app, context)
    ollama_api.add_routes(app, context)
    _tokenizer_routes(app, context)
    responses_api.add_routes(app, context, store)
    load = Load()
    add_socket(app, Sockets(context, (store, passing), bodies, load))
    operation.add_routes(app, context, load, siblings)
    for part in (prefixes, scaling, sleeping, looking_in):
        part.add_routes(app, context)
    open_files = page.add_routes(app, context)
    add_document(app, keyed=keyring is not None)
    guards = [Middleware(CountsLoad, load=load), Middleware(OriginGuard, allowed=allowed_origins)]
    if keyring is not None:
        engine.metrics.registry.register(KeyCollector(keyring, served_name))
        guards.append(Middleware(ApiKeyGuard, keyring=keyring, unguarded=open_files))
    _add_middleware(app, [*guards, *([Middleware(LogsRefusals)] if settings.log_requests else [])], allowed_origins)
    return app


def _stores(limits: Limits, settings: ServerSettings, shared: bool) -> tuple[ResponseStore, ResponseStore]:
    """Of what is kept, and of what is gone with its connection."""
    bounds = limits.stored_responses_bytes, limits.stored_responses_s
    return ResponseStore(settings.response_store, *bounds, shared=shared), ResponseStore(None, *bounds)


async def _on_client_left(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


def _add_middleware(app: FastAPI, inner: Sequence[Middleware], allowed_origins: Sequence[str]) -> None:
    """What is added last stands outermost."""
    for each in inner:
        app.add_middleware(each.cls, *each.args, **each.kwargs)
    if allowed_origins:  # a browser's preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", IGNORED],
        )


def _openai_routes(app: FastAPI, context: ServerContext) -> None:
    adapters.add_routes(app, context.adapters, context.settings.refuse_several, context.take_note)
    known = {name: _model(name, context.engine.max_model_len) for name in context.names}

    def listed() -> dict[str, dict[str, object]]:
        length, served = context.engine.max_model_len, context.served_name
        with_adapters = {
            each.name: {**_model(each.name, length), "root": each.path, "parent": each.base_model_name or served}
            for each in context.adapters.listed()
        }
        return known | with_adapters

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        data = listed()
        ends = {"first_id": context.served_name, "last_id": list(data)[-1], "has_more": False}
        return {"object": "list", "data": list(data.values()), **ends}

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, object]:
        context.check_model(name, generates=True)
        return listed()[name]

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        context.take_note(body, request)
        return await create_completion(context, body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        context.take_note(body, request)
        return await create_chat_completion(context, body, request)


def _model(name: str, context: int) -> dict[str, object]:
    """As OpenAI's clients know a model, and as Anthropic's do: the route is the same."""
    started = datetime.now(UTC).replace(microsecond=0)
    return {
        "id": name,
        "object": "model",
        "created": int(started.timestamp()),
        "owned_by": "pageloom",
        "max_model_len": context,
        "type": "model",
        "display_name": name,
        "created_at": started.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def _tokenizer_routes(app: FastAPI, context: ServerContext) -> None:
    engine = context.engine

    async def token_ids(body: TokenizeRequest) -> list[int]:
        if body.messages is None:
            special = True if body.add_special_tokens is None else body.add_special_tokens
            return await engine.tokenize(body.prompt or "", add_special_tokens=special)
        return await engine.apply_chat_template(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.tools,
            template_kwargs=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        )

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, object]:
        context.take_note(body, request)
        context.check_model(body.model, generates=True)
        ids = await answer(request, token_ids(body))
        reply: dict[str, object] = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}
        if body.return_token_strs:
            reply["token_strs"] = [context.texts.text(i) for i in ids]
        return reply

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
        context.take_note(body, request)
        context.check_model(body.model, generates=True)
        return {"prompt": await engine.detokenize(body.tokens)}
