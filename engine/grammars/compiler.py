"""Grammars compiled with llguidance, in threads of their own (`threads`) where the core must not wait for them.

A compiled one is kept while there is room. Outputs start from copies, which share what it has learnt, and a lock:
threads that fill masks side by side need a grammar compiled as often as there are threads, if several requests have it.
All that it may cost is bounded (`language.parser_limits`), and it was checked before in a process that could be ended
(`checking`): the threads are not in danger.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.core.wire import Vocabulary
from engine.errors import InvalidRequestError
from engine.grammars.filling import MaskFiller
from engine.grammars.interface import Matcher
from engine.grammars.language import FIELD, first_line, parser_limits
from engine.grammars.threads import Threads
from engine.grammars.vocabularies import ModelVocabulary
from engine.grammars.xgrammar_language import PREFIX, reason_of
from engine.grammars.xgrammar_matcher import Xgrammar, XgrammarCompiled, XgrammarMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from engine.executor.team import Team

logger = logging.getLogger(__name__)

_MOST_BASES = 4
_MOST_RENEWAL_S = 0.01
"""of compiling while a step waits"""
_LONG_LOOK_S = 0.001
_REST = 16
"""tokens for which what is forced is not looked for, after a long look that found nothing"""
_MOST_FORCED = 64
"""tokens that are told at a time"""
_SHARES = itertools.count()
_EVERYTHING = -1
"""32 tokens that are allowed"""


class LlguidanceMatcher:
    __slots__ = ("_forced", "_look_from", "inner", "share", "source", "tokens")

    def __init__(self, inner: LLMatcher, share: int, source: _Compiled, tokens: list[int]) -> None:
        """`share`: what has the same number shares a lock, and what was learnt. `tokens`: those behind it."""
        self.inner = inner
        self.share = share
        self.source = source
        self.tokens = tokens
        self._forced: list[int] = []
        """the last first: what was found to be forced, and has not come yet. A long text is tokenized once."""
        self._look_from = 0
        """tokens; before, what is forced is not looked for, since that took long and found nothing"""

    def advance(self, token: int) -> None:
        if not self.inner.consume_token(token) and not (self.renew() and self.inner.consume_token(token)):
            reason = first_line(self.inner.get_error())
            raise InvalidRequestError(f"{FIELD}: token {token} does not match: {reason}", FIELD)
        self.tokens.append(token)
        if self._forced and self._forced.pop() != token:
            self._forced = []

    @property
    def is_over(self) -> bool:
        return self.inner.is_stopped()

    def forced(self) -> list[int]:
        if not self._forced and len(self.tokens) >= self._look_from:
            began = time.thread_time()
            self._forced = self.inner.compute_ff_tokens()[::-1]
            if not self._forced and time.thread_time() - began > _LONG_LOOK_S:
                self._look_from = len(self.tokens) + _REST
        return self._forced[: -_MOST_FORCED - 1 : -1]

    def copy(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self.inner.deep_copy(), self.share, self.source, self.tokens.copy())

    def renew(self) -> bool:
        """What all outputs have learnt together has a bound: the same position in a new compilation. False where the
        grammar itself is why it failed, or compiling it would keep the others waiting."""
        base = self.source.again(self.share)
        if base is None:
            return False
        self.inner, self.share = base.inner.deep_copy(), base.share
        return self.inner.consume_tokens(self.tokens)


class _Asked(NamedTuple):
    """One output whose masks are filled."""

    matcher: LlguidanceMatcher
    place: int
    """of the first mask; those behind drafts follow"""
    drafts: list[int]


class _Compiled:
    """One grammar, as often as threads fill masks of it."""

    def __init__(self, make: Callable[[], LLMatcher]) -> None:
        self._make = make
        self._starts = itertools.count()
        self._seconds = 0.0
        """that compiling it took"""
        self.bases: list[LlguidanceMatcher] = []
        self.started = False
        self.add()

    def add(self) -> LlguidanceMatcher:
        began = time.monotonic()
        base = LlguidanceMatcher(self._make(), next(_SHARES), self, [])
        self._seconds = time.monotonic() - began
        self.bases.append(base)
        return base

    def start(self) -> LlguidanceMatcher:
        self.started = True
        if not self.bases:
            self.add()
        return self.bases[next(self._starts) % len(self.bases)].copy()

    def again(self, spent: int) -> LlguidanceMatcher | None:
        """In place of the one whose share is used up. None: there is no other, and making one takes long."""
        self.bases = [base for base in self.bases if base.share != spent]
        if self.bases:
            return self.bases[0]
        return self.add() if self._seconds < _MOST_RENEWAL_S else None


class GrammarCompiler:
    """See `engine.grammars.interface.Grammars`. One thread calls it; `notify`, from another, is told what has been
    compiled. Without one, `begin` waits itself."""

    def __init__(
        self,
        vocab_size: int,
        most_kept: int,
        threads: int | None,
        notify: Callable[[str], None] | None = None,
        team: Team | None = None,
    ) -> None:
        """`most_kept`: compiled grammars. `threads`, `team`: see `MaskFiller`."""
        self._vocab_size = vocab_size
        self._words = self._wide_words = -(-vocab_size // 32)
        """of the model's vocabulary, and of its tokenizer's, which may have more"""
        self._most_kept = most_kept
        self._filler = MaskFiller(threads, team)
        self._num_bases = min(threads or _MOST_BASES, _MOST_BASES)
        self._notify = notify
        self._tokenizer: LLTokenizer | None = None
        self._no_tokenizer = "the core knows no vocabulary"
        self._xgrammar: Xgrammar | None = None
        self._compiled: OrderedDict[str, _Compiled | XgrammarCompiled | str] = OrderedDict()
        """or why it is not"""
        self._lock = threading.Lock()
        self._compilers = Threads(self._compile_for)
        self._under_way: set[str] = set()

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Of the model's outputs; it comes before the first grammar, and once. Takes a second for 256k tokens, in which
        no other thread runs Python: where requests stream, it is to come before them."""
        if self._tokenizer is None:
            known = ModelVocabulary(
                tokenizer=vocabulary.tokenizer,
                eos_token_ids=vocabulary.eos_token_ids,
                vocab_size=self._vocab_size,
            )
            try:
                self._tokenizer = known.for_llguidance()
                self._wide_words = -(-self._tokenizer.vocab_size // 32)
            except BaseException as error:  # a Rust panic is no Exception
                self._no_tokenizer = first_line(str(error)) or type(error).__name__
            with self._lock:
                self._xgrammar = Xgrammar(known)
                self._compiled.clear()  # what could not be compiled without one

    def begin(self, grammar: str) -> bool:
        with self._lock:
            known = self._compiled.get(grammar)
            if isinstance(known, _Compiled) and not known.bases:  # all are used up
                del self._compiled[grammar]
                known = None
            if known is not None:
                self._compiled.move_to_end(grammar)
                if not isinstance(known, _Compiled) or not known.started or len(known.bases) >= self._num_bases:
                    return True
            if grammar in self._under_way:
                return known is not None
            self._under_way.add(grammar)
        if self._notify is None:
            self._compile_for(grammar)
            return True
        self._compilers.put(grammar)
        return known is not None

    def start(self, grammar: str) -> LlguidanceMatcher | XgrammarMatcher:
        with self._lock:
            compiled = self._compiled[grammar]
            if not isinstance(compiled, str):
                compiled.started = True
            self._drop_oldest()
        if isinstance(compiled, str):
            raise InvalidRequestError(f"{FIELD}: {compiled}", FIELD)
        return compiled.start()

    def fill(
        self, matchers: Sequence[Matcher | None], drafts: Sequence[Sequence[int]] = ()
    ) -> tuple[np.ndarray, dict[int, str]]:
        drafts = drafts or [()] * len(matchers)
        places = np.cumsum([0, *(1 + len(tokens) for tokens in drafts)]).tolist()
        masks = np.full((places[-1], self._wide_words), _EVERYTHING, dtype=np.int32)
        known = {
            index: _Asked(matcher, place, list(tokens))
            for index, (matcher, place, tokens) in enumerate(zip(matchers, places, drafts))
            if isinstance(matcher, LlguidanceMatcher)
        }
        try:
            failed = self._fill_known(known, masks)
            failed |= _fill_by_xgrammar(matchers, places, drafts, masks)
        except Exception as error:  # of whichever: those without a grammar go on
            logger.exception("masks could not be filled")
            masks[:] = _EVERYTHING
            failed = {
                index: f"{FIELD}: {first_line(str(error))}" for index, one in enumerate(matchers) if one is not None
            }
        return np.ascontiguousarray(masks[:, : self._words]), failed

    def _fill_known(self, known: dict[int, _Asked], masks: np.ndarray) -> dict[int, str]:
        """Rows of `masks`; those that failed, and why."""
        # Threads take parts of the list: neighbours may share a lock.
        neighbours = sorted(known.values(), key=lambda one: one.matcher.share)
        self._filler.fill([(one.matcher.inner, one.place, one.drafts) for one in neighbours], masks)
        failed = {}
        for index, one in known.items():
            matcher = one.matcher
            if matcher.inner.is_error():
                if matcher.renew():
                    self._filler.fill([(matcher.inner, one.place, one.drafts)], masks)
                if matcher.inner.is_error():
                    masks[one.place : one.place + 1 + len(one.drafts)] = _EVERYTHING
                    failed[index] = f"{FIELD}: {first_line(matcher.inner.get_error())}"
        return failed

    def _compile_for(self, grammar: str) -> None:
        """Whoever asks for it; once more for each thread that fills masks, where others have it already."""
        with self._lock:
            known = self._compiled.get(grammar)
        if isinstance(known, _Compiled):
            self._compile_again(known)
        else:
            self._compile(grammar)
        with self._lock:
            self._under_way.discard(grammar)
        if self._notify is not None:
            self._notify(grammar)

    def _compile(self, grammar: str) -> None:
        compiled: _Compiled | XgrammarCompiled | str
        try:
            compiled = self._compiled_by_xgrammar(grammar) or _Compiled(lambda: self._made(grammar))
        except BaseException as error:  # a Rust panic is no Exception, and nobody would start the thread again
            compiled = first_line(str(error)) or type(error).__name__
        with self._lock:
            self._compiled[grammar] = compiled

    def _compiled_by_xgrammar(self, grammar: str) -> XgrammarCompiled | None:
        """None: llguidance is to compile it. Raises `InvalidRequestError`."""
        if not grammar.startswith(PREFIX):
            return None
        if self._xgrammar is None:
            raise InvalidRequestError(self._no_tokenizer, FIELD)
        return self._xgrammar.compile(grammar)

    def _compile_again(self, compiled: _Compiled) -> None:
        try:
            while len(compiled.bases) < self._num_bases:
                compiled.add()
        except BaseException:  # it is only for speed, and a Rust panic is no Exception
            logger.warning("a grammar's further compilations have failed", exc_info=True)

    def _made(self, grammar: str) -> LLMatcher:
        """Raises `InvalidRequestError`."""
        from llguidance import LLMatcher

        if self._tokenizer is None:
            raise InvalidRequestError(self._no_tokenizer, FIELD)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # what the first mask learns, all outputs know
        if matcher.is_error():
            raise InvalidRequestError(first_line(matcher.get_error()), FIELD)
        return matcher

    def _drop_oldest(self) -> None:
        """Under the lock. Who waits for what has been compiled has not come yet: that stays."""
        spare = len(self._compiled) - self._most_kept
        for grammar in [g for g, one in self._compiled.items() if isinstance(one, str) or one.started][: max(spare, 0)]:
            del self._compiled[grammar]


def _fill_by_xgrammar(
    matchers: Sequence[Matcher | None], places: list[int], drafts: Sequence[Sequence[int]], masks: np.ndarray
) -> dict[int, str]:
    """Rows of `masks`; those that failed, and why."""
    failed = {}
    for index, (matcher, tokens) in enumerate(zip(matchers, drafts)):
        if isinstance(matcher, XgrammarMatcher):
            rows = masks[places[index] : places[index + 1]]
            try:
                matcher.fill(rows, list(tokens))
            except RuntimeError as error:
                rows[:] = _EVERYTHING
                failed[index] = f"{FIELD}: {reason_of(error)}"
    return failed
