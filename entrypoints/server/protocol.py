"""The OpenAI request bodies that the server reads, as pydantic models; `fields` says how tolerant they are.

Fields past OpenAI's own (`top_k`, `min_p`, `ignore_eos`, …) carry vLLM's names.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from engine import SamplingParams
from engine.errors import InvalidRequestError
from engine.request import StructuredOutputsParams
from entrypoints.server.fields import Body, Effort, Ids, NoEffect, Objects, Texts, refusal
from entrypoints.server.structured import StructuredFields
from entrypoints.server.tools import ToolFields

T = TypeVar("T")
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_moves: bool = False
    """an event where another core goes on with the answer"""
    include_obfuscation: NoEffect = None


NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "web_search_options": (),
    # vLLM's
    "chat_template": (),
    "documents": (),
    "logits_processors": (),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (),
    "vllm_xargs": (),
    # llama.cpp's and others'
    "dry_multiplier": (),
    "dynatemp_range": (),
    "mirostat": (),
    "repeat_penalty": (1,),
    "tfs_z": (1,),
    "top_a": (),
    "typical_p": (1,),
    "xtc_probability": (),
}


class SamplingFields(StructuredFields, Body):
    """What completions and chat share."""

    UNSUPPORTED: ClassVar = NOT_SUPPORTED

    model: str | None = None
    n: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    seed: int | None = None
    stop: str | Texts | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    guided_decoding_backend: NoEffect = None
    metadata: NoEffect = None
    prediction: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_retention: NoEffect = None
    reasoning_effort: NoEffect = None
    safety_identifier: NoEffect = None
    service_tier: NoEffect = None
    store: NoEffect = None
    user: NoEffect = None
    verbosity: NoEffect = None

    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    stop_token_ids: Ids | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    bad_words: Texts | None = None
    allowed_token_ids: Ids | None = None
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    """the last so many are kept; -1: as many as leave room for one to come"""
    priority: int = 0
    cache_salt: str | None = Field(default=None, min_length=1)
    kv_transfer_params: dict[str, Any] | None = None
    return_token_ids: bool | None = False
    """the prompt's, once, and the generated ones, streamed or whole"""

    @model_validator(mode="after")
    def _check_streaming(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "stream_options is only allowed when stream is true")
        if self.prompt_logprobs is not None and self.stream:
            raise refusal("prompt_logprobs", "prompt_logprobs are only given when stream is false")
        if self.stream and (self.kv_transfer_params or {}).get("do_remote_decode"):
            raise refusal("stream", "what do_remote_decode hands over comes with a whole answer: stream must be false")
        return self

    def sampling_params(
        self,
        defaults: SamplingParams,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        structure: StructuredOutputsParams | None,
        best_of: int | None = None,
    ) -> SamplingParams:
        """Where the client left out what a model's authors may recommend, `defaults` hold (as vLLM). Raises
        `InvalidRequestError` naming the field."""
        if self.use_beam_search:  # nothing is drawn, so what is recommended for drawing does not count
            defaults = SamplingParams()
        return SamplingParams(
            n=_or(self.n, 1),
            best_of=best_of,
            use_beam_search=self.use_beam_search,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            temperature=_or(self.temperature, defaults.temperature),
            top_p=_or(self.top_p, defaults.top_p),
            top_k=_or(self.top_k, defaults.top_k),
            min_p=_or(self.min_p, defaults.min_p),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            bad_words=self.bad_words,
            allowed_token_ids=self.allowed_token_ids,
            logit_bias=_token_ids(self.logit_bias),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            skip_special_tokens=self.skip_special_tokens,
            structured_outputs=structure,
            extra_args={"kv_transfer_params": self.kv_transfer_params} if self.kv_transfer_params else None,
        )


DEFAULT_MAX_TOKENS = 16
"""of a completion, as OpenAI's"""


class CompletionRequest(SamplingFields):
    NULLS: ClassVar = frozenset({"max_tokens"})

    prompt: str | Ids | Texts | Annotated[list[Ids], Field(fail_fast=True)]
    max_tokens: int | None = None
    """left out: what is recommended, else `DEFAULT_MAX_TOKENS`; null: what the context holds"""
    echo: bool | None = False
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    """what follows the gap that the answer fills; "" is none"""

    @model_validator(mode="after")
    def _refuse_what_is_not_supported(self) -> Self:
        if self.stream and self.best_of is not None and self.best_of > _or(self.n, 1):
            raise refusal("best_of", "best_of can only exceed n when stream is false: the best is known at the end")
        if self.suffix and self.echo:
            raise refusal("echo", "echo cannot be combined with suffix: the answer stands between the two")
        return self

    def token_limit(self, recommended: int | None) -> int | None:
        """Most tokens to generate; None: what the context holds."""
        if "max_tokens" in self.model_fields_set:
            return self.max_tokens
        return _or(recommended, DEFAULT_MAX_TOKENS)

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt; raises `InvalidRequestError` where there is none."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequestError("prompt must not be empty", "prompt")
        return [prompt] if isinstance(prompt[0], int) else list(prompt)


class ChatCompletionRequest(ToolFields, SamplingFields):
    messages: Objects = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    echo: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: dict[str, Any] | bool | None = None
    """``{"type": "enabled" | "disabled"}``, as several vendors have it"""
    include_reasoning: bool = True
    thinking_token_budget: int | None = Field(default=None, ge=0)
    """tokens, behind which the model must answer; 0: it does not think"""

    @model_validator(mode="after")
    def _refuse_what_is_not_supported(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        if self.add_generation_prompt and self.continue_final_message:
            raise refusal("continue_final_message", "continue_final_message needs add_generation_prompt to be false")
        return self

    def thinks(self) -> bool | None:
        """Whether it should, where the client says so."""
        if self.thinking_token_budget == 0:
            return False
        if isinstance(self.thinking, dict):
            return {"enabled": True, "disabled": False}.get(str(self.thinking.get("type")), self.enable_thinking)
        return self.enable_thinking if self.thinking is None else self.thinking

    def token_limit(self, recommended: int | None) -> int | None:
        """Most tokens to generate: the client's figure, else the model's recommendation; None: what the context
        holds."""
        if self.max_completion_tokens is None:
            return _or(self.max_tokens, recommended)
        if self.max_completion_tokens < 1:
            raise InvalidRequestError(
                f"max_completion_tokens must be at least 1, got {self.max_completion_tokens}", "max_completion_tokens"
            )
        return self.max_completion_tokens


class TokenizeRequest(Body):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Objects | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "give either prompt or messages")
        return self


class PinRequest(Body):
    """A name, and either `prompt` (text or token ids) or the `messages` that conversations begin with."""

    name: str
    prompt: str | Ids | None = None
    messages: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Ids


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _token_ids(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    for token in bias:
        if _TOKEN_ID.fullmatch(token) is None:
            raise InvalidRequestError(
                f"logit_bias keys must be token ids written as integers, got {token[:20]!a}", "logit_bias"
            )
    return {int(token): value for token, value in bias.items()}
