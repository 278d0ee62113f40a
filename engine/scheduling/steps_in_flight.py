"""Steps that were planned and whose results have not arrived, and who was on which row in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

import numpy as np

from engine.errors import EngineError
from engine.scheduling.sequence import Sequence
from engine.scheduling.steady_rows import SteadyStep
from engine.scheduling.steady_searches import SearchesStep
from engine.step import ScheduledRow, ScheduledRows, StepResult

Rows = list[tuple[Sequence, ScheduledRow]]
"""in the plan's order; a row's owner at planning time, which may have ended or moved since"""


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """Of one plan, in its order."""

    steady: SteadyStep | None
    """each computes a token and samples one, not its last; None: there are none"""
    searches: list[SearchesStep]
    """each row computes a token and brings candidates"""
    others: Rows

    @property
    def num_tokens(self) -> int:
        return self.num_steady + sum(row.query_len for _, row in self.others)

    @property
    def num_steady(self) -> int:
        """In columns."""
        return sum(len(step) for step in self.columns)

    @property
    def columns(self) -> list[SteadyStep | SearchesStep]:
        return [*([self.steady] if self.steady is not None else []), *self.searches]

    @property
    def num_decodes(self) -> int:
        """Rows that compute a token and sample the next one."""
        return self.num_steady + sum(row.query_len == 1 and row.samples for _, row in self.others)

    @property
    def scheduled(self) -> Tokens[ScheduledRow]:
        """What the plan says of them."""
        others = [row for _, row in self.others]
        columns = self.columns
        if not columns:
            return others
        rows = [step.rows.ravel() for step in columns]
        computed = [step.positions for step in columns]
        return ScheduledRows(np.concatenate(rows), np.concatenate(computed), others)

    def __len__(self) -> int:
        return self.num_steady + len(self.others)


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
        planned = rows.num_steady + sum(row.samples for _, row in rows.others)
        if len(result.token_ids) != planned:
            raise EngineError(f"step {step_id} was to sample {planned} tokens, not {len(result.token_ids)}")
        return rows
