"""The pace of real steps beside a table's: of those that only decode."""

from __future__ import annotations

import pytest
from virtual_clusters import costs

from engine.core.wire import AddRequest, CoreStats, RowParams, SequenceDelta, StepOutputs, StepTaken
from entrypoints.bench.cluster.costs import StepWork
from entrypoints.bench.cluster.pace import Pace
from entrypoints.bench.cluster.traffic import Arrival


def arrival(name: str, prompt: int) -> Arrival:
    params = RowParams(seed=0)
    return Arrival(0.0, AddRequest(request_id=name, prompt_token_ids=[5] * prompt, params=params, max_tokens=9))


def step(tokens: int, seconds: float, *names: str) -> StepOutputs:
    deltas = [SequenceDelta(request_id=name, token_ids=[7]) for name in names]
    return StepOutputs(deltas=list(deltas), stats=CoreStats(), step=StepTaken(seconds, tokens))


def test_only_steps_that_decode_count() -> None:
    table = costs(decode_context=1e-4)
    pace = Pace(table, [arrival("a", 10), arrival("b", 1)])
    for outputs in (
        step(10, 9.0, "a"),  # a prompt
        step(2, 9.0, "a", "b"),  # a prompt of one token beside a row that decodes
        StepOutputs(deltas=[], stats=CoreStats()),
    ):
        pace.take_in(outputs)
    assert pace.found is None
    first, second = StepWork(2, 2, 12 + 2, 0), StepWork(1, 1, 13, 0)
    pace.take_in(step(2, 1.5 * table.seconds(first), "a", "b"))
    pace.take_in(step(1, 1.5 * table.seconds(second), "a"))
    assert pace.found == pytest.approx(1.5)
    slower = table.at_pace(1.5)
    assert slower.seconds(StepWork(40, 1, 0, 800)) == pytest.approx(1.5 * table.seconds(StepWork(40, 1, 0, 800)))
