"""Drafts from a second, smaller language model over the same vocabulary (speculative sampling, Leviathan et al., 2023).

It reads what the target reads: its keys and values cover what the target has computed, so that prefixes, forks and
swapped blocks serve both. In steps for which it has proposed, its own passes have done that already, but for the last
draft; that one it reads when it proposes again, or else with the row's next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import torch

from engine.models.decoder import Decoder
from engine.runner.batch import StepBatch
from engine.runner.draft_passes import DraftPasses


class DraftModelProposer:
    """`model`: its attention goes to layers behind the target's."""

    def __init__(self, model: Decoder, passes: DraftPasses) -> None:
        self._model, self._passes, self._table = model, passes, passes.table
        self._ready: set[int] = set()
        """rows that sampled in a step that was observed"""
        self._level: set[int] = set()
        """those of whose tokens the model has read what the target has; of others perhaps one less"""
        self._proposed: set[int] = set()
        """in the step that computes"""

    def propose(self, rows: Sequence[int], most: Sequence[int]) -> list[int]:
        """See `Proposer`. Rows that have not sampled since they were added get none."""
        counts = [count if row in self._ready else 0 for row, count in zip(rows, most, strict=True)]
        drafting = self._passes.rows_of(rows, counts)
        if drafting is None:
            return counts
        known = drafting.known
        behind = self._passes.upload([at for at, row in enumerate(drafting.numbers) if row not in self._level])
        for index in range(max(counts)):
            count = drafting.at_least(index + 1)
            at, positions = drafting.rows[:count], known[:count] + index - 1
            if index == 0 and len(behind):
                at = torch.cat((drafting.rows[behind], at))
                positions = torch.cat((known[behind] - 2, positions))
            hidden = self._read(at, positions)[-count:]
            self._passes.write(drafting, self._model.compute_logits(hidden), index)
        self._proposed.update(drafting.numbers)
        return counts

    def observe(self, batch: StepBatch, hidden: torch.Tensor) -> None:
        """See `Proposer`. `hidden` is not looked at."""
        drafted, self._proposed = self._proposed, set()
        in_step = set(batch.rows.row[batch.rows.query_lens > 0].tolist())
        self._level -= drafted
        if not in_step <= drafted:
            self._read_holes(batch, drafted | self._level)
            self._passes.attention.begin_step(batch.attention)
            count = batch.attention[0].num_tokens
            self._model(batch.input_ids[:count], batch.positions[:count])
            self._level |= in_step
        self._ready.update(batch.sample_rows_host)

    def end(self, row: int) -> None:
        """See `Proposer`."""
        self._ready.discard(row)
        self._level.discard(row)

    def _read_holes(self, batch: StepBatch, but: AbstractSet[int]) -> None:
        """Nobody has read a row's last draft if it was right: the token before the first one of this step. So it may be
        where a row goes on in blocks that another one filled, or that were swapped."""
        rows, starts = batch.rows, np.cumsum(batch.rows.query_lens) - batch.rows.query_lens
        places = np.flatnonzero((rows.query_lens > 0) & (rows.computed > 0) & ~np.isin(rows.row, list(but)))
        if len(places):
            at = self._passes.upload(rows.row[places].tolist())
            self._read(at, batch.positions[self._passes.upload(starts[places].tolist())] - 1)

    def _read(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One token of each, which the table holds. [rows, hidden_size]"""
        self._passes.begin(rows, positions)
        ids = self._table.tokens[rows, positions].to(torch.int64)
        hidden: torch.Tensor = self._model(ids, positions)
        return hidden
