"""The device side of a step: apply a plan's differences, build the batch, run the model, sample, send the results
off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from attention_backends.op import ATTENTION_OP
from compilation.counter import CompileCounter
from compilation.interface import CompileReport, CompileSettings
from compilation.model import compile_model
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.runner.batch import BatchBuilder, StepBatch
from engine.runner.kernels import select_kernels
from engine.runner.loading import RunnerParts, device_of, load_parts
from engine.runner.memory import device_memory, estimate_activation_bytes, measure_activation_bytes
from engine.runner.paged_attention import PagedAttention, attention_layers
from engine.runner.request_table import RequestTable
from engine.runner.results import PendingResult, ResultCopier, SampledStep
from engine.runner.staging import StagedWrites
from engine.runner.warm_up import warm_up_plans
from engine.sampling import LogprobTensors, Sampler
from engine.step import LoadReport, ScheduledRow, StepPlan, WarmUpReport

_NUM_GROUPS = 1
"""layer groups with block tables of their own; in every family of today all layers keep full tables"""
_PROMPT_LOGITS_BYTES = 64 << 20
"""logits of prompt positions are made and scored in pieces of at most this size"""
_EXAMPLE_TOKENS = 8


class ModelRunner:
    """One model on one device. All calls come from one thread; a step's result may be awaited in another."""

    def __init__(self, config: EngineConfig, parts: RunnerParts, memory_before: tuple[int, int]) -> None:
        """`memory_before`: (total, free) bytes of the device before the parts were loaded."""
        rows, budget = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        self._config = config
        self._device = device = device_of(config)
        self._model = parts.model
        self._run: Callable[..., torch.Tensor] = parts.model
        self._kernels = select_kernels(device)
        self._attention = PagedAttention(
            parts.backend, attention_layers(parts.spec), getattr(torch, config.cache.dtype)
        )
        self._table = RequestTable(rows, config.model.max_model_len, config.cache.block_size, _NUM_GROUPS, device)
        self._sampler = Sampler(rows, parts.spec.vocab_size, device, config.model.max_model_len)
        self._writes = StagedWrites([*self._table.staged_tables(), *self._sampler.tables()], self._kernels, device)
        self._batches = BatchBuilder(self._table, self._kernels, budget, config.cache.block_size, device)
        self._results = ResultCopier(device)
        self._counter = CompileCounter()
        self._prompt_piece = max(1, _PROMPT_LOGITS_BYTES // (4 * parts.spec.vocab_size))
        if device.type == "cuda":
            activation_bytes = measure_activation_bytes(parts.model, parts.spec, device, budget, rows)
        else:
            activation_bytes = estimate_activation_bytes(parts.spec, parts.dtype.itemsize, budget, rows)
        parts.model.set_attention(self._attention.attend)
        self.report = LoadReport(
            weight_bytes=parts.weight_bytes,
            activation_bytes=activation_bytes,
            workspace_bytes=(self._table.size_bytes + self._batches.size_bytes + self._sampler.max_workspace_bytes),
            block_bytes=self._attention.block_bytes(config.cache.block_size),
            device_bytes_total=memory_before[0],
            device_bytes_free=memory_before[1],
            attention_backend=parts.backend.name,
        )

    @classmethod
    def load(cls, config: EngineConfig, parts_of: Callable[[EngineConfig], RunnerParts] = load_parts) -> ModelRunner:
        """Load weights, choose the attention backend, allocate the tables, measure a step's memory.

        Raises ConfigError, UnsupportedModelError or WeightsError.
        """
        memory_before = device_memory(device_of(config))
        return cls(config, parts_of(config), memory_before)

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache."""
        self._attention.allocate(num_blocks, self._config.cache.block_size, self._device)

    def warm_up(self) -> WarmUpReport:
        """Compile the model as configured, then run a few small steps, so that nothing is built or tuned later."""
        started = time.perf_counter()
        report = self._compile() if self._config.compile.mode == "pieces" else None
        for plan in warm_up_plans(self._config):
            self.execute(plan).wait()
        self._counter.mark()
        seconds = time.perf_counter() - started
        if report is None:
            return WarmUpReport(seconds=seconds)
        return WarmUpReport(
            distinct_pieces=report.distinct_pieces, compiled=report.compiled, reused=report.loaded, seconds=seconds
        )

    def compiles_after_ready(self) -> int:
        """Traces and compilations since `warm_up` returned."""
        return self._counter.since_mark()

    def execute(self, plan: StepPlan) -> PendingResult:
        """Start one step. On CUDA this returns when everything is queued; on CPU when it is computed.

        Raises ValueError for a plan that does not fit the tables, EngineError for one that this runner cannot serve.
        """
        with torch.inference_mode():
            self._apply_differences(plan)
            if not plan.rows:
                return self._results.start(SampledStep(plan.step_id, rows=(), sampled=None))
            batch = self._batches.build(plan.rows)
            self._attention.begin_step(batch.attention)
            hidden = self._run(batch.input_ids, batch.positions)
            return self._results.start(self._sample(plan, batch, hidden))

    def _apply_differences(self, plan: StepPlan) -> None:
        if plan.swap_out or plan.swap_in:
            raise EngineError(
                f"step {plan.step_id} swaps KV blocks to host memory, which this runner cannot do: "
                "preempt by recomputation"
            )
        self._table.stage(plan, self._sampler, self._writes)
        self._writes.apply()
        if not self._attention.allocated and (plan.rows or plan.block_copies):
            raise EngineError("the KV cache is not allocated: call allocate() before the first step")
        if plan.block_copies:
            self._attention.copy_blocks(plan.block_copies)

    def _sample(self, plan: StepPlan, batch: StepBatch, hidden: torch.Tensor) -> SampledStep:
        prompt = self._score_prompts(plan.rows, hidden) if self._table.prompt_logprobs else ()
        rows = batch.sample_rows_host
        if not rows:
            return SampledStep(plan.step_id, rows, None, prompt)
        last = hidden if batch.every_token_samples else hidden.index_select(0, batch.logits_indices)
        logits = self._model.compute_logits(last)
        tokens = self._table.tokens
        sampled = self._sampler.sample(logits, batch.sample_rows, rows, batch.sample_positions, tokens)
        self._kernels.post_update(tokens, batch.sample_rows, batch.sample_positions, sampled.token_ids)
        return SampledStep(plan.step_id, rows, sampled, prompt)

    def _score_prompts(self, rows: Sequence[ScheduledRow], hidden: torch.Tensor) -> list[tuple[int, LogprobTensors]]:
        """The query at position p scores the known token p + 1, for rows that asked, as far as their prompt goes."""
        scores = []
        first_token = 0
        for row in rows:
            k = self._table.prompt_logprobs.get(row.row)
            if k is not None:
                count = min(row.query_len, self._table.prompt_len[row.row] - 1 - row.computed)
                for start in range(0, count, self._prompt_piece):
                    end = min(start + self._prompt_piece, count)
                    logits = self._model.compute_logits(hidden[first_token + start : first_token + end])
                    known = self._table.tokens[row.row, row.computed + start + 1 : row.computed + end + 1]
                    scores.append((row.row, self._sampler.prompt_logprobs(logits, known.to(torch.int64), k)))
            first_token += row.query_len
        return scores

    def _compile(self) -> CompileReport:
        if not isinstance(self._model, nn.Module):
            name = type(self._model).__name__
            raise EngineError(f"{name} is no nn.Module, so it cannot be compiled: set compile to none")
        example = torch.arange(_EXAMPLE_TOKENS, dtype=torch.int64, device=self._device)
        settings = CompileSettings(mode="pieces", cache_dir=Path(self._config.compile.cache_dir))
        self._model.set_attention(torch.ops.pageloom.attention)
        with torch.inference_mode():
            compiled = compile_model(
                self._model,
                (example, example.clone()),
                frozenset({ATTENTION_OP}),
                {ATTENTION_OP: self._attention.attend},
                settings,
            )
        self._run = compiled.run
        return compiled.report
