"""Pageloom's public names, loaded when they are first used, so that `import engine` costs nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.async_engine import AsyncEngine
    from engine.config import EngineArgs
    from engine.llm import LLM
    from engine.request import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineArgs",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "engine.llm",
    "AsyncEngine": "engine.async_engine",
    "EngineArgs": "engine.config",
    "SamplingParams": "engine.request",
    "RequestOutput": "engine.request",
    "CompletionOutput": "engine.request",
    "StructuredOutputsParams": "engine.request",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
