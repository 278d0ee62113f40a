"""Every bound on what a client may send or hold, in one place: its default, its flag and the words it is refused with.

`RANGES` are the values that a parameter may take; they are the same everywhere. `Limits` are sizes, counts and times,
which whoever serves may set: ``--limit NAME=VALUE`` at every door, ``limits`` in `EngineArgs`. `docs/limits.md` is
written from both (`tools/write_limits.py`), and a test keeps it equal.

What follows from the model and the machine instead (context length, vocabulary, rows, KV blocks) is refused by
`engine.frontend.admission` and `engine.core.frame_checks`, and what was set once by `engine.resolve`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, NamedTuple, NoReturn, get_args, get_type_hints

import msgspec

from engine.errors import ConfigError, InvalidRequestError
from engine.sizes import parse_size

MAX_WAITING = 4096
"""sequences that may wait in the core; its flag is --max-waiting"""
MOST = {"max_num_seqs": 2**16, "max_num_batched_tokens": 2**22, "max_waiting": 2**24, "threads": 4096}
"""of settings for which arrays are made when an engine starts, whatever it serves"""
MAX_RANKS = 64
"""that compute one model together"""
MAX_REPLICAS = 64
"""of a model behind one front end"""
MAX_FRONT_ENDS = 64
"""processes that take requests for the same cores; its flag is --api-server-count"""
MAX_LOGPROBS = 20
"""alternatives of a token; its flag is --max-logprobs"""


class Range(NamedTuple):
    """Closed at both ends, or open at the lower one."""

    low: float
    high: float
    open_low: bool = False

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low}, {self.high}]"

    def holds(self, value: float) -> bool:
        """False for NaN."""
        return (self.low < value if self.open_low else self.low <= value) and value <= self.high

    def check(self, name: str, value: float) -> None:
        """Raises `InvalidRequestError`."""
        if not isinstance(value, (int, float)):
            raise InvalidRequestError(f"{name} must be a number, got {type(value).__name__}", name)
        if not self.holds(value):
            raise InvalidRequestError(f"{name} must be in {self}, got {value}", name)


RANGES = {
    "n": Range(1, 128),
    "best_of": Range(1, 128),
    "temperature": Range(0.0, 100.0),
    "top_p": Range(0.0, 1.0, open_low=True),
    "top_k": Range(-1, 2**31 - 1),
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(0.01, 100.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "length_penalty": Range(-100.0, 100.0),
    "logit_bias": Range(-100.0, 100.0),
    "seed": Range(-(2**63), 2**63 - 1),
    "priority": Range(-(2**63), 2**63 - 1),
    "weight": Range(0.001, 1000.0),
    "max_tokens": Range(1, 2**31 - 1),
    "min_tokens": Range(0, 2**31 - 1),
    "logprobs": Range(0, 2**31 - 1),
    "prompt_logprobs": Range(0, 2**31 - 1),
}


def _limit(what: str, low: float = 1, status: int = 400) -> msgspec.Meta:
    """`status`: of the HTTP answer to what exceeds it."""
    return msgspec.Meta(ge=low, description=what, extra={"status": status})


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Names end in their unit where it is not a count. `check` refuses what exceeds one."""

    # A connection and its request, before the engine sees anything.
    connections: Annotated[int, _limit("open connections; the longest silent one gives way to a new one", 1, 503)] = (
        16384
    )
    header_bytes: Annotated[int, _limit("bytes of a request line and its headers", 256, 431)] = 64 * 1024
    headers: Annotated[int, _limit("headers of a request", 8, 431)] = 128
    header_timeout_s: Annotated[float, _limit("seconds until a request's headers are complete", 0.1, 408)] = 20.0
    body_bytes: Annotated[int, _limit("bytes of a request's body", 1, 413)] = 32 * 1024 * 1024
    bodies_bytes: Annotated[int, _limit("bytes of all bodies under way; the longest one gives way", 1, 503)] = (
        96 * 1024 * 1024
    )
    body_timeout_s: Annotated[float, _limit("seconds until a request's body is complete", 0.1, 408)] = 60.0
    read_timeout_s: Annotated[float, _limit("seconds in which a client that is behind reads 64 KiB", 0.1, 408)] = 60.0
    drained_bodies: Annotated[
        int, _limit("times body_bytes that are read and dropped behind an early answer, so that its client gets to it")
    ] = 8
    chunk_framing: Annotated[
        int, _limit("bytes of chunked framing for a byte of a body; one-byte chunks cost five")
    ] = 8
    json_depth: Annotated[int, _limit("levels of nesting in a request's JSON")] = 128
    json_values: Annotated[int, _limit("values in a request's JSON, as its commas and brackets tell")] = 1 << 20
    pipelined: Annotated[
        int,
        _limit("requests that wait on a connection behind the one being answered; turns under way on a WebSocket", 0),
    ] = 16
    websockets: Annotated[int, _limit("open WebSockets; the longest silent one gives way to a new one", 0, 503)] = 256
    websocket_bytes: Annotated[int, _limit("bytes of a WebSocket's message", 1024)] = 4 * 1024 * 1024
    websocket_s: Annotated[float, _limit("seconds until a WebSocket takes no further turn", 0.1)] = 3600.0
    keep_alive_s: Annotated[float, _limit("seconds that a connection is kept open between requests", 0.1, 408)] = 60.0

    # What one request may hold.
    prompts: Annotated[int, _limit("prompts in one body")] = 2048
    messages: Annotated[int, _limit("messages of a conversation")] = 4096
    calls: Annotated[int, _limit("calls of tools in a conversation")] = 4096
    tools: Annotated[int, _limit("tools of a conversation")] = 512
    files: Annotated[int, _limit("other files that are told of beside a gap to fill in")] = 256
    response_fields: Annotated[int, _limit("fields that an answer is to be cut to")] = 64
    stop_strings: Annotated[int, _limit("stop strings of a request")] = 64
    stop_string_chars: Annotated[int, _limit("characters of a stop string")] = 1024
    stop_strings_chars: Annotated[int, _limit("characters of all stop strings of a request")] = 8192
    stop_token_ids: Annotated[int, _limit("stop token ids of a request")] = 256
    bad_words: Annotated[int, _limit("bad words of a request")] = 1024
    bad_word_chars: Annotated[int, _limit("characters of a bad word")] = 256
    bad_words_chars: Annotated[int, _limit("characters of all bad words of a request")] = 16384
    logit_bias: Annotated[int, _limit("entries of a request's logit_bias")] = 4096
    cache_salt_chars: Annotated[int, _limit("characters of a cache salt")] = 1024
    name_chars: Annotated[int, _limit("characters of a request id, and of a pinned prefix's name")] = 256
    pinned_prefixes: Annotated[int, _limit("prefixes that are pinned at a time")] = 1024
    lora_modules: Annotated[int, _limit("adapters that a server lists at a time")] = 4096
    beam_candidates: Annotated[int, _limit("candidates that each beam of a search brings, which stop tokens raise")] = (
        2048
    )
    template_chars: Annotated[int, _limit("characters of a chat template that a caller gives")] = 262144
    template_output_factor: Annotated[
        int, _limit("a rendered conversation may have so many times the characters that the context could hold")
    ] = 2

    template_bytes: Annotated[int, _limit("bytes of memory for rendering a chat template", 64 * 1024 * 1024)] = (
        512 * 1024 * 1024
    )
    tokenize_bytes: Annotated[int, _limit("bytes of memory for tokenizing a long text", 256 * 1024 * 1024)] = (
        4 * 1024 * 1024 * 1024
    )
    grammar_chars: Annotated[int, _limit("characters of structured_outputs, as JSON")] = 262144
    choices: Annotated[int, _limit("choices of structured_outputs")] = 16384
    grammar_bytes: Annotated[int, _limit("bytes of memory for checking a grammar", 64 * 1024 * 1024)] = (
        1024 * 1024 * 1024
    )
    grammars: Annotated[int, _limit("compiled grammars that are kept for later requests")] = 256
    grammars_bytes: Annotated[int, _limit("bytes of the texts of grammars that are remembered as checked", 0)] = (
        4 * 1024 * 1024
    )
    stored_responses_bytes: Annotated[
        int, _limit("bytes of responses that can be asked for again; the longest unused go first", 0)
    ] = 64 * 1024 * 1024
    continued_bytes: Annotated[int, _limit("bytes of stored items that a request goes on from")] = 8 * 1024 * 1024
    continued_values: Annotated[int, _limit("JSON values of stored items that a request goes on from")] = 1 << 17
    stored_responses_s: Annotated[float, _limit("seconds for which an unused response is stored", 0)] = 86400.0
    contexts_translated: Annotated[
        int, _limit("contexts that a text may fill, or a list of ids, which is only tokenized, or detokenized")
    ] = 4

    # What all requests together may hold, and how long they may take.
    template_s: Annotated[float, _limit("seconds for rendering a chat template", 0.05)] = 2.0
    grammar_s: Annotated[float, _limit("seconds for checking a grammar", 0.05)] = 2.0
    tokenize_s: Annotated[float, _limit("seconds for tokenizing a text", 0.05)] = 30.0
    waiting_s: Annotated[float, _limit("seconds that a request sent to a server waits for its turn", 0.1, 503)] = 600.0
    silence_s: Annotated[
        float,
        _limit(
            "seconds without an event, after which a stream says that its request is alive: with its headers, then "
            "with comments (streams of lines, as Ollama's, have none)",
            0.01,
        ),
    ] = 15.0
    profile_steps: Annotated[int, _limit("steps of a profile")] = 100
    kv_leases: Annotated[int, _limit("prompts that wait for another engine to read them; older ones give way")] = 256
    kv_lease_s: Annotated[float, _limit("seconds that a prompt waits for another engine to read it", 0.05)] = 120.0
    kv_fetch_s: Annotated[
        float, _limit("seconds for a prompt's pages to come from another engine; then it is computed here", 0.05)
    ] = 10.0
    frames: Annotated[int, _limit("messages under way between front end and core, each way", 16, 503)] = 65536

    def check(self, name: str, value: float, field: str | None = None) -> None:
        """Raises `InvalidRequestError` for `field` where `value` exceeds the limit `name`."""
        if value > getattr(self, name):
            self.refuse(name, value, field)

    def refuse(self, name: str, value: float | None = None, field: str | None = None) -> NoReturn:
        """Raises the `InvalidRequestError` of that limit; `value`: what was sent, where it is known."""
        raise InvalidRequestError(self.message(name, value, field), field)

    def message(self, name: str, value: float | None = None, field: str | None = None) -> str:
        """What a client is told."""
        limit = plain(getattr(self, name))
        got = "" if value is None else f", got {plain(value)}"
        where = f"{field}: " if field else ""
        return f"{where}at most {limit} {about(name).what}{got} (--limit {name}={limit})"


class About(NamedTuple):
    """Of one field of `Limits`."""

    what: str
    status: int


def about(name: str) -> About:
    """`name`: of a field of `Limits`."""
    meta = next(m for m in get_args(_HINTS[name]) if isinstance(m, msgspec.Meta))
    return About(str(meta.description), int((meta.extra or {})["status"]))


def parse_limits(settings: Iterable[str]) -> Limits:
    """From "name=value" each (values of bytes as "64MiB", too). Raises `ConfigError` naming the setting."""
    given: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in _HINTS:
            raise ConfigError(f"--limit {setting}: write NAME=VALUE with a name of {', '.join(_HINTS)}")
        try:
            given[name] = parse_size(text) if name.endswith("bytes") else float(text)
        except ValueError as error:
            raise ConfigError(f"--limit {setting}: {error}") from None
        if get_args(_HINTS[name])[0] is int:
            if given[name] != given[name] // 1:
                raise ConfigError(f"--limit {setting}: {name} is a whole number")
            given[name] = int(given[name])
    return limits_of(given)


def limits_of(values: Mapping[str, float]) -> Limits:
    """Raises `ConfigError` for a name or a value that no limit has."""
    unknown = set(values) - set(_HINTS)
    if unknown:
        raise ConfigError(f"there is no limit {sorted(unknown)[0]!r}; limits are {', '.join(_HINTS)}")
    try:
        return msgspec.convert(dict(values), Limits)
    except msgspec.ValidationError as error:
        raise ConfigError(f"limits: {error}") from None


def check_token_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises `InvalidRequestError` naming `field` and the first id outside the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(f"{field}: token id {wrong} is outside the vocabulary [0, {vocab_size})", field)


def plain(value: float) -> str:
    """33554432 and 2.5, never 3.4e+07."""
    return str(int(value)) if value == int(value) else str(value)


_HINTS: dict[str, Any] = get_type_hints(Limits, include_extras=True)
