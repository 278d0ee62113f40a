"""Grammars compiled with llguidance, in a thread of their own where the core must not wait for them.

A compiled one is kept while there is room. Outputs start from copies, which share what it has learnt, and a lock:
threads that fill masks side by side need a grammar compiled as often as there are threads. All that it may cost is
bounded (`language.parser_limits`), and it was checked before in a process that could be ended (`checking`): the thread
is not in danger.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import itemgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np

from engine.core.wire import Vocabulary
from engine.errors import InvalidRequestError
from engine.grammars.interface import Matcher
from engine.grammars.language import FIELD, first_line, parser_limits

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_MOST_BASES = 4
_EVERYTHING = -1
"""32 tokens that are allowed"""


class LlguidanceMatcher:
    __slots__ = ("inner", "share")

    def __init__(self, inner: LLMatcher, share: int) -> None:
        """`share`: what has the same number shares a lock."""
        self.inner = inner
        self.share = share

    def advance(self, token: int) -> None:
        if not self.inner.consume_token(token):
            reason = first_line(self.inner.get_error())
            raise InvalidRequestError(f"{FIELD}: token {token} does not match: {reason}", FIELD)

    @property
    def is_over(self) -> bool:
        return self.inner.is_stopped()

    def copy(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self.inner.deep_copy(), self.share)


class _Compiled:
    """One grammar, as often as threads fill masks of it."""

    def __init__(self, first: LlguidanceMatcher) -> None:
        self.bases = [first]
        self._starts = itertools.count()

    def start(self) -> LlguidanceMatcher:
        return self.bases[next(self._starts) % len(self.bases)].copy()


class GrammarCompiler:
    """See `engine.grammars.interface.Grammars`. One thread calls it; `notify`, from another, is told what has been
    compiled. Without one, `begin` waits itself."""

    def __init__(
        self, vocab_size: int, kept_bytes: int, threads: int | None, notify: Callable[[str], None] | None = None
    ) -> None:
        """`kept_bytes`: of the texts of compiled grammars that are kept. `threads`: that fill masks; None: llguidance
        chooses."""
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._kept_bytes = kept_bytes
        self._threads = threads
        self._num_bases = min(threads or _MOST_BASES, _MOST_BASES)
        self._shares = itertools.count()
        self._notify = notify
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._compiled: OrderedDict[str, _Compiled | str] = OrderedDict()
        """or why it is not"""
        self._lock = threading.Lock()
        self._work: SimpleQueue[str] | None = None
        self._under_way: set[str] = set()

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Of the model's outputs; it comes before the first grammar."""
        self._vocabulary = vocabulary

    def begin(self, grammar: str) -> bool:
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return True
            if grammar in self._under_way:
                return False
            self._under_way.add(grammar)
        if self._notify is None:
            self._compile_again(grammar, self._compile(grammar))
            return True
        if self._work is None:
            self._work = SimpleQueue()
            threading.Thread(target=self._run, args=(self._work, self._notify), name="grammars", daemon=True).start()
        self._work.put(grammar)
        return False

    def start(self, grammar: str) -> LlguidanceMatcher:
        with self._lock:
            compiled = self._compiled[grammar]
            self._drop_oldest()
        if isinstance(compiled, str):
            raise InvalidRequestError(f"{FIELD}: {compiled}", FIELD)
        return compiled.start()

    def fill(self, matchers: Sequence[Matcher | None]) -> tuple[np.ndarray, dict[int, str]]:
        from llguidance import LLExecutor

        masks = np.full((len(matchers), self._words), _EVERYTHING, dtype=np.int32)
        known = [(m.share, index, m.inner) for index, m in enumerate(matchers) if isinstance(m, LlguidanceMatcher)]
        # Threads take parts of the list: neighbours may share a lock.
        asked = [(matcher, index) for _, index, matcher in sorted(known, key=itemgetter(0))]
        row_bytes = masks.strides[0]
        if len(asked) == 1:
            [(matcher, index)] = asked
            matcher.unsafe_compute_mask_ptr(masks.ctypes.data + index * row_bytes, row_bytes)
        elif asked:
            if self._executor is None:
                self._executor = LLExecutor(self._threads)
            self._executor.unsafe_compute_mask_ptr(asked, masks.ctypes.data, row_bytes, len(matchers))
        failed = {index: first_line(matcher.get_error()) for matcher, index in asked if matcher.is_error()}
        for index in failed:
            masks[index] = _EVERYTHING
        return masks, failed

    def _run(self, work: SimpleQueue[str], notify: Callable[[str], None]) -> None:
        while True:
            grammar = work.get()
            compiled = self._compile(grammar)
            notify(grammar)
            self._compile_again(grammar, compiled)

    def _compile(self, grammar: str) -> _Compiled | str:
        compiled: _Compiled | str
        try:
            compiled = _Compiled(self._made(grammar))
        except Exception as error:
            compiled = first_line(str(error)) or type(error).__name__
        with self._lock:
            self._compiled[grammar] = compiled
            self._under_way.discard(grammar)
        return compiled

    def _compile_again(self, grammar: str, compiled: _Compiled | str) -> None:
        if isinstance(compiled, _Compiled):
            compiled.bases += [self._made(grammar) for _ in range(1, self._num_bases)]

    def _made(self, grammar: str) -> LlguidanceMatcher:
        """Raises `InvalidRequestError`."""
        from llguidance import LLMatcher, LLTokenizer

        if self._tokenizer is None:
            if self._vocabulary is None:
                raise InvalidRequestError("the core knows no vocabulary", FIELD)
            text, eos = self._vocabulary.tokenizer, self._vocabulary.eos_token_ids
            self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
            self._vocabulary = None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # what the first mask learns, all outputs know
        if matcher.is_error():
            raise InvalidRequestError(first_line(matcher.get_error()), FIELD)
        return LlguidanceMatcher(matcher, next(self._shares))

    def _drop_oldest(self) -> None:
        """Under the lock, and not before the latest has been taken."""
        size = sum(map(len, self._compiled))
        while size > self._kept_bytes and len(self._compiled) > 1:
            dropped, _ = self._compiled.popitem(last=False)
            size -= len(dropped)
