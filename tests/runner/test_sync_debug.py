"""With `debug_sync`, exactly the steady decode steps run in torch's error mode, which is put back after each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plan_driver import tiny_runner
from test_runner_equals_dense import GREEDY, start

from engine.runner.model_runner import ModelRunner
from engine.runner.sync_debug import is_steady_decode
from engine.step import NewRow, Rows, ScheduledRow, StepPlan, Write, Writes


class FakeMode:
    """torch's process-wide setting, without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode: int | str = 1
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set)

    def set(self, mode: int | str) -> None:
        self.mode = mode


def decode(step_id: int, computed: int, **differences: list[int]) -> StepPlan:
    row = ScheduledRow(row=0, computed=computed, query_len=1, samples=True)
    return StepPlan(step_id=step_id, rows=Rows.of([row]), **differences)


def modes_of_forward(runner: ModelRunner, fake: FakeMode, plans: list[StepPlan]) -> list[int | str]:
    seen: list[int | str] = []
    run = runner._run

    def watched(*inputs: torch.Tensor) -> torch.Tensor:
        seen.append(fake.mode)
        return run(*inputs)

    runner._run = watched
    for plan in plans:
        runner.execute(plan).wait()
        assert fake.mode == 1
    return seen


@pytest.mark.parametrize(("debug_sync", "steady"), [(True, "error"), (False, 1)])
def test_steady_decode_steps_run_in_error_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, debug_sync: bool, steady: int | str
) -> None:
    fake = FakeMode(monkeypatch)
    runner = tiny_runner(tmp_path, debug_sync=debug_sync)
    plans = [start(runner, [1, 2, 3], [0]), decode(2, 3), decode(3, 4), StepPlan(step_id=4, released=[0])]
    plans[2] = StepPlan(step_id=3, rows=plans[2].rows, block_appends=Writes.of([Write(0, 0, 1, [7])]))
    assert modes_of_forward(runner, fake, plans) == [1, steady, steady]


def test_the_mode_is_put_back_when_a_step_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMode(monkeypatch)
    runner = tiny_runner(tmp_path, debug_sync=True)
    runner.execute(start(runner, [1, 2], [0])).wait()

    def fail(*inputs: torch.Tensor) -> torch.Tensor:
        assert fake.mode == "error"
        raise RuntimeError("called a synchronizing CUDA operation")

    runner._run = fail
    with pytest.raises(RuntimeError, match="synchronizing"):
        runner.execute(decode(2, 2))
    assert fake.mode == 1


def test_a_step_is_steady_when_every_row_decodes_and_none_is_new() -> None:
    assert is_steady_decode(decode(0, 5)) and is_steady_decode(decode(0, 5, released=[3]))
    assert not is_steady_decode(StepPlan(step_id=0))
    new = NewRow(row=1, token_ids=[1], prompt_len=1, params=GREEDY)
    assert not is_steady_decode(StepPlan(step_id=0, rows=decode(0, 5).rows, added=[new]))
    chunk = ScheduledRow(row=0, computed=0, query_len=2, samples=False)
    assert not is_steady_decode(StepPlan(step_id=0, rows=Rows.of([chunk])))
