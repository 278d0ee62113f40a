"""What a user asks for and what comes back: names and shapes follow vLLM's, so that switching is one import.

Torch-free. Validation of ranges happens in `SamplingParams.__post_init__`; what depends on the model (vocabulary,
context length) is checked by `engine.frontend.admission`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, Self

import msgspec

from engine.adapters.request import LoRARequest
from engine.errors import InvalidRequestError
from engine.kv_transfer.params import FIELD, KVTransferParams, parse_kv_transfer_params
from engine.limits import RANGES
from engine.parameter_types import SAMPLING
from engine.vllm.sampling import translated

FinishReason = Literal["stop", "length", "abort", "error"]


class Tenant(msgspec.Struct, frozen=True):
    """One of those who share an engine under `scheduling_policy="fair"`."""

    name: str
    weight: float = 1.0
    """of twice the weight, twice the share"""


NOBODY = Tenant("")
"""all who are not named are one"""


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What comes before an answer that has a grammar, and is free: text between two marks, which are texts as the model
    writes them, special tokens or not. ``open`` None: the prompt has opened it. The model may leave it out unless the
    prompt opened it, or ``required``. After ``budget`` tokens the closing mark follows, which must be one token, or
    begin with one. Raises `InvalidRequestError`."""

    close: str
    open: str | None = None
    required: bool = False
    budget: int | None = None

    def __post_init__(self) -> None:
        if not self.close or self.open == "":
            raise InvalidRequestError("structured_outputs.thinking: its marks must not be empty", "structured_outputs")
        if self.budget is not None and self.budget < 1:
            raise InvalidRequestError(
                f"structured_outputs.thinking.budget must be at least 1, got {self.budget}", "structured_outputs"
            )

    def behind(self, text: str) -> str:
        """What follows it in an output."""
        _, mark, rest = text.partition(self.close)
        return rest.lstrip() if mark else "" if self.open is None or self.required else text


_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """What an output must be; names are vLLM's. Exactly one of the first six.

    ``json``: a JSON schema, as text or parsed, or a pydantic model. Objects are as open as it says, which by default is
    open: ``disable_additional_properties`` closes those that name properties. ``strict``: JSON Schema's keywords and
    formats that cannot be enforced are refused by name; else they have no effect, ``oneOf`` is read as ``anyOf``, and
    the text is validated when it has ended (`CompletionOutput.schema_error`; not without ``detokenize``). Words that
    JSON Schema does not know say nothing. Whitespace in JSON is bounded unless ``whitespace_pattern``, which
    may stand wherever some may, says otherwise. ``regex``: Rust's, without look-around and back-references; ``\\w`` and
    ``\\d`` are Unicode's. ``grammar``: GBNF if a rule is written with ``::=``, else Lark. ``structural_tag``:
    ``{"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}``. Beams are sequences
    of tokens: several may spell the same text. An output that can only end has ended, whatever ``min_tokens`` and
    ``ignore_eos`` say; where it may go on, ``min_tokens`` makes it. ``backend``: "auto" is llguidance; xgrammar is
    an extra. ``thinking`` comes first; a text of the Lark grammar
    ``alternative`` may stand in the answer's place. Raises `InvalidRequestError` naming the field.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    strict: bool = True
    backend: Literal["auto", "llguidance", "xgrammar"] = "auto"
    thinking: Thinking | None = None
    alternative: str | None = None

    def __post_init__(self) -> None:
        schema_of = getattr(self.json, "model_json_schema", None)
        if schema_of is not None:
            msgspec.structs.force_setattr(self, "json", schema_of())
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs takes exactly one of {', '.join(_KINDS)}, got {' and '.join(given) or 'none'}",
                "structured_outputs",
            )
        if self.choice is not None and (not self.choice or not all(isinstance(one, str) for one in self.choice)):
            raise InvalidRequestError("structured_outputs.choice must be strings, at least one", "structured_outputs")
        if (self.thinking is not None or self.alternative is not None) and self.backend == "xgrammar":
            raise InvalidRequestError(
                "structured_outputs.thinking and alternative are llguidance's, not xgrammar's", "structured_outputs"
            )

    @property
    def kind(self) -> str:
        """Which of them."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))


class GuidedDecodingParams(StructuredOutputsParams, frozen=True, kw_only=True, omit_defaults=True):
    """vLLM's older name."""


class RequestOutputKind(Enum):
    """What the outputs of one request hold: all so far, what is new, or there is one, at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class _VllmsNames(msgspec.StructMeta):
    """Of a struct that takes vLLM's names, too, and refuses other ones by name."""

    def __call__(self, **given: Any) -> Any:
        if not given.keys() <= set(self.__struct_fields__):
            given = translated(given, self.__struct_fields__)
        return super().__call__(**given)


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=_VllmsNames):
    """How to continue one prompt. Defaults are vLLM's, and so are the names; whose have no effect here are refused with
    what to use instead. What is changed later is checked when a request is made of it, which changes nothing then.

    ``temperature`` 0 means greedy. ``top_k`` 0 or -1 keeps all. ``seed`` None draws one per request. ``logprobs`` is
    the number of alternatives beside the chosen token; None turns log-probabilities off. ``logit_bias`` maps token id
    to a bias in [-100, 100]. Of ``best_of`` samples the ``n`` with the highest sum of log-probabilities are
    returned, best first, when all have ended.

    ``use_beam_search`` searches instead of sampling: with ``best_of`` (or ``n``) beams, ``length_penalty`` and
    ``early_stopping`` as in transformers; the ``n`` best sequences come at the end, with their ``score``.

    Of a prompt the last ``truncate_prompt_tokens`` are kept; -1: as many as leave room for one to come. ``output_kind``
    is heeded by `AsyncEngine` and `LLMEngine`; `LLM` gives what there is in the end. Raises `InvalidRequestError`
    naming the field.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None
    """`kv_transfer_params` alone, as vLLM's connectors read it"""

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """As vLLM's: None means the default where the default is not None (but `max_tokens` None is no bound); keys of
        `logit_bias` may be texts, and its values are cut to what is allowed."""
        for name in [name for name, value in given.items() if value is None and name != "max_tokens"]:
            del given[name]
        if isinstance(bias := given.get("logit_bias"), Mapping):
            allowed = RANGES["logit_bias"]
            try:
                cut = {int(token): min(allowed.high, max(allowed.low, value)) for token, value in bias.items()}
            except (TypeError, ValueError) as error:
                raise InvalidRequestError(f"logit_bias: token ids and numbers, please: {error}", "logit_bias") from None
            given["logit_bias"] = cut
        return cls(**given)

    def clone(self) -> Self:
        return copy.deepcopy(self)

    def __post_init__(self) -> None:
        for name, taken in SAMPLING.items():
            value, default = getattr(self, name), _DEFAULTS[name]
            if value is not default and (value is not None or name not in _MAY_BE_NONE):
                setattr(self, name, taken(name, value))
        for name, allowed in RANGES.items():
            value = getattr(self, name, None)
            if value is not None and name != "logit_bias":
                allowed.check(name, value)
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(f"best_of ({self.best_of}) must be at least n ({self.n})", "best_of")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        for bias in (self.logit_bias or {}).values():
            RANGES["logit_bias"].check("logit_bias", bias)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must name at least one token", "allowed_token_ids")
        if any(not s for s in self.stop_strings):
            raise InvalidRequestError("stop must not contain an empty string", "stop")
        if any(not w.strip() for w in self.bad_words or ()):
            raise InvalidRequestError("bad_words must not contain an empty word", "bad_words")
        if not isinstance(self.output_kind, RequestOutputKind):
            got = repr(self.output_kind)[:100]
            raise InvalidRequestError(f"output_kind must be a RequestOutputKind, got {got}", "output_kind")
        kept = self.truncate_prompt_tokens
        if kept is not None and kept != -1 and not (isinstance(kept, int) and kept > 0):
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at least 1, or -1, got {kept}", "truncate_prompt_tokens"
            )
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequestError("structured_outputs must be StructuredOutputsParams", "structured_outputs")
        if not isinstance(self.extra_args, Mapping | None) or set(self.extra_args or {}) - {FIELD}:
            raise InvalidRequestError(f"extra_args may have {FIELD}: no plugin would read others", "extra_args")
        if self.kv_transfer is not None and self.use_beam_search:
            raise InvalidRequestError(f"{FIELD} cannot be combined with use_beam_search", FIELD)
        self._check_beam_search()

    @property
    def kv_transfer(self) -> KVTransferParams | None:
        return parse_kv_transfer_params((self.extra_args or {}).get(FIELD))

    def _check_beam_search(self) -> None:
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != _DEFAULTS[name]:
                    raise InvalidRequestError(f"{name} has no effect without use_beam_search", name)
            return
        if self.temperature not in (0.0, 1.0):
            raise InvalidRequestError("beam search draws nothing: temperature must be 0 or 1", "temperature")
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidRequestError("a search in a grammar ends with EOS: ignore_eos cannot be true", "ignore_eos")
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name) not in (None, _DEFAULTS[name]):
                raise InvalidRequestError(f"{name} cannot be combined with use_beam_search", name)

    @property
    def num_samples(self) -> int:
        """Sequences that are generated at a time."""
        return self.n if self.best_of is None else self.best_of

    @property
    def chooses(self) -> bool:
        """Whether some of them are not returned."""
        return self.num_samples > self.n and not self.use_beam_search

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


_NOT_WITH_BEAMS = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "min_tokens",
    "stop",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
)
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
_MAY_BE_NONE = {"max_tokens", *(name for name, value in _DEFAULTS.items() if value is None)}


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one candidate; ``rank`` 1 is the most likely token of the vocabulary."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsAt = dict[int, Logprob]
"""token id → Logprob: the chosen token first, then the alternatives, most likely first"""


class RequestMetrics(msgspec.Struct, kw_only=True):
    """Seconds on `time.monotonic`'s clock of the front end; None where the event has not happened."""

    arrival_time: float
    queued_time: float | None = None
    """handed to the core"""
    first_scheduled_time: float | None = None
    """a step of the core took it up; known with its first token"""
    first_token_time: float | None = None
    finished_time: float | None = None
    num_moves: int = 0
    """times that another core went on with it, because the one before died or was taken away"""


class CompletionOutput(msgspec.Struct, kw_only=True):
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAt] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    """beam search: what it was ranked by, cumulative_logprob / length ** length_penalty"""
    schema_error: str | None = None
    """structured_outputs with ``strict=False``: where the text does not keep its JSON schema, or "not validated: " and
    why it cannot be told"""

    @property
    def lora_request(self) -> None:
        """vLLM's; the request's output has it."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, kw_only=True):
    """The state of one request: cumulative by default, only what is new where the caller asked for deltas."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[LogprobsAt | None] | None = None
    num_cached_tokens: int = 0
    num_accepted_tokens: int = 0
    """of all tokens so far, those that were drafts (`speculative_config`, or forced by a grammar)"""
    pooled: Any = None
    """of requests that are pooled (`engine.pooling`): a NumPy array, float32 [vectors, size], when they have ended"""
    kv_transfer_params: dict[str, Any] | None = None
    """where another engine finds what was computed of the prompt, if the request asked for that"""
    metrics: RequestMetrics | None = None
    """one for all outputs of a request: it goes on with it"""

    lora_request: LoRARequest | None = None

    @property
    def encoder_prompt(self) -> None:
        """vLLM's, as the one below; there are no encoders."""

    @property
    def encoder_prompt_token_ids(self) -> None:
        """There are no encoders."""
