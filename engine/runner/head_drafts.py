"""Drafts from a head that sees the target's own hidden states: EAGLE-3 (Li et al., 2025), and the target's own
multi-token prediction.

At position p the head is given what the target made of token p (EAGLE-3: fused from three of its layers; else its last
hidden state) and the embedding of token p + 1, and guesses token p + 2. Behind the last position that the target has
computed it goes on with its own output in the place of the target's.

What its keys and values are made of. Entry p is written when the target has computed p and token p + 1 is known, that
is at the end of the same step: within a prompt the next token is there, behind it the sampled one. So a chunk's first
position needs nothing of the chunk before. Three entries are less than exact, which costs acceptance and nothing else:
the last one of a cached prefix knows the next token of the sequence that computed it; the one at which samples of one
prompt part knows the first sample's; and those behind a wrong draft, until the target computes their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional as F

from engine.models.decoder_layer import Attend
from engine.runner.batch import StepBatch
from engine.runner.draft_passes import DraftPasses


class DraftHead(Protocol):
    dtype: torch.dtype

    @property
    def hidden_size(self) -> int: ...

    def fuse(self, shown: torch.Tensor) -> torch.Tensor:
        """What the target's forward pass returned of each token → [tokens, hidden_size]."""
        ...

    def guess(
        self, next_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend, index: int
    ) -> torch.Tensor:
        """`hidden` [tokens, hidden_size]: fused, or what this returned for the token before. int64 [tokens]: `next_ids`
        of the tokens behind those at `positions`. Returns [tokens, hidden_size], from which the token behind the next
        one is guessed. `index`: of the layer, for `attend`."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] → float32 [rows, vocab_size of the target], -inf where it cannot guess."""
        ...


class HeadProposer:
    """`layer`: the head's, counted behind the target's in `passes.attention`."""

    def __init__(self, head: DraftHead, layer: int, passes: DraftPasses) -> None:
        self._head, self._layer, self._passes, self._table = head, layer, passes, passes.table
        size = (self._table.max_rows, head.hidden_size)
        self._last = torch.zeros(size, dtype=head.dtype, device=self._table.tokens.device)
        """of each row, the head's output at the last position that the target has computed rightly"""
        self._ready: set[int] = set()

    def propose(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        """See `Proposer`. Rows that have not sampled a token of their own computing since they were added get none."""
        counts = [count if row in self._ready else 0 for row, count in zip(rows, most, strict=True)]
        drafting = self._passes.rows_of(rows, counts)
        if drafting is None:
            return counts
        hidden = self._last[drafting.rows]
        drafts = self._passes.write(drafting, self._head.compute_logits(hidden), 0)
        for index in range(1, max(counts)):
            count = drafting.at_least(index + 1)
            positions = drafting.known[:count] + index - 2
            self._passes.begin(drafting.rows[:count], positions)
            hidden = self._guess(drafts[:count], positions, hidden[:count])
            drafts = self._passes.write(drafting, self._head.compute_logits(hidden), index)
        return counts

    def observe(self, batch: StepBatch, hidden: torch.Tensor) -> None:
        """See `Proposer`. `hidden`: with what the target's layers show, if any do."""
        count = batch.attention[0].num_tokens
        shown = F.pad(hidden, (0, 0, 0, count - len(hidden)))
        rows, positions = self._rows_of_tokens(batch, count), batch.positions[:count]
        next_ids = self._table.tokens[rows, positions + 1].to(torch.int64)
        self._passes.attention.begin_step(batch.attention)
        guessed = self._guess(next_ids, positions, self._head.fuse(shown))
        self._keep_last(batch, guessed)

    def end(self, row: int) -> None:
        """See `Proposer`."""
        self._ready.discard(row)

    def _guess(self, next_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.guess(next_ids, positions, hidden, self._passes.attention.attend, self._layer)

    def _rows_of_tokens(self, batch: StepBatch, count: int) -> torch.Tensor:
        """int64 [count]; a padding's is any."""
        rows = np.repeat(batch.rows.row, batch.rows.query_lens)
        return self._passes.upload(np.pad(rows, (0, count - len(rows))).tolist())

    def _keep_last(self, batch: StepBatch, guessed: torch.Tensor) -> None:
        """Of rows that sampled behind a token of their own: the head's output at the last right position."""
        rows, each = batch.sample_rows_host, batch.positions_each
        first = range(len(rows)) if each is None else (np.cumsum(each) - each).tolist()
        computed = set(batch.rows.row[batch.rows.query_lens > 0].tolist())
        places = [place for place in first if rows[place] in computed]
        self._ready.difference_update(rows)
        if not places:
            return
        numbers, at = [rows[place] for place in places], self._passes.upload(places)
        on_device = self._passes.upload(numbers)
        if each is not None:
            at = at + self._table.lengths[on_device] - 1 - batch.sample_positions[at]
        self._last[on_device] = guessed[batch.logits_indices[at]]
        self._ready.update(numbers)
