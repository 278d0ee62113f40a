"""Bodies that are wrong, huge or nested, and what each must be answered with."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Case(NamedTuple):
    name: str
    path: str
    body: dict[str, Any] | bytes
    status: int
    param: str | None = None
    """OpenAI's: the field at fault"""


def _completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 1, **fields}


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}


def _nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


def _raw(path_body: dict[str, Any]) -> bytes:
    """With lone surrogates as escapes, as a client sends them."""
    return json.dumps(path_body).encode()


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONE = "a\ud83d"
BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 6, "temperature": 0}

CASES = [
    *(
        Case(f"length_penalty {penalty}", COMPLETIONS, _completion(**BEAMS, length_penalty=penalty), 200)
        for penalty in (-100, 100)
    ),
    Case("never", COMPLETIONS, _completion(**{**BEAMS, "max_tokens": 64}, early_stopping="never"), 200),
    Case("penalty of 5e-324", COMPLETIONS, _completion(repetition_penalty=5e-324), 400, "repetition_penalty"),
    Case("20,000 bad words", COMPLETIONS, _completion(bad_words=[f"w{i}" for i in range(20000)]), 400, "bad_words"),
    Case("a long bad word", COMPLETIONS, _completion(bad_words=["w" * 10**6]), 400, "bad_words"),
    Case("1,000 bad words", COMPLETIONS, _completion(bad_words=[f"w{i}" for i in range(1000)]), 200),
    Case("stop strings", COMPLETIONS, _completion(stop=[str(i) for i in range(1000)]), 400, "stop"),
    Case("a long stop string", COMPLETIONS, _completion(stop="s" * 10**6), 400, "stop"),
    Case("logit_bias", COMPLETIONS, _completion(logit_bias={str(i): 1 for i in range(20000)}), 400, "logit_bias"),
    Case("key of logit_bias", COMPLETIONS, _completion(logit_bias={"1e3": 1}), 400, "logit_bias"),
    Case("stop_token_ids", COMPLETIONS, _completion(stop_token_ids=list(range(1000))), 400, "stop_token_ids"),
    Case("cache_salt", COMPLETIONS, _completion(cache_salt="s" * 10**6), 400, "cache_salt"),
    Case("priority", COMPLETIONS, _completion(priority=2**64), 400, "priority"),
    Case("n", COMPLETIONS, _completion(n=10**9), 400, "n"),
    Case("seed", COMPLETIONS, _completion(seed=2**70), 400, "seed"),
    Case("number of a schema", COMPLETIONS, _completion(guided_json={"minimum": -(2**63) - 1}), 400, "guided_json"),
    Case("prompts", COMPLETIONS, _completion(prompt=["x"] * 5000), 400, "prompt"),
    Case("token ids", COMPLETIONS, _completion(prompt=[2**40]), 400, "prompt"),
    Case("a long text", COMPLETIONS, _completion(prompt="x " * 5_000_000), 400, "prompt"),
    Case("surrogate in prompt", COMPLETIONS, _raw(_completion(prompt=LONE)), 400, "prompt"),
    Case("surrogate in bad_words", COMPLETIONS, _raw(_completion(bad_words=[LONE])), 400, "bad_words"),
    Case("surrogate in stop", COMPLETIONS, _raw(_completion(stop=LONE)), 400, "stop"),
    Case("surrogate in chat", CHAT, _raw(_chat(messages=[{"role": "user", "content": LONE}])), 400, "messages"),
    Case("surrogate in role", CHAT, _raw(_chat(messages=[{"role": LONE, "content": "x"}])), 400, "messages"),
    Case("surrogate in /tokenize", "/tokenize", _raw({"prompt": LONE}), 400, "prompt"),
    Case("surrogate in a pin's name", "/v1/prefixes", _raw({"name": LONE, "prompt": "x"}), 400, "name"),
    Case("nested 600", CHAT, _chat(messages=[{"role": "user", "content": "x", "a": _nested(600)}]), 400),
    Case("nested 100,000", CHAT, b'{"messages": ' + b"[" * 100_000, 400),
    Case("no JSON", CHAT, b"\xff\xfe{", 400),
    Case("echo of 5", CHAT, _chat(messages=[{"role": "assistant", "content": 5}], echo=True), 400, "messages"),
    Case("messages as kwargs", CHAT, _chat(chat_template_kwargs={"messages": 5}), 400, "chat_template_kwargs"),
    Case("messages", CHAT, _chat(messages=[{"role": "user", "content": "x"}] * 20000), 400, "messages"),
    Case("a role of 5", CHAT, _chat(messages=[{"role": 5, "content": "x"}]), 400, "messages"),
    Case("tokens to detokenize", "/detokenize", {"tokens": [5] * 1_000_000}, 400, "tokens"),
    Case("prompt_logprobs of a long prompt", COMPLETIONS, _completion(prompt="x " * 600, prompt_logprobs=5), 200),
]

LOOPS = ("loop", "swell", "repeat")
"""what `server.TEMPLATE` obeys"""


def looping(number: int) -> dict[str, Any]:
    return _chat(messages=[{"role": "user", "content": LOOPS[number % len(LOOPS)]}])
