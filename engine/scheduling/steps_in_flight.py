"""Steps that were planned and whose results have not arrived, and who was on which row in them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.errors import EngineError
from engine.scheduling.sequence import Sequence
from engine.step import ScheduledRow, StepResult

Rows = list[tuple[Sequence, ScheduledRow]]
"""in the plan's order; a row's owner at planning time, which may have ended or moved since"""


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Of one plan, in its order: first those of steady sequences, each of which samples one token, not its last."""

    steady: list[Sequence]
    steady_rows: list[ScheduledRow]
    others: Rows

    @property
    def num_tokens(self) -> int:
        return len(self.steady) + sum(row.query_len for _, row in self.others)

    @property
    def all(self) -> Rows:
        return [*zip(self.steady, self.steady_rows, strict=True), *self.others]

    def __len__(self) -> int:
        return len(self.steady) + len(self.others)


class StepsInFlight:
    def __init__(self) -> None:
        self._steps: deque[tuple[int, PlannedRows]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def push(self, step_id: int, rows: PlannedRows) -> None:
        self._steps.append((step_id, rows))

    def pop(self, result: StepResult) -> PlannedRows:
        """The rows of the oldest step, whose result this must be. Raises EngineError."""
        if not self._steps or self._steps[0][0] != result.step_id:
            expected = self._steps[0][0] if self._steps else "none"
            raise EngineError(f"the result of step {result.step_id} arrived, expected that of step {expected}")
        step_id, rows = self._steps.popleft()
        planned = len(rows.steady) + sum(row.samples for _, row in rows.others)
        if len(result.token_ids) != planned:
            raise EngineError(f"step {step_id} was to sample {planned} tokens, not {len(result.token_ids)}")
        return rows
