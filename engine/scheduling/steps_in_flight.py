"""Steps that were planned and whose results have not arrived, and who was on which row in them."""

from __future__ import annotations

from collections import deque

from engine.errors import EngineError
from engine.scheduling.sequence import Sequence
from engine.step import ScheduledRow, StepResult

Rows = list[tuple[Sequence, ScheduledRow]]
"""in the plan's order; a row's owner at planning time, which may have ended or moved since"""


class StepsInFlight:
    def __init__(self) -> None:
        self._steps: deque[tuple[int, Rows]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def push(self, step_id: int, rows: Rows) -> None:
        self._steps.append((step_id, rows))

    def pop(self, result: StepResult) -> Rows:
        """The rows of the oldest step, whose result this must be. Raises EngineError."""
        if not self._steps or self._steps[0][0] != result.step_id:
            expected = self._steps[0][0] if self._steps else "none"
            raise EngineError(f"the result of step {result.step_id} arrived, expected that of step {expected}")
        step_id, rows = self._steps.popleft()
        planned = sum(row.samples for _, row in rows)
        if len(result.token_ids) != planned:
            raise EngineError(f"step {step_id} was to sample {planned} tokens, not {len(result.token_ids)}")
        return rows
