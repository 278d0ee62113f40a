"""OpenAI's two spellings of log-probabilities: four parallel lists for completions, a list of objects for chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from engine.request import Logprob, LogprobsAt


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(msgspec.Struct):
    token: str
    bytes: list[int]
    logprob: float


class ChatLogprob(msgspec.Struct):
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


def _text(token_id: int, entry: Logprob) -> str:
    return entry.decoded_token if entry.decoded_token is not None else f"token_id:{token_id}"


def _finite(value: float) -> float:
    """JSON has no infinities: -9999.0 is OpenAI's floor for them."""
    return max(value, -9999.0)


def completion_logprobs(
    tokens: Sequence[tuple[int, LogprobsAt | None]], top: int, offset: int
) -> tuple[CompletionLogprobs, int]:
    """(lists for `tokens`, text offset after them). A token that has no log-probability, as the first of a prompt, gets
    None."""
    out = CompletionLogprobs([], [], [], [])
    for token_id, at in tokens:
        entry = at[token_id] if at else None
        text = _text(token_id, entry) if entry else ""
        out.text_offset.append(offset)
        out.tokens.append(text)
        out.token_logprobs.append(_finite(entry.logprob) if entry else None)
        out.top_logprobs.append({_text(i, e): _finite(e.logprob) for i, e in _top(at, top)} if at else None)
        offset += len(text)
    return out, offset


def _top(at: LogprobsAt, top: int) -> Iterable[tuple[int, Logprob]]:
    """The `top` most likely entries; the chosen token, first in `at`, is counted once and only if it is among them."""
    return sorted(at.items(), key=lambda item: -item[1].logprob)[:top]


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[LogprobsAt], top: int) -> ChatLogprobs:
    content = []
    for token_id, at in zip(token_ids, logprobs):
        chosen = at[token_id]
        text = _text(token_id, chosen)
        alternatives = [
            TopLogprob(_text(i, e), list(_text(i, e).encode()), _finite(e.logprob)) for i, e in _top(at, top)
        ]
        content.append(ChatLogprob(text, list(text.encode()), _finite(chosen.logprob), alternatives))
    return ChatLogprobs(content)
