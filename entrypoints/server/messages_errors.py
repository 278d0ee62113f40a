"""Errors of Anthropic's routes, in Anthropic's shape; the rest of the server knows OpenAI's only."""

from __future__ import annotations

from typing import Literal, TypedDict

from engine.errors import TOO_LONG
from entrypoints.server.error_shape import ErrorBody

PATH = "/v1/messages"
OVERLOADED = 529
"""what Anthropic says where others say 503: clients wait, and send it again"""
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class AnthropicErrorInfo(TypedDict):
    type: str
    message: str


class AnthropicErrorBody(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorInfo
    request_id: str


def is_anthropics(path: str) -> bool:
    return path == PATH or path.startswith(f"{PATH}/")


def in_anthropics_words(status: int, body: ErrorBody, request_id: str) -> tuple[int, AnthropicErrorBody]:
    """An error in OpenAI's shape, and its status."""
    status = OVERLOADED if status == 503 else status
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    message = body["error"]["message"]
    if body["error"]["code"] == TOO_LONG:  # clients look for these words, and make the conversation shorter
        message = f"prompt is too long: {message}"
    return status, {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
