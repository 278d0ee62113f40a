"""Logit bias, allowed tokens, bad words and minimum length: sparse edits of a few logits, decided on the device.

A row's lists are uploaded once, when it is added; `combine` joins those of a batch. What depends on the history (bad
words of several tokens, minimum length) is evaluated on the device, which alone knows the last token.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from engine.limits import check_token_ids
from engine.sampling.upload import upload
from engine.step import RowParams

_ALWAYS = 2**62


class RowEdits(msgspec.Struct, frozen=True):
    """One row's lists on the device. Empty tensors where it has none."""

    ids: torch.Tensor
    """int64 `[e]`"""
    values: torch.Tensor
    """float32 `[e]`, added to the logit"""
    until: torch.Tensor
    """int64 `[e]`: the edit holds while fewer tokens than this are generated"""
    allowed: torch.Tensor | None
    """int64 `[a]`; None: all"""
    last: torch.Tensor
    """int64 `[s]`: last token of each bad sequence of two or more"""
    prefix: torch.Tensor
    """int32 `[t]`: the tokens before the last ones, of one sequence after the other"""
    prefix_of: torch.Tensor
    """int64 `[t]`: of which sequence"""
    prefix_back: torch.Tensor
    """int64 `[t]`: how far before the last token, at least 1"""
    prefix_len: torch.Tensor
    """int64 `[s]`"""


def row_edits(params: RowParams, vocab_size: int, device: torch.device) -> RowEdits | None:
    """The edits that `params` ask for, or None. Raises `InvalidRequestError` for ids outside the vocabulary."""
    check_token_ids("logit_bias", params.logit_bias, vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    edits = [(token, bias, _ALWAYS) for token, bias in params.logit_bias.items() if bias]
    # A bad word or stop token outside the vocabulary can never be drawn: nothing to forbid.
    words = [w for w in params.bad_words if w and 0 <= w[-1] < vocab_size]
    edits += [(token, float("-inf"), _ALWAYS) for token in sorted({w[0] for w in words if len(w) == 1})]
    if params.min_tokens > 0:
        stops = sorted({t for t in params.stop_token_ids if 0 <= t < vocab_size})
        edits += [(token, float("-inf"), params.min_tokens) for token in stops]
    sequences = [w for w in words if len(w) > 1]
    if not edits and not sequences and params.allowed_token_ids is None:
        return None
    lengths = [len(w) - 1 for w in sequences]
    allowed = params.allowed_token_ids
    return RowEdits(
        ids=upload([e[0] for e in edits], torch.int64, device),
        values=upload([e[1] for e in edits], torch.float32, device),
        until=upload([e[2] for e in edits], torch.int64, device),
        allowed=None if allowed is None else upload(np.unique(allowed), torch.int64, device),
        last=upload([w[-1] for w in sequences], torch.int64, device),
        prefix=upload([token for w in sequences for token in w[:-1]], torch.int32, device),
        prefix_of=upload(np.repeat(np.arange(len(sequences)), lengths), torch.int64, device),
        prefix_back=upload([back for n in lengths for back in range(n, 0, -1)], torch.int64, device),
        prefix_len=upload(lengths, torch.int64, device),
    )


class BatchEdits(msgspec.Struct, frozen=True):
    """The edits of a batch; `*_at` are positions in the batch, int64."""

    edit_at: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor
    until: torch.Tensor
    limited: torch.Tensor
    """positions of rows with allowed tokens, `[n]`"""
    allowed_at: torch.Tensor
    allowed: torch.Tensor
    last_at: torch.Tensor
    last: torch.Tensor
    prefix: torch.Tensor
    prefix_of: torch.Tensor
    prefix_back: torch.Tensor
    prefix_len: torch.Tensor

    def apply(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        prompt_lens: torch.Tensor,
        tokens: torch.Tensor,
    ) -> None:
        """Edit `logits` `[m, V]` in place; `rows`, `positions`, `prompt_lens` int64 `[m]`, `tokens` int32 `[rows,
        len]`."""
        if self.limited.numel():
            kept = logits[self.allowed_at, self.allowed]
            logits.index_fill_(0, self.limited, float("-inf"))
            logits[self.allowed_at, self.allowed] = kept
        if self.ids.numel():
            active = (positions - prompt_lens)[self.edit_at] < self.until
            _add(logits, self.edit_at, self.ids, self.values.masked_fill(~active, 0.0))
        if self.last.numel():
            forbidden = self._completes_bad_word(rows, positions, prompt_lens, tokens)
            values = logits.new_zeros(forbidden.shape).masked_fill_(forbidden, float("-inf"))
            _add(logits, self.last_at, self.last, values)

    def _completes_bad_word(
        self, rows: torch.Tensor, positions: torch.Tensor, prompt_lens: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        end = positions[self.last_at]
        at = self.last_at[self.prefix_of]
        history = tokens[rows[at], (positions[at] - self.prefix_back).clamp_(min=0)]
        differ = torch.zeros_like(self.prefix_len).index_add_(
            0, self.prefix_of, (history != self.prefix).to(torch.int64)
        )
        return (differ == 0) & (end - prompt_lens[self.last_at] >= self.prefix_len)


def _add(logits: torch.Tensor, at: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Add, where one place may be named twice: at most one addend is finite and not 0, so the order cannot matter."""
    logits.view(-1).scatter_add_(0, at * logits.shape[1] + ids, values)


def combine(rows: Sequence[tuple[int, RowEdits]], device: torch.device) -> BatchEdits | None:
    """Join the edits of rows, each given with its position in the batch."""
    if not rows:
        return None
    edits = [e for _, e in rows]
    limited = [(at, e.allowed) for at, e in rows if e.allowed is not None]
    first = np.cumsum([0, *(e.last.shape[0] for e in edits)]).tolist()
    return BatchEdits(
        edit_at=_places([(at, e.ids) for at, e in rows], device),
        ids=torch.cat([e.ids for e in edits]),
        values=torch.cat([e.values for e in edits]),
        until=torch.cat([e.until for e in edits]),
        limited=upload([at for at, _ in limited], torch.int64, device),
        allowed_at=_places(limited, device),
        allowed=torch.cat([a for _, a in limited]) if limited else edits[0].ids[:0],
        last_at=_places([(at, e.last) for at, e in rows], device),
        last=torch.cat([e.last for e in edits]),
        prefix=torch.cat([e.prefix for e in edits]),
        prefix_of=torch.cat([e.prefix_of + start for e, start in zip(edits, first)]),
        prefix_back=torch.cat([e.prefix_back for e in edits]),
        prefix_len=torch.cat([e.prefix_len for e in edits]),
    )


def _places(lists: Sequence[tuple[int, torch.Tensor]], device: torch.device) -> torch.Tensor:
    counts = [values.shape[0] for _, values in lists]
    return upload(np.repeat(np.array([at for at, _ in lists], dtype=np.int64), counts), torch.int64, device)
