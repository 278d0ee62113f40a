"""What one front end asks all of them, and what they have answered last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import msgspec

from engine.front_ends.wire import Answers, FromHub, Question


class _Asked(msgspec.Struct, eq=False):
    front_end: int
    number: int
    """of its question"""
    about: str
    missing: set[int]
    texts: list[bytes]


class Questions:
    def __init__(self, tell: Callable[[int, FromHub], None]) -> None:
        """`tell`: a front end, by its number."""
        self._tell = tell
        self._asked: dict[int, _Asked] = {}
        self._numbers = 0
        self._said: dict[str, dict[int, bytes]] = defaultdict(dict)
        """what each front end has answered last, also of those that are no more: their counts count"""
        self._lost: set[int] = set()

    def ask(self, front_end: int, question: Question, whom: set[int]) -> int:
        """Returns its number here."""
        self._numbers += 1
        own = self._numbers
        self._asked[own] = _Asked(front_end, question.number, question.about, set(whom), [])
        for each in whom:
            self._tell(each, Question(own, question.about))
        return own

    def answered(self, own: int, front_end: int, text: bytes) -> None:
        asked = self._asked.get(own)
        if asked is not None and front_end in asked.missing:
            asked.texts.append(text)
            self._said[asked.about][front_end] = text
            self._has_answered(own, asked, front_end)

    def lost(self, front_end: int) -> None:
        """It answers nothing any more."""
        self._lost.add(front_end)
        for own, asked in list(self._asked.items()):
            self._has_answered(own, asked, front_end)

    def end(self, own: int) -> None:
        """Whoever asked is told what there is."""
        asked = self._asked.pop(own, None)
        if asked is not None:
            gone = [text for number, text in self._said[asked.about].items() if number in self._lost]
            self._tell(asked.front_end, Answers(asked.number, asked.texts, gone, len(asked.missing)))

    def _has_answered(self, own: int, asked: _Asked, front_end: int) -> None:
        asked.missing.discard(front_end)
        if not asked.missing:
            self.end(own)
