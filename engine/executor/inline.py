"""Steps in the thread that asks for them: on a CPU, planning and computing share the same cores.

There a thread of its own for the runner hides nothing. What the core's loop does meanwhile takes a core from the
computation, whose threads then wait for each other; both threads wait for one interpreter lock; and a step planned
ahead of its time delays whoever arrives by one step more. So the loop submits a step, and computes it in `collect`.
Loading, warming up and what is put in between steps stay in the runner's thread, which sleeps while steps run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from compilation.behind import Swap
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.executor.in_process import InProcessExecutor, Runner, _unwrap
from engine.executor.interface import Executor
from engine.runner.model_runner import ModelRunner
from engine.step import StepPlan, StepResult


class InlineExecutor(InProcessExecutor):
    """As `InProcessExecutor`, but `collect` computes the step: `done` is called at once."""

    def __init__(self, config: EngineConfig, load_runner: Callable[[EngineConfig], Runner] = ModelRunner.load) -> None:
        super().__init__(config, load_runner)
        self._plans: deque[StepPlan] = deque()
        self._turn = threading.Lock()
        """held by whoever uses the runner: a step, or what is put in between two"""
        self._prepared = False

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        self._refuse_when_closed()
        self._plans.append(plan)
        done()

    def collect(self) -> StepResult:
        if not self._plans:
            raise EngineError("collect without a submitted step: every step that was submitted has been collected")
        self._refuse_when_closed()
        if not self._prepared:
            self._bind()
            self._prepare_thread()
            self._prepared = True
        plan = self._plans.popleft()
        with self._turn:
            return _unwrap(self._result(plan.step_id, self._step(plan)))

    def _end_compilation(self, result: Swap | BaseException, seconds: float) -> None:
        with self._turn:
            super()._end_compilation(result, seconds)


def make_executor(config: EngineConfig) -> Executor:
    """The executor that suits the device: inline where steps are neither queued nor planned ahead."""
    if config.device.kind == "cpu" and not config.scheduler.async_scheduling:
        return InlineExecutor(config)
    return InProcessExecutor(config)
