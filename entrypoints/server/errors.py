"""Every error leaves the server in OpenAI's shape with all four fields (message, type, param, code), but on the routes
that are Anthropic's (`messages_errors`) or Ollama's (`ollama_api.errors`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from engine.errors import (
    CoreDiedError,
    DeadlineError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    ShutDownError,
    TooShortError,
)
from entrypoints.server.caller import CALLER, TIMEOUT_HEADER
from entrypoints.server.error_shape import ErrorBody, error_body
from entrypoints.server.messages_errors import in_anthropics_words, is_anthropics
from entrypoints.server.not_served import why_not_served
from entrypoints.server.ollama_api.errors import in_ollamas_words, is_ollamas
from entrypoints.server.paths import route_path
from entrypoints.server.quotas import RateLimitedError
from entrypoints.server.request_ids import request_id_of

logger = logging.getLogger("pageloom.server")
_CODE = "pageloom.error"


class ServerEndsError(Exception):
    """The server was told to end, and does not wait for this request."""


class ServerLeftError(Exception):
    """The server behind this one broke off: a router's."""


def describe(error: Exception, request_id: str) -> tuple[int, ErrorBody, dict[str, str]]:
    """(HTTP status, body, headers) for an exception of the engine. What is not the client's doing goes to the log under
    the request's id; the client gets that id and a line without details."""
    if isinstance(error, InvalidRequestError):
        return 400, error_body(str(error), "invalid_request_error", error.field, error.code), {}
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        message, code = str(error), "queue_full"
        if isinstance(error, TooShortError):
            message, code = message + _asked(), "deadline_unreachable"
        return 503, error_body(message, "server_overloaded", None, code), headers
    if isinstance(error, DeadlineError):
        return 504, error_body(str(error), "timeout_error", None, "deadline_exceeded"), {}
    if isinstance(error, RateLimitedError):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return 429, error_body(str(error), error.quota, None, "rate_limit_exceeded"), headers
    if isinstance(error, (ServerEndsError, ShutDownError)):
        message = "the server is shutting down; send the request again"
        return 503, error_body(message, "server_error", None, "shutting_down"), {"Retry-After": "1"}
    if isinstance(error, ServerLeftError):
        message = "the server that this was sent to has left, and may have done it: ask again"
        return 502, error_body(message, "server_error", None, "server_left"), {}
    hint = f"the server's log says more (request {request_id})"
    if isinstance(error, CoreDiedError):  # its text holds the core's last output; whoever notices the death logs it
        logger.warning("request %s: the engine is not running", request_id)
        return 500, error_body(f"the engine is not running; {hint}", "server_error", None, "engine_dead"), {}
    if isinstance(error, RequestFailedError):
        logger.warning("request %s failed: %s", request_id, error)
        return 500, error_body(f"the request failed; {hint}", "server_error", None, "request_failed"), {}
    logger.error("request %s: unexpected error", request_id, exc_info=error)
    return 500, error_body(f"internal error; {hint}", "server_error", None, "internal_error"), {}


def _asked() -> str:
    """What the client has given its request; the engine knows what is left of it."""
    caller = CALLER.get()
    return "" if caller is None or caller.timeout is None else f" (asked for: {TIMEOUT_HEADER}: {caller.timeout:.40})"


def model_not_found(name: str, served: Sequence[str]) -> ErrorBody:
    message = f"the model {name!r} does not exist; this server serves {', '.join(map(repr, served))}"
    return error_body(message, "invalid_request_error", "model", "model_not_found")


def validation_body(errors: Sequence[Mapping[str, Any]], content_type: str) -> ErrorBody:
    """The first error of pydantic's, with the alternatives that it lists for a field of several types."""
    first = errors[0]
    context = first.get("ctx") or {}
    if first["type"] == "json_invalid":
        return error_body(f"the body is not valid JSON: {context.get('error')}", "invalid_request_error")
    if first["type"] == "refused":
        return error_body(str(first["msg"]), "invalid_request_error", context["param"])
    path = [part for part in first["loc"] if part != "body"]
    if not path:
        hint = "" if "json" in content_type else "; send it with Content-Type: application/json"
        return error_body(f"the body must be a JSON object{hint}", "invalid_request_error")
    text = " or ".join(dict.fromkeys(str(e["msg"]) for e in errors if e["loc"][:2] == first["loc"][:2]))
    where = ".".join(str(part) for part in path if not _names_an_alternative(part))
    return error_body(f"{where}: {text}", "invalid_request_error", str(path[0]))


def _names_an_alternative(part: object) -> bool:
    """pydantic puts the type that it tried into the path."""
    return isinstance(part, str) and (part in ("str", "int", "bool") or "[" in part)


def error_response(
    scope: Scope, status: int, body: ErrorBody, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """In the words of the API that was asked."""
    scope[_CODE] = body["error"]["code"] or body["error"]["type"]
    path = route_path(scope)
    if is_ollamas(path):
        return JSONResponse(in_ollamas_words(body), status, headers)
    if not is_anthropics(path):
        return JSONResponse(body, status, headers)
    request_id = request_id_of(scope)
    status, told = in_anthropics_words(status, body, request_id)
    return JSONResponse(told, status, {**(headers or {}), "request-id": request_id})


def error_code_of(scope: Scope) -> str | None:
    """Of the error that a request was answered by, if it was."""
    code: str | None = scope.get(_CODE)
    return code


def install(app: FastAPI) -> None:
    """Route every exception through `describe`."""

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        status, body, headers = describe(error, request_id_of(request.scope))
        return error_response(request.scope, status, body, headers)

    async def on_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        body = validation_body(error.errors(), request.headers.get("content-type", ""))
        return error_response(request.scope, 400, body)

    async def on_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        body: Any = error.detail
        reason = why_not_served(request.url.path) if error.status_code == 404 and not isinstance(body, dict) else None
        if reason is not None:
            body = error_body(reason, "invalid_request_error", None, "not_served")
        elif not isinstance(body, dict):
            kind = "invalid_request_error" if error.status_code < 500 else "server_error"
            message = str(error.detail)
            if error.status_code == 404 and message == "Not Found":
                message = f"Not Found: this server has no route {request.url.path[:200]}"
            body = error_body(message, kind)
        return error_response(request.scope, error.status_code, cast(ErrorBody, body), error.headers)

    kinds = (InvalidRequestError, QueueFullError, DeadlineError, CoreDiedError, RequestFailedError, ServerEndsError)
    for kind in (*kinds, Exception):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
