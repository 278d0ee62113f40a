"""Logit bias, allowed tokens, bad words and minimum length: sparse edits of a few logits, decided on the device.

A row's lists are uploaded once, when it is added; `combine` joins those of a batch, and `JoinedEdits.placed` says where
they hold: for a row with drafts at several positions. What depends on the history (bad words of several tokens, minimum
length) is evaluated on the device, which alone knows the last token.
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
_ALL: torch.Tensor | slice = slice(None)


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


class JoinedEdits(msgspec.Struct, frozen=True):
    """The edits of rows, one row's behind the other's."""

    places: np.ndarray
    """int64 `[n]`: of these rows in their batch, ascending"""
    sizes: np.ndarray
    """int64 `[5, n]`: how many edits a row has, 1 where it has allowed tokens, of which so many, how many bad sequences
    and how many tokens before their last ones"""
    lists: RowEdits
    """`prefix_of` counts sequences of the same row"""

    def placed(self, each: np.ndarray | None, device: torch.device) -> BatchEdits:
        """`each`: at how many consecutive positions every row of the batch is sampled, int64; None: at one."""
        places, sizes, lists = self.places, self.sizes, self.lists
        edit = limit = word = prefix = _ALL
        if each is not None:
            times, first = each[places], np.cumsum(sizes, axis=1) - sizes
            places, sizes = ranges((np.cumsum(each) - each)[places], times), np.repeat(sizes, times, axis=1)
            edit, _, limit, word, prefix = (
                upload(ranges(old, own), torch.int64, device) if own.any() else _ALL
                for old, own in zip(np.repeat(first, times, axis=1), sizes)
            )
        edit_at, limited, allowed_at, last_at = (
            upload(np.repeat(places, own), torch.int64, device) for own in sizes[:4]
        )
        sequences = np.repeat(np.cumsum(sizes[3]) - sizes[3], sizes[4])
        return BatchEdits(
            edit_at=edit_at,
            ids=lists.ids[edit],
            values=lists.values[edit],
            until=lists.until[edit],
            limited=limited,
            allowed_at=allowed_at,
            allowed=lists.ids[:0] if lists.allowed is None else lists.allowed[limit],
            last_at=last_at,
            last=lists.last[word],
            prefix=lists.prefix[prefix],
            prefix_of=lists.prefix_of[prefix] + upload(sequences, torch.int64, device),
            prefix_back=lists.prefix_back[prefix],
            prefix_len=lists.prefix_len[word],
        )


def combine(rows: Sequence[tuple[int, RowEdits]], device: torch.device) -> JoinedEdits | None:
    """Join the edits of rows, each given with its place in the batch, ascending."""
    if not rows:
        return None
    edits = [e for _, e in rows]
    allowed = [e.allowed for e in edits if e.allowed is not None]
    sizes = [
        (len(e.ids), e.allowed is not None, 0 if e.allowed is None else len(e.allowed), len(e.last), len(e.prefix))
        for e in edits
    ]
    lists = RowEdits(
        ids=torch.cat([e.ids for e in edits]),
        values=torch.cat([e.values for e in edits]),
        until=torch.cat([e.until for e in edits]),
        allowed=torch.cat(allowed) if allowed else None,
        last=torch.cat([e.last for e in edits]),
        prefix=torch.cat([e.prefix for e in edits]),
        prefix_of=torch.cat([e.prefix_of for e in edits]),
        prefix_back=torch.cat([e.prefix_back for e in edits]),
        prefix_len=torch.cat([e.prefix_len for e in edits]),
    )
    return JoinedEdits(np.array([at for at, _ in rows], np.int64), np.array(sizes, np.int64).T, lists)


def ranges(first: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """`first[i] .. first[i] + sizes[i] - 1` for each i, one behind the other; int64."""
    ends = np.cumsum(sizes)
    values: np.ndarray = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - ends + sizes, sizes)
    return values
