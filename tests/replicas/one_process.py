"""The oracle of experts divided over replicas: an executor of one process that computes every replica's part of them,
one after another, and adds up with plain torch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import torch

from engine.config import EngineConfig
from engine.executor.inline import InlineExecutor
from engine.models.decoder import Decoder
from engine.models.expert_exchange import DividedExperts
from engine.models.placement import ExpertPlacement
from engine.parallel.group import RowsGroup
from engine.parallel_config import ParallelConfig
from engine.runner.loading import RunnerParts, load_parts
from engine.runner.model_runner import ModelRunner


class AllParts:
    """Layers of one replica, with the experts of all."""

    def __init__(self, size: int, placement: ExpertPlacement) -> None:
        self._size, self._placement = size, placement
        self._of_ranks: list[Decoder] = []

    def executor(self, config: EngineConfig) -> InlineExecutor:
        return InlineExecutor(config, lambda config: ModelRunner.load(config, self._load))

    def _load(self, config: EngineConfig) -> RunnerParts:
        divided = msgspec.structs.replace(config, parallel=ParallelConfig(data=self._size, experts=self._placement))
        parts = []
        for rank in range(self._size):
            group = cast(RowsGroup, SimpleNamespace(rank=rank, size=self._size, name="nobody"))
            parts.append(load_parts(divided, replicas=group))
            assert isinstance(parts[-1].model, Decoder)
            self._of_ranks.append(parts[-1].model)
        for layer in self._of_ranks[0].layers:
            experts: Any = layer.experts
            if isinstance(experts, DividedExperts):
                experts._exchange = self._compute
        return replace(parts[0], exchange=None)

    def _compute(
        self, x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, residual: torch.Tensor | None, layer: int
    ) -> torch.Tensor:
        total = torch.zeros_like(x, dtype=torch.float32)
        for index, model in enumerate(self._of_ranks):
            experts: Any = model.layers[layer].experts
            made = experts.part(x, ids, factors).float()
            total = made if index == 0 else total + made
        y = total.to(x.dtype)
        return y if residual is None else (residual.float() + y.float()).to(x.dtype)
