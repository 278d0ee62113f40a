"""Positions in grammars that xgrammar compiles."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import InvalidRequestError
from engine.grammars.language import FIELD
from engine.grammars.vocabularies import ModelVocabulary
from engine.grammars.xgrammar_language import PREFIX

if TYPE_CHECKING:
    from xgrammar import GrammarCompiler, GrammarMatcher


class XgrammarMatcher:
    __slots__ = ("_ends", "_inner", "_over", "_words")

    def __init__(self, inner: GrammarMatcher, ends: np.ndarray, over: bool = False) -> None:
        """`ends`: a mask of nothing but what ends an output."""
        self._inner = inner
        self._ends = ends
        self._words = len(ends)
        self._over = over

    def advance(self, token: int) -> None:
        if not self._inner.accept_token(token):
            raise InvalidRequestError(f"{FIELD}: token {token} does not match", FIELD)
        self._over = self._inner.is_terminated() or (self._inner.is_completed() and self._only_ends())

    @property
    def is_over(self) -> bool:
        return self._over

    def forced(self) -> list[int]:
        """Nothing: the library would say all that is forced at once, and a small grammar may force more than there is
        memory."""
        return []

    def copy(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._inner.fork(), self._ends, self._over)

    def fill(self, masks: np.ndarray, drafts: list[int]) -> None:
        """`masks`: int32 [1 + drafts, words]; what is behind a draft that is not allowed stays as it is."""
        rows = np.zeros((1, self._words), dtype=np.int32)
        accepted = 0
        try:
            for place, draft in enumerate([*drafts, None]):
                if self._inner.is_terminated():
                    break
                if self._inner.fill_next_token_bitmask(rows):
                    masks[place, : self._words] = rows[0]
                if draft is None or not self._inner.accept_token(draft):
                    break
                accepted += 1
        finally:
            if accepted:
                self._inner.rollback(accepted)

    def _only_ends(self) -> bool:
        rows = np.zeros((1, self._words), dtype=np.int32)
        return bool(self._inner.fill_next_token_bitmask(rows)) and not (rows[0] & ~self._ends).any()


class XgrammarCompiled:
    """As `compiler.Compiled`: one is enough, whose positions share nothing that changes."""

    def __init__(self, base: XgrammarMatcher) -> None:
        self._base = base
        self.started = False

    def start(self) -> XgrammarMatcher:
        self.started = True
        return self._base.copy()


class Xgrammar:
    """Compiles what was checked (`xgrammar_checking`) for the same vocabulary. From any thread."""

    def __init__(self, vocabulary: ModelVocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._ends = np.zeros(0, dtype=np.int32)

    def compile(self, text: str) -> XgrammarCompiled:
        """Raises `InvalidRequestError`, and what the library raises."""
        from xgrammar import Grammar, GrammarCompiler, GrammarMatcher

        with self._lock:
            if self._compiler is None:
                info = self._vocabulary.for_xgrammar()
                self._ends = _mask_of(info.stop_token_ids, self._vocabulary.vocab_size)
                self._compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
        compiled = self._compiler.compile_grammar(Grammar.deserialize_json(text.removeprefix(PREFIX)))
        return XgrammarCompiled(XgrammarMatcher(GrammarMatcher(compiled), self._ends))


def _mask_of(tokens: list[int], vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
