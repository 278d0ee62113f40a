"""Masks for many outputs at once, each by its own llguidance matcher."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from engine.executor.team import Team


_FEW_S = 0.0003
"""what is done sooner is done at once: others would have to be called"""
_PAST = 100
"""masks that count as much as the new ones, in what one takes"""

Asked = tuple["LLMatcher", int, list[int]]
"""One output whose masks are filled: where it is, the place of its mask, and drafts, whose masks follow."""


class MaskFiller:
    """Fills masks side by side: in threads of llguidance's own, or, where those would wait for a core, in the ones that
    compute steps."""

    def __init__(self, threads: int | None, team: Team | None = None) -> None:
        """`threads` of llguidance's; None: it chooses. `team`: takes their place."""
        self._threads = threads
        self._team = team
        self._executor: LLExecutor | None = None
        self._mask_s = _FEW_S
        """what one takes of late"""

    def fill(self, asked: Sequence[Asked], masks: np.ndarray) -> None:
        """Into int32 [all masks, words of 32 tokens]. Neighbours may share a lock: threads take parts of the list."""
        if len(asked) < 2 or len(asked) * self._mask_s < _FEW_S:
            self._fill_in_parts(asked, masks, 1)
        elif self._team is not None:
            self._fill_in_parts(asked, masks, self._team.size)
        else:
            self._fill_by_executor(asked, masks)

    def _fill_in_parts(self, asked: Sequence[Asked], masks: np.ndarray, size: int) -> None:
        start, stride = masks.ctypes.data, masks.strides[0]
        bounds = [len(asked) * part // size for part in range(size + 1)]
        shares = [deque(asked[begin:end]) for begin, end in pairwise(bounds)]

        def fill_share(part: int) -> None:
            """And what is left of the others'."""
            began, filled = time.thread_time(), 0
            for share in shares[part:] + shares[:part]:
                while share:
                    try:
                        inner, place, drafts = share.popleft()
                    except IndexError:
                        break
                    filled += 1
                    where = start + place * stride
                    if drafts:
                        # Its stub leaves it out.
                        inner.unsafe_compute_mask_ptr_with_draft_token(where, stride, drafts)  # type: ignore[attr-defined]
                    else:
                        inner.unsafe_compute_mask_ptr(where, stride)

            if part == 0:
                self._learn(time.thread_time() - began, filled)

        if size == 1 or self._team is None:
            fill_share(0)
        else:
            self._team.run(fill_share)

    def _learn(self, seconds: float, masks: int) -> None:
        self._mask_s += (seconds - masks * self._mask_s) / (_PAST + masks)

    def _fill_by_executor(self, asked: Sequence[Asked], masks: np.ndarray) -> None:
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor(self._threads)
        began, where = time.perf_counter(), (masks.ctypes.data, masks.strides[0], len(masks))
        if drafted := [one for one in asked if one[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        if others := [one[:2] for one in asked if not one[2]]:
            self._executor.unsafe_compute_mask_ptr(others, *where)
        self._learn(time.perf_counter() - began, len(asked))
