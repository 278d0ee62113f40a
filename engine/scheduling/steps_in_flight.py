"""Steps that were planned and whose results have not arrived, and who was on which row in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine.errors import EngineError
from engine.scheduling.sequence import Sequence
from engine.step import Rows, ScheduledRow, StepResult


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Nobody writes to the arrays any more."""

    rows: Rows
    """the plan's"""
    owners: np.ndarray
    """object [rows]: the sequences, which may have ended or moved since"""
    entries: np.ndarray
    """int64 [plain]: of the first ones, which compute and sample a token each, and nothing else: when their owners came
    to these rows"""
    masked: list[int]
    """the plan's"""

    @property
    def num_plain(self) -> int:
        return len(self.entries)

    def others(self) -> Iterator[tuple[Sequence, ScheduledRow]]:
        plain = self.num_plain
        columns = self.rows.columns[:, plain:].tolist()
        for seq, *row in zip(self.owners[plain:].tolist(), *columns, strict=True):
            yield seq, ScheduledRow(*row)


class StepsInFlight:
    def __init__(self) -> None:
        self._steps: deque[tuple[int, PlannedStep]] = deque()
        self.last_masked = -1
        self.next_id = 0
        """of the step that is planned next"""

    def __len__(self) -> int:
        return len(self._steps)

    def push(self, step_id: int, step: PlannedStep) -> None:
        self._steps.append((step_id, step))
        self.next_id = step_id + 1

    def are_complete(self, before: int) -> bool:
        """All steps that come before the one with this id."""
        return not self._steps or self._steps[0][0] >= before

    def oldest_masked(self) -> tuple[int, PlannedStep] | None:
        """The oldest step, if it has masked rows that have not been told."""
        if not self._steps or not self._steps[0][1].masked or self._steps[0][0] == self.last_masked:
            return None
        return self._steps[0]

    def pop(self, result: StepResult) -> PlannedStep:
        """The oldest step, whose result this must be. Raises EngineError."""
        if not self._steps or self._steps[0][0] != result.step_id:
            expected = self._steps[0][0] if self._steps else "none"
            raise EngineError(f"the result of step {result.step_id} arrived, expected that of step {expected}")
        step_id, step = self._steps.popleft()
        samples = step.rows.samples
        planned, brought = np.count_nonzero(samples), len(result.token_ids)
        if result.counts:
            counts, most = np.array(result.counts), samples[samples > 0]
            if len(counts) != planned or (counts < 1).any() or (counts > most).any() or counts.sum() != brought:
                raise EngineError(f"step {step_id} was to sample {most} tokens at most, not {counts} ({brought})")
        elif brought != planned:
            raise EngineError(f"step {step_id} was to sample {planned} tokens, not {brought}")
        return step
