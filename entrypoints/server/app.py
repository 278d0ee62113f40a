"""The OpenAI-compatible HTTP application around one AsyncEngine."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from engine import AsyncEngine
from engine.errors import CoreDiedError
from entrypoints.server import errors, prefixes
from entrypoints.server.chat import create_chat_completion
from entrypoints.server.completions import create_completion
from entrypoints.server.context import ServerContext
from entrypoints.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from entrypoints.server.streaming import ClientLeftError


class ApiKeyGuard:
    """Refuses requests to /v1 without `Authorization: Bearer KEY`; plain ASGI, so that routes still see disconnects."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                body = errors.error_body("missing or wrong API key", "authentication_error", None, "invalid_api_key")
                await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


def create_app(
    engine: AsyncEngine, served_name: str, api_key: str | None = None, allowed_origins: Sequence[str] = ()
) -> FastAPI:
    """The engine must be started; the app shuts it down when it ends. `allowed_origins`: web pages that may call."""

    async def on_client_left(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await engine.shutdown()

    app = FastAPI(title="Pageloom", version=version("pageloom"), lifespan=lifespan)
    errors.install(app)
    app.add_exception_handler(ClientLeftError, on_client_left)
    context = ServerContext(engine, served_name)
    _openai_routes(app, context)
    _tokenizer_routes(app, context)
    prefixes.add_routes(app, context)
    _operation_routes(app, context)
    if api_key is not None:
        app.add_middleware(ApiKeyGuard, key=api_key)
    if allowed_origins:  # outermost: a browser's preflight carries no key
        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"])
    return app


def _openai_routes(app: FastAPI, context: ServerContext) -> None:
    started = int(time.time())

    model = {
        "id": context.served_name,
        "object": "model",
        "created": started,
        "owned_by": "pageloom",
        "max_model_len": context.engine.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> dict[str, object]:
        context.check_model(name)
        return model

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await create_completion(context, body, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        return await create_chat_completion(context, body, request)


def _tokenizer_routes(app: FastAPI, context: ServerContext) -> None:
    engine = context.engine

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, object]:
        context.check_model(body.model)
        if body.messages is not None:
            ids = await engine.apply_chat_template(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                template_kwargs=body.chat_template_kwargs,
                add_special_tokens=bool(body.add_special_tokens),
            )
        else:
            special = True if body.add_special_tokens is None else body.add_special_tokens
            ids = await engine.tokenize(body.prompt or "", add_special_tokens=special)
        reply: dict[str, object] = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}
        if body.return_token_strs:
            reply["token_strs"] = [context.texts.text(i) for i in ids]
        return reply

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        context.check_model(body.model)
        return {"prompt": await engine.detokenize(body.tokens)}


def _operation_routes(app: FastAPI, context: ServerContext) -> None:
    engine = context.engine

    @app.get("/health")
    async def health() -> Response:
        try:
            engine.check_health()
        except CoreDiedError as error:
            return JSONResponse(errors.error_body(str(error), "server_error", None, "engine_dead"), 503)
        return Response(status_code=200)

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": version("pageloom")}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics.render(), media_type=CONTENT_TYPE_LATEST)
