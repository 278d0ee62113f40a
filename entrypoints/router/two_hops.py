"""One request over two servers: the first computes its prompt, the second takes that over and answers. Whatever the
first one cannot do, the second does alone."""

from __future__ import annotations

from typing import Any

import msgspec

from entrypoints.router.servers import CHARACTERS_A_TOKEN

ROUTES = frozenset({"/v1/completions", "/v1/chat/completions"})
"""whose prompts may be computed elsewhere; all others go to a decode server as they are"""
_ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_OF_THE_ANSWER = ("stream_options", "min_tokens", "best_of", "n", "logprobs", "top_logprobs", "use_beam_search")


class _Handed(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


class RefusedError(Exception):
    """What the client is told."""


def over_two_servers(path: str, given: object) -> dict[str, Any] | None:
    """The parsed body of a request that may go over two servers; None: it goes to one. Raises `RefusedError` where a
    client says itself where keys and values are, on any route: a decode server connects to that place, and keeps what
    it gets for all."""
    if not isinstance(given, dict):
        return None
    if given.get("kv_transfer_params"):
        raise RefusedError("kv_transfer_params are what this router tells its servers: leave them out")
    if path not in ROUTES:
        return None
    several = isinstance(given.get("prompt"), list) and len(given["prompt"]) > 0 and not _are_ids(given["prompt"])
    alone = ("prompt_logprobs", "echo", "suffix", "use_beam_search")  # the second server computes the prompt anyway
    return None if several or any(given.get(name) for name in alone) else given


def prefill_body(given: dict[str, Any]) -> bytes:
    body = {name: value for name, value in given.items() if name not in _OF_THE_ANSWER}
    body.update(stream=False, max_tokens=1, kv_transfer_params=_ASKED)
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = 1
    return msgspec.json.encode(body)


def takes_one_token(given: dict[str, Any]) -> bool:
    """Whoever computes the prompt has the answer."""
    limits = [given.get("max_tokens"), given.get("max_completion_tokens")]
    return 1 in limits and all(limit in (None, 1) for limit in limits)


def decode_body(given: dict[str, Any], answer: bytes) -> bytes | None:
    """With what the first server answered; None where it has handed nothing over."""
    try:
        params = msgspec.json.decode(answer, type=_Handed).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return None if params is None else msgspec.json.encode({**given, "kv_transfer_params": params})


def about_tokens(body: bytes) -> int:
    return len(body) // CHARACTERS_A_TOKEN + 1


def _are_ids(prompt: list[Any]) -> bool:
    return isinstance(prompt[0], int)
