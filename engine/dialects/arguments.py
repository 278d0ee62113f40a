"""Calls whose arguments are JSON, as they come: a name, then the arguments' text as the model writes it.

What is given out is the same however the text is cut. Only the order that models were taught is followed (a name, then
an object of arguments); all else waits for the end of its region.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from math import isfinite
from typing import NamedTuple

_NAMES = "name|tool_name"
_ARGUMENTS = "arguments|parameters|args"
_OTHERS = rf'"(?!(?:{_NAMES}|{_ARGUMENTS}|function)")[a-z_]{{1,32}}"\s*:\s*"[^"\\]*"\s*,\s*'
_HEAD = re.compile(
    rf'[\s,;\[]*\{{\s*(?:{_OTHERS}){{0,4}}"(?:{_NAMES})"\s*:\s*"(?P<name>[^"\\]{{1,256}})"\s*,\s*'
    rf'"(?:{_ARGUMENTS})"\s*:\s*(?=\{{)'
)
_TAIL = re.compile(r'[^{}\[\]"]*(?:"[^"\\]*"[^{}\[\]"]*)*\}')
_OWN_TAIL = re.compile(r"\s*\}?")
"""where the mark that holds the name has opened an object"""
_MOST_AROUND = 1024
"""characters between one call's arguments and the next one's"""
_SCALAR = re.compile(r"[A-Za-z0-9+\-.]+")
_PLAIN = re.compile(r'[^"\\{}\[\]A-Za-z0-9+\-.]+')
_WITHIN = re.compile(r'[^"\\]+')


class ObjectText:
    """The text of one JSON object as it comes, up to its end. What is no number in JSON becomes null."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._escaped = False
        self._scalar = ""
        self.ended = False

    def feed(self, text: str) -> tuple[str, str]:
        """What may be given out, and what stands behind the object."""
        out: list[str] = []
        at = 0
        while at < len(text) and not self.ended:
            at = self._within(text, at, out) if self._in_text else self._between(text, at, out)
        return "".join(out), text[at:]

    def _within(self, text: str, at: int, out: list[str]) -> int:
        if self._escaped:
            self._escaped = False
        elif (found := _WITHIN.match(text, at)) is not None:
            out.append(found.group())
            return found.end()
        else:
            self._escaped, self._in_text = text[at] == "\\", text[at] != '"'
        out.append(text[at])
        return at + 1

    def _between(self, text: str, at: int, out: list[str]) -> int:
        if (found := _SCALAR.match(text, at)) is not None:
            self._scalar += found.group()
            return found.end()
        out.append(_in_json(self._scalar))
        self._scalar = ""
        if (found := _PLAIN.match(text, at)) is not None:
            out.append(found.group())
            return found.end()
        char = text[at]
        self._in_text = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        self.ended = self._depth == 0
        out.append(char)
        return at + 1


def _in_json(scalar: str) -> str:
    if not scalar or scalar in ("true", "false", "null"):
        return scalar
    try:
        return scalar if isfinite(float(scalar)) else "null"
    except (ValueError, OverflowError):
        return scalar


class Part(NamedTuple):
    """A call begins where it has a `name`; else more of its arguments."""

    name: str = ""
    arguments: str = ""


class CallScanner:
    """Of one region of calls. `feed` what comes between its marks."""

    def __init__(self, name: str | None, names: Container[str]) -> None:
        """`name`: told by the region's mark, so that there are nothing but arguments. `names`: of tools; what names
        another is no call."""
        self._names = names
        self.is_no_call = False
        self._around = ""
        """of what comes before arguments, or behind them, all that is not understood yet"""
        self._named = name
        self._object: ObjectText | None = None
        self._behind = False
        self._lost = False
        """all else is for the end of the region"""

    @property
    def rest(self) -> str | None:
        """What stands behind the last call's arguments and what closes it. None: they have not ended."""
        if self._object is not None:
            return None
        tail = (_TAIL if self._named is None else _OWN_TAIL).match(self._around) if self._behind else None
        return self._around[tail.end() :] if tail is not None else self._around

    def feed(self, text: str) -> Iterator[Part]:
        if self._lost:
            self._around += text
            return
        while text and not self._lost:
            if self._object is not None:
                out, text = self._object.feed(text)
                if out:
                    yield Part(arguments=out)
                if self._object.ended:
                    self._object, self._behind, self._lost = None, True, self._named is not None
                    if self._lost:
                        self._around = text
                continue
            self._around += text
            text = ""
            name = self._next()
            if name is not None:
                text, self._around = self._around, ""
                self._object = ObjectText()
                yield Part(name)

    def _next(self) -> str | None:
        if self._behind and (tail := _TAIL.match(self._around)) is not None:
            self._around, self._behind = self._around[tail.end() :], False
        if not self._behind:
            if self._named is not None:
                self._around = self._around.lstrip()
                self._lost = bool(self._around) and self._around[0] != "{"
                return self._named if self._around and not self._lost else None
            if (head := _HEAD.match(self._around)) is not None:
                name = head["name"].strip()
                self._lost = self.is_no_call = name not in self._names
                if self._lost:
                    return None
                self._around = self._around[head.end() :]
                return name
        self._lost = len(self._around) > _MOST_AROUND
        return None
