"""What came after the same tokens earlier in a text: prompt lookup decoding (Saxena, 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def matches(text: np.ndarray, longest: int) -> tuple[np.ndarray, int]:
    """Where the longest end of `text`, int32 [n] with n > 0, that is somewhere before ends there, int64; and its
    length, `longest` at most; 0: nowhere."""
    last = len(text) - 1
    ends, length = np.flatnonzero(text[:last] == text[last]), 0
    while len(ends):
        length += 1
        if length >= longest:
            break
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == text[last - length]]
        if not len(longer):
            break
        ends = longer
    return ends, length


def continuation(tokens: Sequence[int], longest: int, shortest: int, count: int) -> list[int]:
    """As many tokens as may come behind those: what came after their longest end that is somewhere before, of equals
    the latest, over and over where it runs into the end. Empty where no end of `shortest` tokens is."""
    text = np.array(tokens, dtype=np.int32)
    ends, length = matches(text, longest)
    return [] if length < shortest else np.resize(text[ends[-1] + 1 :], count).tolist()
