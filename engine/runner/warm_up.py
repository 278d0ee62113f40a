"""Small steps that a runner takes before it serves, so that kernels are loaded, tuned and cached before the first
request."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import EngineConfig
from engine.step import NewRow, RowParams, Rows, ScheduledRow, StepPlan, Write, Writes

_PROMPT_TOKENS = 16


def warm_up_plans(config: EngineConfig, num_groups: int = 1) -> Iterator[StepPlan]:
    """A prefill, a mixed step and a decode step over rows 0 and 1, one greedy and one drawn; then the rows are free
    again.

    Both rows use block 0 only, so every cache is large enough. What they leave there is never read: a block's slots are
    written before the sequence that owns it reads them.
    """
    length = min(_PROMPT_TOKENS, config.cache.block_size, config.model.max_model_len) - 1
    length = min(length, config.scheduler.max_num_batched_tokens - 1)
    if length < 1:
        return
    params = (RowParams(seed=0, temperature=0.0), RowParams(seed=0, top_p=0.9, top_k=50))

    def added(row: int) -> NewRow:
        return NewRow(row=row, token_ids=[0] * length, prompt_len=length, params=params[row])

    def prefill(row: int) -> ScheduledRow:
        return ScheduledRow(row=row, computed=0, query_len=length, samples=True)

    def decode(row: int) -> ScheduledRow:
        return ScheduledRow(row=row, computed=length, query_len=1, samples=True)

    def blocks(row: int) -> Writes:
        return Writes.of(Write(group, row, 0, [0]) for group in range(num_groups))

    yield StepPlan(step_id=-3, rows=Rows.of([prefill(0)]), added=[added(0)], block_appends=blocks(0))
    if config.scheduler.max_num_seqs == 1:
        yield StepPlan(step_id=-2, rows=Rows.of([decode(0)]))
        yield StepPlan(step_id=-1, released=[0])
        return
    yield StepPlan(step_id=-2, rows=Rows.of([decode(0), prefill(1)]), added=[added(1)], block_appends=blocks(1))
    yield StepPlan(step_id=-1, rows=Rows.of([decode(1)]), released=[0])
    yield StepPlan(step_id=0, released=[1])
