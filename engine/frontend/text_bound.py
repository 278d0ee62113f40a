"""How long a text may be that is tokenized at all: work on what cannot fit is saved, and bounded for what is cut."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from engine.errors import TOO_LONG, InvalidRequestError
from engine.frontend.texts import SHORTENS, check_text, no_tokenizer
from engine.limits import Limits

if TYPE_CHECKING:
    import tokenizers

QUICK_CHARS = 65536
"""a fifth of a second at worst to tokenize, which nobody need interrupt"""


class TextBound:
    """Of one tokenizer: a token has at most so many characters, so what has more than a context's worth of them does
    not fit. (A normalizer may drop characters, so that a longer text would have fitted; it would be mostly nothing.)
    Where one unknown token stands for any number of characters, `QUICK_CHARS` may always come."""

    def __init__(self, backend: tokenizers.Tokenizer, path: str, limits: Limits, max_model_len: int | None) -> None:
        """`path`: where it came from. `max_model_len` None: nothing bounds texts."""
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.reads_texts = _has_words(backend, vocabulary)
        """else transformers made an empty one of a config alone"""
        self._path = path
        self._limits = limits
        self._max_model_len = max_model_len
        longest = max(map(len, vocabulary), default=1)
        self._context = sys.maxsize if max_model_len is None else max_model_len * longest
        self._least = QUICK_CHARS if _joins_unknown(backend) else 0

    def chars(self, contexts: int = 1) -> int:
        """That so many contexts may hold."""
        return min(sys.maxsize, max(contexts * self._context, self._least))

    def check(self, text: str, field: str = "prompt", *, contexts: int = 1, generates: bool = True) -> str:
        """The text. Raises `InvalidRequestError` for one that is too long, and for what is none. `generates`: as of
        `too_many_tokens`."""
        limit = self.chars(contexts)
        if len(self._read(text, field)) <= limit:
            return text
        if contexts > 1:
            flag = f"--limit contexts_translated={self._limits.contexts_translated}"
            told = f"{field}: {len(text)} characters; at most {limit} are tokenized ({flag})"
        else:
            told = (
                f"This model's maximum context length is {self._max_model_len} tokens (max_model_len). However, your "
                f"{field} has {len(text)} characters; at most {limit} are tokenized for it. Please reduce the length "
                f"of the {field}{'' if generates else SHORTENS}."
            )
        raise InvalidRequestError(told, field, TOO_LONG)

    def cut(self, text: str, field: str = "prompt", *, keep_end: bool = False) -> str:
        """Of a text whose tokens are truncated to a context at most, whatever its length: what is tokenized, several
        contexts' worth from its start or its end. Raises `InvalidRequestError` for what is no text."""
        limit = max(self.chars(self._limits.contexts_translated), QUICK_CHARS)
        if len(self._read(text, field)) <= limit:
            return text
        return text[-limit:] if keep_end else text[:limit]

    def _read(self, text: str, field: str) -> str:
        if not self.reads_texts:
            raise InvalidRequestError(f"{field}: {no_tokenizer(self._path)}; give token ids", field)
        return check_text(text, field)


def _has_words(backend: tokenizers.Tokenizer, vocabulary: Iterable[str]) -> bool:
    """Whether there is a token that is not special. Unigram's empty ones have the mark of a space."""
    special = {token.content for token in backend.get_added_tokens_decoder().values()} | {"\u2581"}
    return any(word not in special and word[:1] + word[-1:] not in ("<>", "[]") for word in vocabulary)


def _joins_unknown(backend: tokenizers.Tokenizer) -> bool:
    """Whether one token may stand for a word, or a run of characters, that the vocabulary does not have."""
    kind = type(backend.model).__name__
    return kind in ("WordPiece", "WordLevel", "Unigram") or (kind == "BPE" and bool(backend.model.fuse_unk))
