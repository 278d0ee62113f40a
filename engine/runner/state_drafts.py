"""Drafts of rows whose layers keep states. A state cannot go back, so a step keeps it behind a row's last certain
token, and what each layer was given for the drafts behind; the row's next step, which knows how many of them were
right, has the layers take these in first, token after token as ever, and throws away what they make of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.step import Rows


def sent_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int64 arrays of any shapes by one copy, for which nobody waits."""
    host = torch.from_numpy(np.concatenate([each.reshape(-1) for each in arrays]))
    sent = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    parts = torch.split(sent, [each.size for each in arrays])
    return [part.view(each.shape) for part, each in zip(parts, arrays, strict=True)]


class Span(NamedTuple):
    """Tokens of one row that layers with states compute in a step, by their positions."""

    begin: int
    """behind its state; those before `ScheduledRow.computed` are drafts of its last step"""
    certain: int
    """up to there states are kept, behind it are drafts"""
    end: int


class _Drafts(NamedTuple):
    """Of a row."""

    position: int
    """of the first one"""
    inputs: dict[int, torch.Tensor]
    """by layer: what it was given for all drafts of a step, [drafts, outputs of its first matrix]"""
    start: int
    """which of these is the row's first"""


class _Piece(NamedTuple):
    """Of what layers compute in a step: rows [begin, end) of what they are given, or were given for drafts."""

    drafts: _Drafts | None
    begin: int
    end: int


class StateDrafts:
    def __init__(self) -> None:
        self._kept: dict[int, _Drafts] = {}
        """by row"""
        self._pieces: list[_Piece] = []
        """of this step; none: there is nothing but its own tokens"""
        self._inputs: dict[int, torch.Tensor] = {}
        self._drafts = torch.empty(0, dtype=torch.int64)
        """int64: which of the step's tokens are drafts"""

    def release(self, rows: Iterable[int]) -> None:
        """They are about to be given away."""
        for row in rows:
            self._kept.pop(row, None)

    def begin_step(self, rows: Rows, device: torch.device) -> list[Span]:
        """Of each row, in order. `rows`: as many drafts as are computed, where they are."""
        spans, pieces, drafts = list[Span](), list[_Piece](), list[int]()
        self._inputs, token, told = {}, 0, 0
        for row, computed, query_len, samples, _ in rows.each():
            kept, num_drafts = self._kept.pop(row, None), max(samples - 1, 0)
            begin, end = computed if kept is None else kept.position, computed + query_len
            if kept is not None and begin < computed:
                pieces.append(_Piece(None, told, token))
                pieces.append(_Piece(kept, kept.start, kept.start + computed - begin))
                told = token
            token += query_len
            if num_drafts:
                self._kept[row] = _Drafts(end - num_drafts, self._inputs, len(drafts))
                drafts.extend(range(token - num_drafts, token))
            spans.append(Span(begin, end - num_drafts, end))
        self._pieces = [*pieces, _Piece(None, told, token)] if pieces else []
        (self._drafts,) = sent_together([np.array(drafts, np.int64)], device)
        return spans

    def with_replayed(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """What the layer is to compute: `x`, of the step's tokens, with what it was given for a row's drafts before the
        row's own."""
        if len(self._drafts):
            self._inputs[layer] = x[self._drafts]
        if not self._pieces:
            return x
        return torch.cat([(x if drafts is None else drafts.inputs[layer])[at:end] for drafts, at, end in self._pieces])

    def take_own(self, made: torch.Tensor, out: torch.Tensor) -> None:
        """Into `out`: what the layer has made of the step's tokens."""
        own, at = [], 0
        for drafts, begin, end in self._pieces:
            if drafts is None:
                own.append(made[at : at + end - begin])
            at += end - begin
        torch.cat(own, out=out)
