"""Which texts hold no beginning of any mark, so that they need not be searched for one.

Most of an answer is such text, and comes a token at a time: where all marks begin with "<", a look at one character is
all that `ResponseParser`'s search would find out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from transformers.utils.chat_parsing.response_templates import ResponseTemplate, ResponseTemplateField

Watched = tuple[str, "ResponseTemplateField"]
"""("open" or "close", whose mark)"""

_TEXTS = ("content", "response", "reasoning")
_ASCII = [chr(code) for code in range(128)]
_OTHERS = "\u00e9\u0663\u4e2d\U0001f600\u00a0\u3000"
"""a letter, a digit, an ideograph, a symbol and two spaces, for all that is not ASCII"""
_UNCLEAR = re.compile(r"\(\?(?:<[=!]|[a-zA-Z-]+[:)])|\\[AbBmMZzGKXRuUxNpP0-9]|\[:|[$^]|-[^\x00-\x7f]|[^\x00-\x7f]-")
"""in patterns whose beginning depends on what stands before it, or cannot be found out by trying"""


class Template:
    """A response template, and what is found out about it once for all answers."""

    def __init__(self, spec: ResponseTemplate) -> None:
        self.spec = spec
        fields = spec.fields
        self.texts = frozenset(name for name in _TEXTS if name in fields and fields[name].content == "text")
        """regions that are given out as they come, and not looked at as a whole"""
        self._marks: dict[str | None, re.Pattern[str] | None] = {}

    def is_plain(self, region: str | None, watched: Callable[[], Iterable[Watched]], text: str) -> bool:
        """No mark that is watched for in `region` can begin within `text`."""
        if region not in self._marks:
            self._marks[region] = _beginnings(watched())
        marks = self._marks[region]
        return marks is not None and marks.search(text) is None


def _beginnings(watched: Iterable[Watched]) -> re.Pattern[str] | None:
    """None: any text may hold one."""
    found: set[str] = set()
    others = False
    for kind, field in watched:
        literals = field.open_literals if kind == "open" else field.close_literals
        if literals is not None:
            found |= {literal[0] for literal in literals}
            continue
        pattern: Any = field.open_re if kind == "open" else field.close_re
        if _UNCLEAR.search(pattern.pattern.replace("[^", "[")):
            return None
        tried = {*_ASCII, *pattern.pattern} - set(_OTHERS)
        found |= {each for each in tried if pattern.match(each, partial=True) is not None}
        others = others or any(pattern.match(each, partial=True) is not None for each in _OTHERS)
    if not found and not others:
        return re.compile(r"(?!)")
    return re.compile(f"[{''.join(map(re.escape, sorted(found)))}{chr(128) + '-' + chr(0x10FFFF) if others else ''}]")
