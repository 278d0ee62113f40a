"""The OpenAPI document (`/openapi.json`): what routes read is for pydantic and FastAPI to say; here are the answers,
errors and the key. `/docs` shows it, with scripts that this server sends itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from fastapi_offline.core import _STATIC_PATH

from entrypoints.server.api_key import OPEN_PATHS
from entrypoints.server.classes import CLASSIFY, POOLING, Classes, PooledListSchema
from entrypoints.server.embeddings import EmbeddingListSchema
from entrypoints.server.error_shape import ErrorBody
from entrypoints.server.infill import Infilled, InfillPart
from entrypoints.server.messages_errors import OVERLOADED, AnthropicErrorBody, is_anthropics
from entrypoints.server.messages_parts import Event, Message, TokenCount
from entrypoints.server.ollama_api.embed import EmbeddedSchema, OneEmbedded
from entrypoints.server.ollama_api.errors import OllamaErrorBody, is_ollamas
from entrypoints.server.ollama_api.models import ListedModels, RunningModels, Shown
from entrypoints.server.ollama_api.parts import ChatPart, GeneratePart
from entrypoints.server.page.board import Board
from entrypoints.server.responses import ChatChunk, ChatCompletion, Completion
from entrypoints.server.responses_api.fields import ResponseEvent, ResponseObject
from entrypoints.server.scores import RERANK_PATHS, SCORE_PATHS, Ranking, ScoreList

_ANSWERS: Mapping[str, tuple[Any, ...]] = {
    "/v1/completions": (Completion, Completion),
    "/v1/chat/completions": (ChatCompletion, ChatChunk),
    "/v1/embeddings": (EmbeddingListSchema,),
    **dict.fromkeys(SCORE_PATHS, (ScoreList,)),
    **dict.fromkeys(RERANK_PATHS, (Ranking,)),
    CLASSIFY: (Classes,),
    POOLING: (PooledListSchema,),
    "/v1/messages": (Message, Event),
    "/v1/messages/count_tokens": (TokenCount,),
    "/v1/board": (Board,),
    "/v1/responses": (ResponseObject, ResponseEvent),
    "/infill": (Infilled, InfillPart),
    "/api/chat": (ChatPart, ChatPart),
    "/api/generate": (GeneratePart, GeneratePart),
    "/api/embed": (EmbeddedSchema,),
    "/api/embeddings": (OneEmbedded,),
    "/api/ps": (RunningModels,),
    "/api/show": (Shown,),
    "/api/tags": (ListedModels,),
}
"""whole, and each event of a stream"""
_LAST = {"/v1/messages": "`message_stop`", "/infill": "the whole answer without its `content`"}
"""event of a stream that is not OpenAI's"""
_ERRORS = {
    "400": "the request cannot be served as it is written; `param` names the field",
    "404": "there is no such model",
    "408": "the request did not arrive in time",
    "413": "the body is too large",
    "431": "the headers are too large",
    "500": "the server's fault; its log says more under the answer's `x-request-id`",
    "429": "beyond a quota of the key (`--keys`): send it again after `Retry-After` seconds",
    "503": "no room, not in time, or shutting down: send it again after `Retry-After` seconds",
    "504": "the time is over that the request was given (`x-request-timeout`)",
}
_UNASKED = ("404",)
"""of routes that name no model"""
_REFERENCE = "#/components/schemas/{name}"
_SCRIPTS = "/docs/static"


def add_document(app: FastAPI, *, keyed: bool) -> None:
    """Call it when all routes are there. `keyed`: requests carry a key."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, keyed)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url=(app.openapi_url or "").lstrip("/"),  # relative, as behind --root-path
            title=app.title,
            swagger_js_url=f"{_SCRIPTS[1:]}/swagger-ui-bundle.js",
            swagger_css_url=f"{_SCRIPTS[1:]}/swagger-ui.css",
            swagger_favicon_url=f"{_SCRIPTS[1:]}/favicon.png",
        )

    app.mount(_SCRIPTS, StaticFiles(directory=_STATIC_PATH))


def _document(app: FastAPI, keyed: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = [
        ErrorBody,
        AnthropicErrorBody,
        OllamaErrorBody,
        *(kind for answers in _ANSWERS.values() for kind in answers),
    ]
    references, schemas = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    described = dict(zip(kinds, references, strict=True))
    components = document.setdefault("components", {})
    for unused in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which nobody is sent
        components.get("schemas", {}).pop(unused, None)
    components.setdefault("schemas", {}).update(schemas)
    for path, operations in document["paths"].items():
        error = {"application/json": {"schema": described[_error_of(path)]}}
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            if path in _ANSWERS:
                responses["200"] = _success(path, *(described[kind] for kind in _ANSWERS[path]))
            for status, about in _ERRORS.items():
                if path not in OPEN_PATHS and ("requestBody" in operation or status not in _UNASKED):
                    shown = str(OVERLOADED) if status == "503" and is_anthropics(path) else status
                    responses[shown] = {"description": about, "content": error}
            if keyed and path not in OPEN_PATHS:
                operation["security"] = [{"key": []}, {"x-api-key": []}]
                responses["401"] = {"description": "the key is missing or wrong", "content": error}
    if keyed:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return document


def _success(path: str, whole: dict[str, Any], event: dict[str, Any] | None = None) -> dict[str, Any]:
    content = {"application/json": {"schema": whole}}
    if event is None:
        return {"description": "whole", "content": content}
    if is_ollamas(path):
        description = "whole, or streamed as lines of JSON, the last of which is `done`"
        return {"description": description, "content": {**content, "application/x-ndjson": {"schema": event}}}
    last = _LAST.get(path, "`[DONE]`")
    return {
        "description": f"whole, or streamed as server-sent events, the last of which is {last}",
        "content": {**content, "text/event-stream": {"schema": event}},
    }


def _error_of(path: str) -> Any:
    if is_ollamas(path):
        return OllamaErrorBody
    return AnthropicErrorBody if is_anthropics(path) else ErrorBody
