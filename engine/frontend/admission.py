"""The gate: a prompt and its `SamplingParams` become messages for the core, or are refused with the reason.

Whatever can never be served as written is refused here, before anything is queued, with the field and the limit named.
What passes has every default resolved and every word turned into token ids, so that the core needs neither text nor
tokenizer.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NotRequired, TypedDict, TypeGuard

import msgspec

from engine.adapters.request import LoRARequest
from engine.config import EngineConfig
from engine.core.wire import AddRequest, BeamParams, Follower, candidates_of
from engine.errors import InvalidRequestError
from engine.frontend.adapters import check_adapter
from engine.frontend.texts import too_many_tokens
from engine.frontend.tokenizer import Tokenizer
from engine.kv_transfer.params import FIELD, KVTransferParams
from engine.limits import RANGES, Limits, check_token_ids
from engine.request import NOBODY, SamplingParams, Tenant
from engine.step import Pooling, RowParams


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    """shown in the output; not tokenized"""
    cache_salt: NotRequired[str]


class PairPrompt(msgspec.Struct, frozen=True):
    """Two texts as `engine.frontend.pairs` joins them. A token of kind k is its id + k * the size of the vocabulary
    (`ModelFacts.token_types`), which no other prompt may hold."""

    token_ids: list[int]


Prompt = str | list[int] | TextPrompt | TokensPrompt | PairPrompt | Mapping[str, object]
"""a list holds token ids, a mapping what the typed dictionaries do; `parse_prompt` checks it"""
PromptType = Prompt
"""vLLM's name"""
_NOTHING_ELSE = {"multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"}
"""vLLM's keys, which may be there and empty"""


class ParsedPrompt(msgspec.Struct, frozen=True):
    """`token_ids` None: the text is still to be tokenized."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None
    is_pair: bool = False


class AdmittedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that can be served: `message` is what the core is told, `message.request_ids[i]` what it calls sample
    `i`. `prompt_token_ids` are the tokenizer's, also of a pair."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    message: AddRequest


def parse_prompt(prompt: Prompt) -> ParsedPrompt:
    """Sort out the accepted shapes. Raises `InvalidRequestError` for any other."""
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, None, None)
    if isinstance(prompt, PairPrompt):
        return ParsedPrompt(None, prompt.token_ids, None, is_pair=True)
    if _are_token_ids(prompt):
        return ParsedPrompt(None, list(prompt), None)
    if not isinstance(prompt, Mapping) or not ("prompt" in prompt or "prompt_token_ids" in prompt):
        raise InvalidRequestError(
            'a prompt is a string, a list of token ids, {"prompt": str} or {"prompt_token_ids": list of int}, '
            f"got {type(prompt).__name__}",
            "prompt",
        )
    empty = {key for key in _NOTHING_ELSE if not prompt.get(key)}
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"} - empty
    if unknown:
        raise InvalidRequestError(f"a prompt has no key {min(map(str, unknown))!r}", "prompt")
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"prompt must be a string, got {type(text).__name__}", "prompt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidRequestError("cache_salt must be a string that is not empty", "cache_salt")
    if ids is None:
        return ParsedPrompt(text, None, salt)
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise InvalidRequestError("prompt_token_ids must be a list of token ids", "prompt")
    return ParsedPrompt(text, list(ids), salt)


def parse_prompts(prompts: Prompt | Sequence[Prompt]) -> list[ParsedPrompt]:
    """One, or a list of them."""
    if isinstance(prompts, str | Mapping | PairPrompt) or (prompts and _are_token_ids(prompts)):
        return [parse_prompt(prompts)]
    if not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts must be one prompt or a list of them, got {type(prompts).__name__}", "prompt"
        )
    return [parse_prompt(prompt) for prompt in prompts]  # type: ignore[arg-type]  # the others are refused there


@contextmanager
def naming_prompt(index: int, count: int) -> Iterator[None]:
    """Of several prompts, the one at fault."""
    try:
        yield
    except InvalidRequestError as error:
        if count == 1:
            raise
        raise InvalidRequestError(f"prompt {index}: {error}", error.field, error.code) from error


def _are_token_ids(prompt: object) -> TypeGuard[list[int]]:
    """By the first of them; admission looks at the others."""
    return isinstance(prompt, (list, tuple)) and (not prompt or type(prompt[0]) is int)


def default_sampling_params(generation_defaults: Mapping[str, bool | int | float]) -> SamplingParams:
    """What is used where the caller gives no parameters: what the model's authors recommend, else our defaults, as
    vLLM."""
    given: dict[str, bool | int | float] = {
        name: generation_defaults[name]
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if name in generation_defaults
    }
    if "max_new_tokens" in generation_defaults:
        given["max_tokens"] = generation_defaults["max_new_tokens"]
    return msgspec.convert(given, SamplingParams)


class Admission:
    """Checks and translates requests for one model.

    Samples of a seeded request take seed, seed + 1, …; requests without a seed draw theirs from a generator that
    starts at the engine's `seed`, so that an offline run with the same prompts in the same order repeats itself, as
    vLLM's does.
    """

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, *, generates_not: str = "", front_end: int = 0
    ) -> None:
        """`generates_not`: why this model generates nothing; empty: it does. `front_end`: of several before the same
        cores; what it calls a sequence no other one does."""
        self._generates_not = generates_not
        self._tokenizer = tokenizer
        self._vocab_size = config.model.vocab_size
        self._fed_ids = config.scheduler.vocab_size
        self._max_model_len = config.model.max_model_len
        self._max_logprobs = config.max_logprobs
        self._policy = config.scheduler.policy
        self._limits: Limits = config.limits
        self._transfer = config.kv_transfer
        self._serves_adapters = config.lora is not None
        eos = set(config.model.eos_token_ids)
        if tokenizer.eos_token_id is not None:
            eos.add(tokenizer.eos_token_id)
        self.eos_token_ids = frozenset(eos)
        self._serial = itertools.count(front_end << 48)
        self._seeds = random.Random(config.model.seed + front_end)

    def admit(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: Tenant = NOBODY,
        cache_salt: str | None = None,
        pin: str | None = None,
        wait_s: float | None = None,
        bad_words: list[list[int]] | None = None,
        grammar: str | None = None,
        pooling: Pooling | None = None,
        is_pair: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> AdmittedRequest:
        """Raises `InvalidRequestError` naming the field at fault; changes nothing then.

        `wait_s`: how long it may wait for its turn. `bad_words`: what `spellings` gives for them as token ids; None:
        they are tokenized here. `grammar`: what `GrammarChecks` makes of `structured_outputs`. `pooling`: what is
        wanted in place of tokens. `is_pair`: the ids are a `PairPrompt`'s.
        """
        if self._generates_not and pooling is None and pin is None:
            raise InvalidRequestError(self._generates_not, "model")
        self._check_prompt(prompt_token_ids, pooling is None, self._fed_ids if is_pair else self._vocab_size)
        self.check_params(params)
        self._check_place(request_id, priority, cache_salt, lora_request)
        self._check_tenant(tenant)
        max_tokens = self._max_tokens(len(prompt_token_ids), params) if pooling is None else 1
        if bad_words is None:
            bad_words = [self._tokenizer.encode(text, add_special_tokens=False) for text in spellings(params)]
        template = self._row_params(params, bad_words)
        if pooling is not None:
            template = msgspec.structs.replace(template, pooling=pooling)
        first, *others = self._samples(request_id, params)
        message = AddRequest(
            request_id=first.request_id,
            prompt_token_ids=prompt_token_ids,
            params=msgspec.structs.replace(template, seed=first.seed),
            max_tokens=max_tokens,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            followers=others,
            grammar=grammar,
            beams=_beams(params),
            pin=pin,
            wait_s=wait_s,
            kv_transfer=self._kv_transfer(params),
            lora_request=lora_request,
        )
        return AdmittedRequest(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=[token % self._vocab_size for token in prompt_token_ids] if is_pair else prompt_token_ids,
            params=params,
            message=message,
        )

    def _samples(self, request_id: str, params: SamplingParams) -> list[Follower]:
        base = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        serial = next(self._serial)  # a client may use an id again while the old one's last outputs are on their way
        count = params.n if params.use_beam_search else params.num_samples
        return [Follower(request_id=f"{request_id}:{serial}:{i}", seed=_seed_of(base, i)) for i in range(count)]

    def _check_place(self, request_id: str, priority: int, cache_salt: str | None, adapter: LoRARequest | None) -> None:
        """Among other requests."""
        if adapter is not None:
            check_adapter(adapter, self._serves_adapters, self._limits)
        self._limits.check("name_chars", len(request_id), "request_id")
        self._limits.check("cache_salt_chars", len(cache_salt or ""), "cache_salt")
        RANGES["priority"].check("priority", priority)
        if priority != 0 and self._policy == "fcfs":
            raise InvalidRequestError(
                "priority has no effect under scheduling_policy='fcfs'; start the engine with 'priority'", "priority"
            )

    def _check_tenant(self, tenant: Tenant) -> None:
        self._limits.check("name_chars", len(tenant.name), "tenant")
        RANGES["weight"].check("weight", tenant.weight)

    def _kv_transfer(self, params: SamplingParams) -> KVTransferParams | None:
        """Raises `InvalidRequestError` where this engine has no such role."""
        asked, config = params.kv_transfer, self._transfer
        if asked is None:
            return None
        if config is None or not (config.produces if asked.do_remote_decode else config.consumes):
            what = "computes prompts for no other engine" if asked.do_remote_decode else "takes prompts from none"
            raise InvalidRequestError(f"{FIELD}: this engine {what} (--kv-transfer-config)", FIELD)
        return asked

    def truncated(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """What of a prompt `truncate_prompt_tokens` keeps."""
        kept = params.truncate_prompt_tokens
        return token_ids if kept is None else token_ids[-(self._max_model_len - 1 if kept == -1 else kept) :]

    def _check_prompt(self, token_ids: list[int], generates: bool, size: int) -> None:
        """`size`: ids are below it."""
        if not token_ids:
            raise InvalidRequestError("the prompt is empty: it must hold at least one token", "prompt")
        if len(token_ids) + generates > self._max_model_len:  # first: what is longer is not even looked at
            raise too_many_tokens(len(token_ids), self._max_model_len, "prompt", generates=generates)
        if not all(type(t) is int for t in token_ids):
            raise InvalidRequestError("prompt_token_ids must be integers", "prompt")
        check_token_ids("prompt", token_ids, size)

    def check_params(self, params: SamplingParams) -> None:
        """Raises `InvalidRequestError` for what this model or these limits do not allow."""
        _check_counts(self._limits, params)
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(params, field)
            if value is not None and value > self._max_logprobs:
                raise InvalidRequestError(
                    f"{field} is {value}; at most {self._max_logprobs} are given (setting max_logprobs)", field
                )
        allowed = params.allowed_token_ids or ()
        if len(allowed) > self._vocab_size:
            raise InvalidRequestError(
                f"allowed_token_ids: {len(allowed)} ids; the vocabulary has {self._vocab_size}", "allowed_token_ids"
            )
        check_token_ids("allowed_token_ids", allowed, self._vocab_size)
        check_token_ids("stop_token_ids", params.stop_token_ids or (), self._vocab_size)
        check_token_ids("logit_bias", params.logit_bias or (), self._vocab_size)
        if params.stop_strings and not params.detokenize:
            raise InvalidRequestError("stop compares text: it needs detokenize=True", "stop")
        if params.use_beam_search:
            stops = len(set(params.stop_token_ids or ())) + len(self.eos_token_ids)
            self._limits.check("beam_candidates", candidates_of(params.num_samples, stops), "best_of")

    def _max_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        room = self._max_model_len - prompt_len
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but after {prompt_len} prompt tokens only {room} fit "
                f"(max_model_len is {self._max_model_len})",
                "min_tokens",
            )
        return room if params.max_tokens is None else min(params.max_tokens, room)

    def _row_params(self, params: SamplingParams, bad_words: Iterable[list[int]]) -> RowParams:
        stop_ids = set(params.stop_token_ids or ())
        if not params.ignore_eos or params.structured_outputs is not None:  # nothing can follow the end of a grammar
            stop_ids |= self.eos_token_ids
        allowed = params.allowed_token_ids
        return RowParams(
            seed=0,
            temperature=0.0 if params.greedy else params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=dict(params.logit_bias or {}),
            allowed_token_ids=None if allowed is None else sorted(set(allowed)),
            bad_words=[list(word) for word in dict.fromkeys(tuple(word) for word in bad_words if word)],
            min_tokens=params.min_tokens,
            stop_token_ids=sorted(stop_ids),
            logprobs=0 if params.logprobs is None and params.chooses else params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )


def _check_counts(limits: Limits, params: SamplingParams) -> None:
    stops, words = params.stop_strings, params.bad_words or []
    limits.check("stop_strings", len(stops), "stop")
    limits.check("stop_string_chars", max(map(len, stops), default=0), "stop")
    limits.check("stop_strings_chars", sum(map(len, stops)), "stop")
    limits.check("stop_token_ids", len(params.stop_token_ids or ()), "stop_token_ids")
    limits.check("bad_words", len(words), "bad_words")
    limits.check("bad_word_chars", max(map(len, words), default=0), "bad_words")
    limits.check("bad_words_chars", sum(map(len, words)), "bad_words")
    limits.check("logit_bias", len(params.logit_bias or ()), "logit_bias")


def spellings(params: SamplingParams) -> list[str]:
    """Each bad word as it is written at the start of a text and inside of one (after a space)."""
    return [text for word in params.bad_words or () for text in (word.lstrip(), " " + word.lstrip())]


PROMPT_ONLY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
"""of requests that compute their prompt, to pin it or to pool it"""


def _beams(params: SamplingParams) -> BeamParams | None:
    if not params.use_beam_search:
        return None
    penalty, stopping = params.length_penalty, params.early_stopping
    return BeamParams(width=params.num_samples, length_penalty=penalty, early_stopping=stopping)


def _seed_of(base: int, index: int) -> int:
    """Of sample `index`: wrapped into the signed 64 bits in which the device keeps seeds."""
    return (base + index + 2**63) % 2**64 - 2**63
