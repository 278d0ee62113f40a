"""What a runner does that computes a stage of a model: states come from the stage before, and go to the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from attention_backends.interface import AttentionLayer
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.layer_groups import LayerGroup, group_layers, with_layers_behind
from engine.models.decoder import Decoder
from engine.observability import step_profile
from engine.observability.step_profile import StepObserver
from engine.parallel.stage_link import StateLink
from engine.runner.batch import StepBatch
from engine.runner.kernels import InputKernels
from engine.runner.loading import RunnerParts, device_of
from engine.runner.paged_attention import attention_layers
from engine.runner.request_table import RequestTable
from engine.runner.results import SampledStep
from engine.runner.staging import Values
from engine.runner.step_sampler import StepSampler, WaitForMasks
from engine.sampling import Sampler
from engine.step import RowParams, StepPlan, StepResult


class _Sampled(NamedTuple):
    """Positions of a step whose tokens are not known here."""

    step_id: int
    number: int
    rows: np.ndarray
    first: np.ndarray
    """of each row, where its first token goes"""


class PassingOn:
    """In the place of `Sampler` and `StepSampler` in a stage that is not the last one: states are passed on, and what
    is sampled from them is told later (`learn`), before a step needs it."""

    max_workspace_bytes = 0

    def __init__(self, after: StateLink, table: RequestTable) -> None:
        self._after, self._table = after, table
        self._number = 0
        """of steps that were computed"""
        self._entered = np.zeros(table.max_rows, dtype=np.int64)
        """before which step of these each row was given to its owner"""
        self._waiting: deque[_Sampled] = deque()

    def run(
        self, plan: StepPlan, batch: StepBatch, hidden: torch.Tensor, observer: StepObserver, masks: WaitForMasks
    ) -> SampledStep:
        observer.mark(step_profile.LOGITS)
        self._after.send(plan.step_id, hidden)
        rows = batch.rows
        if (sampling := rows.samples > 0).any():
            first = (rows.computed + rows.query_lens - rows.samples + 1)[sampling]
            self._waiting.append(_Sampled(plan.step_id, self._number, rows.row[sampling], first))
        self._number += 1
        return SampledStep(plan.step_id, rows=(), sampled=None)

    def learn(self, result: StepResult) -> None:
        """Tokens of a step, into the table. A row that has been given away meanwhile is not touched."""
        while self._waiting and self._waiting[0].step_id != result.step_id:
            self._waiting.popleft()  # of steps of the start nothing is told
        if not self._waiting:
            raise EngineError(f"tokens of step {result.step_id} came, which this stage has not computed")
        step = self._waiting.popleft()
        tokens, lengths = self._table.tokens.numpy(), self._table.lengths.numpy()
        sampled = np.array(result.token_ids, dtype=np.int32)
        counts = np.array(result.counts, dtype=np.int64) if result.counts else np.ones(len(step.rows), dtype=np.int64)
        same = self._entered[step.rows] <= step.number
        rows, starts = np.repeat(step.rows, counts), np.repeat(step.first, counts)
        ahead = np.arange(len(sampled)) - np.repeat(np.cumsum(counts) - counts, counts)
        kept = np.repeat(same, counts)
        tokens[rows[kept], (starts + ahead)[kept]] = sampled[kept]
        lengths[step.rows[same]] = (step.first + counts)[same]

    def add(self, row: int, params: RowParams, token_ids: Sequence[int], prompt_len: int) -> None:
        self._entered[row] = self._number

    def release(self, row: int) -> None:
        """Nothing is kept."""

    def tables(self) -> list[torch.Tensor]:
        return []

    def drain_writes(self) -> Sequence[tuple[int, int, int, Values]]:
        return ()

    def warm_up(self) -> None:
        """Nothing is computed."""


def groups_and_layers(config: EngineConfig, parts: RunnerParts) -> tuple[tuple[LayerGroup, ...], list[AttentionLayer]]:
    """The layers that attend, a draft's behind the model's, and the groups that they keep keys and values in."""
    facts = parts.facts if parts.context is None else parts.context.whole
    if parts.stage is not None:
        groups = parts.stage.groups
    else:
        groups = group_layers(facts.kept, config.model.max_model_len)
    layers = attention_layers(facts, parts.sinks, parts.latents)
    if parts.draft is not None:
        groups = with_layers_behind(groups, len(layers), parts.draft.facts.num_layers)
        latents = parts.draft.model.latents if isinstance(parts.draft.model, Decoder) else ()
        layers += attention_layers(parts.draft.facts, latents=latents)
    if parts.state is not None:
        groups = (*groups, LayerGroup((), parts.state))
    return groups, layers


def samplers_of(
    config: EngineConfig, parts: RunnerParts, table: RequestTable, kernels: InputKernels
) -> tuple[Sampler | PassingOn, StepSampler | PassingOn]:
    """What follows the forward pass: with the tables of rows, and for each step."""
    if parts.stage is not None and parts.stage.after is not None:
        passing_on = PassingOn(parts.stage.after, table)
        return passing_on, passing_on
    rows, length, cache_dir = config.scheduler.max_num_seqs, config.model.max_model_len, Path(config.compile.cache_dir)
    sampler = Sampler(rows, parts.facts.vocab_size, device_of(config), length, cache_dir=cache_dir)
    return sampler, StepSampler(parts, sampler, table, kernels)


def example_inputs(parts: RunnerParts, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For a trace of the model: tokens, or what the stage before makes of them, and positions."""
    positions = torch.arange(tokens, dtype=torch.int64, device=device)
    if parts.stage is None or parts.stage.before is None:
        return positions.clone(), positions
    return torch.ones(tokens, parts.facts.hidden_size, dtype=parts.dtype, device=device), positions
