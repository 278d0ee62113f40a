"""What one rank of a group computes with: an executor in its own process, over its part of the model."""

from __future__ import annotations

import functools
from collections.abc import Callable

from engine.config import EngineConfig
from engine.executor.in_process import InProcessExecutor
from engine.executor.inline import InlineExecutor, computes_inline, local_executor
from engine.executor.runner import Runner
from engine.parallel.group import Group
from engine.runner.loading import load_parts
from engine.runner.model_runner import ModelRunner
from engine.step import StepMasks, StepPlan, StepResult


def rank_executor(
    config: EngineConfig, group: Group, receive_masks: Callable[[], StepMasks] | None
) -> InProcessExecutor:
    """For `rank.MakeExecutor`, of the model that `config` names."""

    def load_runner(config: EngineConfig) -> ModelRunner:
        return ModelRunner.load(config, functools.partial(load_parts, group=group))

    return executor_of(config, load_runner, receive_masks)


def executor_of(
    config: EngineConfig,
    load_runner: Callable[[EngineConfig], Runner],
    receive_masks: Callable[[], StepMasks] | None,
) -> InProcessExecutor:
    """`receive_masks` is a worker's, whose steps are computed by the thread that is to receive their masks."""
    if receive_masks is not None and computes_inline(config):
        return _Receiving(config, load_runner, receive_masks)
    return local_executor(config, load_runner)


class _Receiving(InlineExecutor):
    """A step with masked rows asks for its masks when its forward pass has been computed. A stage, which samples
    nothing, is told what was sampled."""

    def __init__(
        self,
        config: EngineConfig,
        load_runner: Callable[[EngineConfig], Runner],
        receive_masks: Callable[[], StepMasks],
    ) -> None:
        super().__init__(config, load_runner)
        self._receive_masks = receive_masks

    def learn(self, result: StepResult) -> None:
        """See `rank.StageExecutor`."""
        runner = self._loaded()
        assert isinstance(runner, ModelRunner)
        self._call(lambda: runner.learn(result))

    def _masks_of(self, plan: StepPlan) -> StepMasks:
        self.sample(self._receive_masks())
        return super()._masks_of(plan)
