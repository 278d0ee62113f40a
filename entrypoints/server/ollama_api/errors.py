"""Errors of Ollama's routes, in its shape; the rest of the server knows OpenAI's only."""

from __future__ import annotations

from typing import TypedDict

from entrypoints.server.error_shape import ErrorBody

PREFIX = "/api"


class OllamaErrorBody(TypedDict):
    error: str


def is_ollamas(path: str) -> bool:
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def in_ollamas_words(body: ErrorBody) -> OllamaErrorBody:
    return {"error": body["error"]["message"]}
