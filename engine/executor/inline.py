"""Everything in the thread that asks for it: on a CPU, planning and computing share the same cores.

There a thread of its own for the runner hides nothing, and each step pays for two hand-overs (0.2 ms). So the loop
submits a step, and computes it in `collect`. What is compiled behind is put in by the thread that compiled it, while no
step runs.

The thread that loads the model must be the one that runs its steps: each thread that computes has helpers of its own,
and it is those of the one that loads that have cores for themselves (`affinity.Places`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.executor.in_process import InProcessExecutor, _unwrap
from engine.executor.runner import Runner
from engine.executor.team import Team, team_of
from engine.runner.model_runner import ModelRunner
from engine.step import StepMasks, StepPlan, StepResult

logger = logging.getLogger(__name__)

T = TypeVar("T")


class InlineExecutor(InProcessExecutor):
    """As `InProcessExecutor` without its threads: `done` is called at once, and `collect` computes the step."""

    computes_in_collect = True

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        self._refuse_when_closed()
        self._plans.append(plan)
        done()

    def collect(self) -> StepResult:
        if not self._plans:
            raise EngineError("collect without a submitted step: every step that was submitted has been collected")
        plan = self._plans.popleft()
        return self._call(lambda: _unwrap(self._result(plan.step_id, self._step(plan))))

    def team(self) -> Team | None:
        return team_of(self._config.device.threads)

    def _masks_of(self, plan: StepPlan) -> StepMasks:
        """Who is to send them is the one that would wait."""
        if self._masks.empty():
            raise EngineError(f"step {plan.step_id} waits for masks that did not come")
        return super()._masks_of(plan)

    def _start(self) -> None:
        self._plans: deque[StepPlan] = deque()
        self._turn = threading.Lock()
        """held by whoever uses the runner"""
        self._home: int | None = None

    def _stop(self) -> None:
        with self._turn:
            self._runner = None

    def _between_steps(self, work: Callable[[], None]) -> None:
        with self._turn:
            work()

    def _call(self, function: Callable[[], T]) -> T:
        self._refuse_when_closed()
        here = threading.get_ident()
        if self._home not in (None, here):
            logger.warning(
                "the model was loaded in another thread, and each keeps compute threads: small steps will be slow; "
                "make an LLM and use it in one thread"
            )
            with self._turn:
                self._settle()
        self._home = here
        with self._turn:
            return function()


def computes_inline(config: EngineConfig) -> bool:
    """Where steps are not planned ahead: as many are in flight as there are stages that compute one each."""
    return config.device.kind == "cpu" and config.scheduler.steps_in_flight == config.parallel.pipeline


def local_executor(
    config: EngineConfig,
    load_runner: Callable[[EngineConfig], Runner] = ModelRunner.load,
    leave: Callable[[], None] = lambda: None,
) -> InProcessExecutor:
    """An executor in this process that suits the device. `leave`: see `InProcessExecutor`."""
    kind = InlineExecutor if computes_inline(config) else InProcessExecutor
    return kind(config, load_runner, leave)
