"""OpenAI's two spellings of log-probabilities: four parallel lists for completions, a list of objects for chat; and
vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.request import Logprob, LogprobsAt
from entrypoints.server.token_text import TextOffsets, TokenTexts


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


PromptLogprobs = list[LogprobsAt | None]


def _finite(value: float) -> float:
    """JSON has no infinities: -9999.0 is OpenAI's floor for them."""
    return max(value, -9999.0)


class CompletionScores:
    """The `logprobs` of one choice, whole or chunk by chunk."""

    def __init__(self, texts: TokenTexts, top: int, *, skip_special_tokens: bool) -> None:
        self._texts, self._top = texts, top
        self._offsets = TextOffsets(texts, skip_special_tokens=skip_special_tokens)

    def next(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[LogprobsAt],
        echoed: tuple[str, Sequence[int], Sequence[LogprobsAt | None]] | None = None,
    ) -> CompletionLogprobs:
        """The lists for the tokens that follow those already given. `echoed`: the prompt's text, token ids and scores
        go first; a token without a score, as the first of a prompt, has null for both of its numbers."""
        out = CompletionLogprobs([], [], [], [])
        if echoed is not None:
            prompt, prompt_ids, scores = echoed
            for token_id, score in zip(prompt_ids, scores, strict=True):
                self._append(out, token_id, score, self._offsets.prompt_token(token_id, prompt))
        for token_id, at in zip(token_ids, logprobs, strict=True):
            self._append(out, token_id, at, self._offsets.generated_token(token_id))
        return out

    def _append(self, out: CompletionLogprobs, token_id: int, at: LogprobsAt | None, offset: int) -> None:
        out.text_offset.append(offset)
        out.tokens.append(self._texts.text(token_id))
        out.token_logprobs.append(None if at is None else _finite(at[token_id].logprob))
        out.top_logprobs.append(None if at is None else self._alternatives(token_id, at))

    def _alternatives(self, token_id: int, at: LogprobsAt) -> dict[str, float]:
        """The `top` most likely tokens and the token itself, by text; of tokens with one text the likeliest counts."""
        found: dict[str, float] = {}
        for other, entry in _most_likely(at, self._top):
            found.setdefault(self._texts.text(other), _finite(entry.logprob))
        found.setdefault(self._texts.text(token_id), _finite(at[token_id].logprob))
        return found


def _most_likely(at: LogprobsAt, top: int) -> list[tuple[int, Logprob]]:
    return sorted(at.items(), key=lambda item: -item[1].logprob)[:top]


def chat_logprobs(
    texts: TokenTexts, token_ids: Sequence[int], logprobs: Sequence[LogprobsAt], top: int
) -> ChatLogprobs:
    """`bytes` are the token's own, so that a client can join those of a character spread over tokens."""
    content = []
    for token_id, at in zip(token_ids, logprobs, strict=True):
        alternatives = [
            TopLogprob(texts.text(i), list(texts.data(i)), _finite(e.logprob)) for i, e in _most_likely(at, top)
        ]
        chosen = _finite(at[token_id].logprob)
        content.append(ChatLogprob(texts.text(token_id), list(texts.data(token_id)), chosen, alternatives))
    return ChatLogprobs(content)


def prompt_logprobs(scores: PromptLogprobs, top: int) -> PromptLogprobs:
    """One entry per prompt token (null for the first): token id → its score, for the token and the `top` likeliest."""
    shown: PromptLogprobs = []
    for at in scores:
        if at is None:
            shown.append(None)
            continue
        token = next(iter(at))  # the token in question goes first
        kept = {token: at[token], **dict(_most_likely(at, top))}
        shown.append({i: Logprob(_finite(e.logprob), e.rank, e.decoded_token) for i, e in kept.items()})
    return shown
