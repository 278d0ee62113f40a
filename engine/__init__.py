"""Pageloom's public names, loaded when they are first used, so that `import engine` costs nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.adapters.request import LoRARequest as LoRARequest
    from engine.async_engine import AsyncEngine
    from engine.command_line import FlexibleArgumentParser
    from engine.config import EngineArgs
    from engine.frontend.admission import PromptType as PromptType
    from engine.frontend.admission import TextPrompt, TokensPrompt
    from engine.llm import LLM
    from engine.pooling import ClassificationRequestOutput as ClassificationRequestOutput
    from engine.pooling import EmbeddingRequestOutput as EmbeddingRequestOutput
    from engine.pooling import PoolingParams
    from engine.pooling import PoolingRequestOutput as PoolingRequestOutput
    from engine.pooling import ScoringRequestOutput as ScoringRequestOutput
    from engine.request import (
        CompletionOutput,
        GuidedDecodingParams,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from engine.vllm.async_llm import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine
    from engine.vllm.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from engine.vllm.llm_engine import LLMEngine

__all__ = [
    "LLM",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineArgs",
    "FlexibleArgumentParser",
    "GuidedDecodingParams",
    "LLMEngine",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_HOMES = {
    "LLM": "engine.llm",
    "AsyncEngine": "engine.async_engine",
    "EngineArgs": "engine.config",
    "LoRARequest": "engine.adapters.request",
    "FlexibleArgumentParser": "engine.command_line",
    "SamplingParams": "engine.request",
    "RequestOutput": "engine.request",
    "CompletionOutput": "engine.request",
    "RequestOutputKind": "engine.request",
    "GuidedDecodingParams": "engine.request",
    "PromptType": "engine.frontend.admission",
    "PoolingParams": "engine.pooling",
    "PoolingRequestOutput": "engine.pooling",
    "ClassificationRequestOutput": "engine.pooling",
    "EmbeddingRequestOutput": "engine.pooling",
    "ScoringRequestOutput": "engine.pooling",
    "StructuredOutputsParams": "engine.request",
    "TextPrompt": "engine.frontend.admission",
    "TokensPrompt": "engine.frontend.admission",
    "LLMEngine": "engine.vllm.llm_engine",
    "AsyncLLM": "engine.vllm.async_llm",
    "AsyncLLMEngine": "engine.vllm.async_llm",
    "AsyncEngineArgs": "engine.vllm.async_llm",
    "BeamSearchParams": "engine.vllm.beams",
    "BeamSearchSequence": "engine.vllm.beams",
    "BeamSearchOutput": "engine.vllm.beams",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
