"""What a step has to do with drafts: nothing, where nobody proposes any."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from engine.runner.batch import StepBatch
from engine.runner.proposals import Proposer
from engine.step import StepPlan


class StepDrafts:
    """Of one runner."""

    def __init__(self, proposer: Proposer | None) -> None:
        self._proposer = proposer

    def propose(self, plan: StepPlan) -> dict[int, int]:
        """Drafts of rows that compute some and were not given any, behind what they know; how many there are of each,
        by row. On the stream of the step, behind the plan's writes and moves of blocks."""
        rows = plan.rows
        if self._proposer is None or not len(rows) or rows.samples.max() <= 1:
            return {}
        some = (rows.samples > 1) & ~np.isin(rows.row, plan.drafts.where[1])
        proposed = rows.row[some].tolist()
        return dict(zip(proposed, self._proposer.propose(proposed, (rows.samples[some] - 1).tolist()), strict=True))

    def observe(self, batch: StepBatch, hidden: torch.Tensor) -> None:
        """See `Proposer.observe`."""
        if self._proposer is not None:
            self._proposer.observe(batch, hidden)

    def end(self, rows: Iterable[int]) -> None:
        """Rows that are about to be given away."""
        if self._proposer is not None:
            for row in rows:
                self._proposer.end(row)

    @property
    def proposes(self) -> bool:
        return self._proposer is not None
