"""OpenAI's shape of an error, with all four fields."""

from __future__ import annotations

from typing import TypedDict


class ErrorInfo(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorInfo


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
