"""A step with masked rows samples when its masks come, and no other step waits for any."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from test_in_process import FakeRunner, config, nothing

from engine.errors import EngineError
from engine.executor.in_process import InProcessExecutor
from engine.executor.inline import InlineExecutor
from engine.step import StepMasks, StepPlan


class MaskedRunner(FakeRunner):
    """Notes the masks of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.seen: dict[int, int] = {}

    def execute(self, plan: StepPlan, masks: Callable[[], StepMasks] | None = None) -> object:  # type: ignore[override]
        self.begun.append(plan.step_id)
        if plan.masked:
            assert masks is not None
            self.seen[plan.step_id] = int(masks().bits[0, 0])
        return super().execute(plan)


def masks(step_id: int, value: int) -> StepMasks:
    return StepMasks(step_id, np.full((1, 1), value, dtype=np.int32))


def plan(step_id: int, masked: bool) -> StepPlan:
    return StepPlan(step_id=step_id, masked=[0] if masked else [])


def test_the_forward_pass_begins_before_the_masks_come() -> None:
    runner = MaskedRunner()
    executor = InProcessExecutor(config(1), lambda _: runner)  # type: ignore[arg-type, return-value]
    executor.load()
    done = threading.Event()
    executor.submit(plan(0, True), done.set)
    executor.submit(plan(1, False), nothing)
    executor.submit(plan(2, True), nothing)
    deadline = time.monotonic() + 30
    while not runner.begun and time.monotonic() < deadline:
        time.sleep(0.001)
    assert runner.begun == [0] and not done.wait(0.05)
    executor.sample(masks(0, 7))
    assert executor.collect().step_id == 0 and executor.collect().step_id == 1
    executor.sample(masks(2, 9))
    assert executor.collect().step_id == 2
    assert runner.seen == {0: 7, 2: 9}
    executor.close()


def test_inline_steps_take_theirs_when_they_are_collected() -> None:
    runner = MaskedRunner()
    executor = InlineExecutor(config(1), lambda _: runner)  # type: ignore[arg-type, return-value]
    executor.load()
    executor.submit(plan(0, True), nothing)
    executor.sample(masks(0, 3))
    assert executor.collect().step_id == 0 and runner.seen == {0: 3}
    executor.close()


def test_masks_of_another_step_are_an_error() -> None:
    executor = InProcessExecutor(config(1), lambda _: MaskedRunner())  # type: ignore[arg-type, return-value]
    executor.load()
    executor.submit(plan(4, True), nothing)
    executor.sample(masks(3, 1))
    with pytest.raises(EngineError, match="masks of step 3 came for step 4"):
        executor.collect()
    executor.close()


def test_closing_does_not_wait_for_masks_that_will_not_come() -> None:
    executor = InProcessExecutor(config(1), lambda _: MaskedRunner())  # type: ignore[arg-type, return-value]
    executor.load()
    executor.submit(plan(0, True), nothing)
    closing = threading.Thread(target=executor.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
