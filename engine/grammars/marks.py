"""Marks of a model's own (a call begins, thinking ends) as llguidance's Lark writes them: a special token by its id,
all else as text, however it is tokenized."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Marks:
    """Of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """None: it has no special tokens."""
        added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: number for number, token in added.items() if token.special and token.content}
        self._tokens = {token.content: number for number, token in added.items() if token.content}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if self._ids else None

    def lark(self, text: str) -> str:
        """An expression that matches it; "" for nothing."""
        parts = []
        at = 0
        for found in self._special.finditer(text) if self._special is not None else ():
            parts += [_quoted(text[at : found.start()]), f"<[{self._ids[found.group()]}]>"]
            at = found.end()
        return " ".join(part for part in (*parts, _quoted(text[at:])) if part)

    def first_token(self, text: str) -> tuple[int, str, str] | None:
        """The added token that it begins with, special or not: its id, its text, and what follows."""
        found = max((mark for mark in self._tokens if text.startswith(mark)), key=len, default=None)
        return None if found is None else (self._tokens[found], found, text[len(found) :])

    def has_special(self, text: str) -> bool:
        return self._special is not None and self._special.search(text) is not None

    def begins_special(self, text: str) -> bool:
        return self._special is not None and self._special.match(text) is not None

    def split_before_special(self, text: str) -> tuple[str, str]:
        found = self._special.search(text) if self._special is not None else None
        at = len(text) if found is None else found.start()
        return text[:at], text[at:]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


PLAIN = Marks(None)
