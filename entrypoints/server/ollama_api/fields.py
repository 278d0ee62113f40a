"""Ollama's request bodies, and what the engine takes of them.

What says how Ollama loads a model or keeps it (`keep_alive`, `num_ctx`, `num_gpu`, …) has no effect: it is loaded, and
its context is the server's. A conversation that is too long is refused, and an answer that fills the context ends:
neither `truncate` nor `shift` makes room.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from engine import SamplingParams
from engine.limits import Limits
from engine.request import StructuredOutputsParams
from entrypoints.server.fields import Body, Ids, NoEffect, Objects, refusal
from entrypoints.server.llama_options import LlamaOptions
from entrypoints.server.structured import blamed_on
from entrypoints.server.tools import ToolFields, ToolUse

Effort = Literal["low", "medium", "high", "max"]


class Options(LlamaOptions, Body):
    num_predict: int | None = Field(default=None, ge=-2)
    """of tokens, at most; 0, -1 and -2: what the context holds"""
    draft_num_predict: NoEffect = None
    embedding_only: NoEffect = None
    f16_kv: NoEffect = None
    logits_all: NoEffect = None
    low_vram: NoEffect = None
    main_gpu: NoEffect = None
    num_batch: NoEffect = None
    num_ctx: NoEffect = None
    num_gpu: NoEffect = None
    num_gqa: NoEffect = None
    num_keep: NoEffect = None
    num_thread: NoEffect = None
    numa: NoEffect = None
    penalize_newline: NoEffect = None
    rope_frequency_base: NoEffect = None
    rope_frequency_scale: NoEffect = None
    use_mlock: NoEffect = None
    use_mmap: NoEffect = None
    vocab_only: NoEffect = None


class GenerationFields(Body):
    """What /api/chat and /api/generate share."""

    UNSUPPORTED: ClassVar = {"_debug_render_only": ()}

    model: str | None = None
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: Options = Field(default_factory=Options)
    think: bool | Effort | None = None
    """None: as the model's template has it"""
    logprobs: bool = False
    top_logprobs: int = 0
    priority: int = 0
    cache_salt: str | None = Field(default=None, min_length=1)
    keep_alive: NoEffect = None
    shift: NoEffect = None
    truncate: NoEffect = None

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if isinstance(self.format, str) and self.format not in ("", "json"):
            raise refusal("format", 'format must be "json" or a JSON schema, which is an object')
        return self

    @property
    def effort(self) -> str | None:
        """As templates know them: they have no "max"."""
        return None if not isinstance(self.think, str) else "high" if self.think == "max" else self.think

    @property
    def thinks(self) -> bool | None:
        return None if self.think is None else self.think is not False

    def structure(self) -> StructuredOutputsParams | None:
        """What a grammar cannot enforce is left out, as Ollama does."""
        if not self.format and not isinstance(self.format, dict):
            return None
        if isinstance(self.format, dict):
            return StructuredOutputsParams(json=self.format, strict=False)
        return StructuredOutputsParams(json_object=True)

    def sampling_params(
        self,
        defaults: SamplingParams,
        recommended: int | None,
        logprobs: int | None,
        structure: StructuredOutputsParams | None,
    ) -> SamplingParams:
        """`recommended`: of tokens, where the client says nothing. Raises `InvalidRequestError`."""
        given = self.options.num_predict
        most = recommended if given is None else given if given > 0 else None
        with blamed_on("num_predict", "max_tokens"):
            return self.options.params(defaults, most, structure, logprobs=logprobs)


class ChatRequest(GenerationFields):
    messages: Objects | None = None
    tools: Objects | None = None

    def tool_use(self, limits: Limits) -> ToolUse:
        """Raises `InvalidRequestError`."""
        return ToolFields(tools=self.tools).tool_use(limits)


class GenerateRequest(GenerationFields):
    UNSUPPORTED: ClassVar = GenerationFields.UNSUPPORTED | {"images": (), "template": ()}

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    """the prompt is what the model is given, without its chat template"""
    context: Ids | None = None
    """token ids of what was said before, as the answer before gave them"""

    @model_validator(mode="after")
    def _check_raw(self) -> Self:
        for name in ("system", "suffix", "context"):
            if self.raw and getattr(self, name):
                raise refusal(name, f"{name} cannot be combined with raw: the prompt is all that the model is given")
        if self.suffix and (self.context or self.system):
            raise refusal("suffix", "suffix cannot be combined with system and context: a gap is no conversation")
        return self


class ShowRequest(Body):
    model: str | None = None
    name: str | None = None
    """what `model` was called before"""
    verbose: NoEffect = None
    system: NoEffect = None
    template: NoEffect = None
    options: NoEffect = None
