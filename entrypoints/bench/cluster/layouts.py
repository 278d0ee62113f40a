"""How devices are put together: replicas, their stages, prefill apart from decode."""

from __future__ import annotations

import re

import msgspec

_REPLICAS = re.compile(r"([1-9]\d*)(?:x([1-9]\d*))?")
_APART = re.compile(r"([1-9]\d*)P\+([1-9]\d*)D")


class Layout(msgspec.Struct, frozen=True):
    replicas: int
    """that decode; they compute their own prompts where nobody else does"""
    stages: int = 1
    """of each"""
    prefill: int = 0
    """servers that compute prompts for the others"""
    ranks: int = 1
    """of each stage"""

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.replicas}D" if self.prefill else f"{self.replicas}x{self.stages}"

    @property
    def servers(self) -> int:
        return self.replicas + self.prefill

    @property
    def devices(self) -> int:
        return self.servers * self.stages * self.ranks

    def times(self, count: int) -> Layout:
        """So many of everything."""
        return msgspec.structs.replace(self, replicas=self.replicas * count, prefill=self.prefill * count)


def layout(text: str) -> Layout:
    """ "4x2": four replicas of two stages each; "4": of one; "1P+2D": one server that computes prompts and two that
    decode. Raises ValueError."""
    if found := _APART.fullmatch(text):
        return Layout(int(found[2]), prefill=int(found[1]))
    if found := _REPLICAS.fullmatch(text):
        return Layout(int(found[1]), int(found[2] or 1))
    raise ValueError(f"{text!r} is no layout, as 4x2 (four replicas of two stages) or 1P+2D (prefill apart)")
