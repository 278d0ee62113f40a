"""The device side of a step: apply a plan's differences, build the batch, run the model, sample, send the results
off."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from compilation.behind import CompileJob, Swap
from compilation.counter import CompileCounter
from compilation.graphs.capture import Capturer
from compilation.graphs.cuda import CudaCapturer
from compilation.graphs.dispatcher import Route
from compilation.inductor import inductor_lock
from compilation.interface import CompiledModel, CompileReport, CompileSettings, FuseSteps
from compilation.model import compile_model
from compilation.module_calls import traces_hold
from engine.config import EngineConfig
from engine.cpu_kernels.folding import fold
from engine.cpu_kernels.tape import fuse_native_steps
from engine.errors import ConfigError, EngineError
from engine.kv_transfer.memory import KVMemory
from engine.layer_groups import full_group
from engine.observability import step_profile
from engine.observability.step_profile import PartTimes, StepObserver
from engine.reports import WarmUpReport
from engine.runner.batch import BatchBuilder, SentStep, StepBatch, as_known
from engine.runner.bound_ops import bind, bound_ops, mark, state_caches
from engine.runner.draft_passes import DraftPasses
from engine.runner.drafts import draft_proposer
from engine.runner.graphs import StepGraphs, graph_activation_bytes, graphs_estimate, make_dispatcher
from engine.runner.kernels import select_kernels
from engine.runner.loading import CausalModel, RunnerParts, compilable, device_of, load_parts
from engine.runner.memory import device_memory, load_report
from engine.runner.observed import ObservedProgram
from engine.runner.paged_attention import PagedAttention
from engine.runner.proposals import proposer_of
from engine.runner.ranks import compiled_by_all, end_moves_together, true_in_all
from engine.runner.request_table import RequestTable
from engine.runner.results import PendingResult, ResultCopier, SampledStep
from engine.runner.stages import PassingOn, example_inputs, groups_and_layers, samplers_of
from engine.runner.staging import BufferRing, StagedWrites
from engine.runner.step_drafts import StepDrafts
from engine.runner.step_sampler import WaitForMasks, no_masks
from engine.runner.streams import Streams, streams_of
from engine.runner.sync_debug import hidden_syncs_are_errors, is_steady_decode
from engine.runner.warm_up import warm_up_plans
from engine.sampling import Sampler
from engine.step import StepPlan, StepResult

_EXAMPLE_TOKENS = 8
FIRST_CAPTURES_S = 10.0
"""start-up goes on capturing for this long although every step already has a graph"""


class ModelRunner:
    """One model on one device. All calls come from one thread; a step's result may be awaited in another."""

    def __init__(
        self,
        config: EngineConfig,
        parts: RunnerParts,
        memory_before: tuple[int, int],
        *,
        streams: Streams | None = None,
        capturer: Capturer | None = None,
    ) -> None:
        """`memory_before`: (total, free) bytes of the device before the parts were loaded. `streams` and `capturer`
        take the place of the device's own (tests: what orders and records work can be watched on a CPU)."""
        rows, budget = config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
        self._config = config
        self._device = device = device_of(config)
        self._facts, self._dtype, self._dtype_bytes = parts.facts, parts.dtype, parts.dtype.itemsize
        self._model, self._group, self._exchange = parts.model, parts.group, parts.exchange
        self.adapters = parts.adapters
        self._all_ranks = true_in_all(parts.group, device)
        self._run: Callable[..., torch.Tensor] = parts.model
        self._compiled: CompiledModel | None = None
        """whose program `_run` is; None: the model itself runs"""
        self.part_times = PartTimes()
        self._observer: StepObserver = self.part_times
        self._observed: ObservedProgram | None = None
        self._is_watched = False
        self._kernels, self._streams = select_kernels(device), streams or streams_of(device)
        self._inputs_ready, self._step_done, self._proposed = (self._streams.event() for _ in range(3))
        self._groups, layers = groups_and_layers(config, parts)
        kv_dtype = getattr(torch, config.cache.dtype)
        states = state_caches(parts)
        self._attention = PagedAttention(parts.backend, layers, kv_dtype, self._groups, parts.context, states)
        self._table = RequestTable(rows, config.model.max_model_len, config.cache.block_size, len(self._groups), device)
        self._before = None if parts.stage is None else parts.stage.before
        self._example = example_inputs(parts, _EXAMPLE_TOKENS, device)
        self._sampler, self._step_sampler = samplers_of(config, parts, self._table, self._kernels)
        tables = [*self._table.staged_tables(), *self._sampler.tables()]
        # One host buffer more than steps in flight, so that none is waited for.
        depth = config.scheduler.steps_in_flight + 1 if self._streams.queued else 1
        self._adapter_ring = BufferRing(self._streams, 1 + budget, depth)
        self._writes = StagedWrites(tables, self._kernels, self._streams, BufferRing(self._streams, 4096, depth))
        places, block_size = config.scheduler.max_sampled, config.cache.block_size
        self._batches = BatchBuilder(self._table, self._kernels, budget, block_size, self._streams, depth, places)
        self._drafts, self._results = self._make_drafts(parts), ResultCopier(self._streams)
        self._dispatcher = make_dispatcher(config, parts.backend, parts.facts)
        self._capturer, self._counter = capturer, CompileCounter()
        self._graphs: StepGraphs | None = None
        self._runs_modules = threading.RLock()
        """held by steps, and by traces in another thread that change what modules do meanwhile"""
        self._counts = False  # whether compilations since the counter's mark are ones that should not have been
        self._is_invariant, alone = config.device.batch_invariant, self._dispatcher.mode == "none" and not parts.group
        self._compiles_behind = alone and not self._is_invariant and config.compile.mode == "pieces"
        if self._dispatcher.mode != "none" and capturer is None and device.type != "cuda":
            raise ConfigError(f"graphs={config.compile.graphs!r} needs device='cuda'; set graphs='none'")
        kept = self._table.size_bytes + self._batches.size_bytes + self._sampler.max_workspace_bytes
        graph_bytes = graphs_estimate(self._dispatcher, self._facts, self._dtype_bytes)
        self.report = load_report(config, parts, self._attention, self._groups, kept, graph_bytes, memory_before)
        bind(parts.model, self._attention)
        self._step_done.record()
        with self._streams.inputs:
            self._step_done.wait()  # the first copy must not overtake what zeroes the place where it lands

    def _make_drafts(self, parts: RunnerParts) -> StepDrafts:
        config, table, attention = self._config, self._table, self._attention
        if parts.draft is None:
            return StepDrafts(proposer_of(config.scheduler.speculation, table, Path(config.compile.cache_dir)))
        group = full_group(self._groups)
        assert isinstance(self._sampler, Sampler)  # resolving refuses drafts of models in stages
        passes = DraftPasses(table, self._sampler, self._kernels, attention, config.cache.block_size, group)
        return StepDrafts(draft_proposer(parts.draft, passes, parts.facts.num_layers))

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        parts_of: Callable[[EngineConfig], RunnerParts] = load_parts,
        *,
        streams: Streams | None = None,
        capturer: Capturer | None = None,
    ) -> ModelRunner:
        """Load weights, choose the attention backend, allocate the tables, measure a step's memory.

        Raises ConfigError, UnsupportedModelError or WeightsError.
        """
        memory_before = device_memory(device_of(config))
        return cls(config, parts_of(config), memory_before, streams=streams, capturer=capturer)

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV cache, and the host tier's."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what loading and measuring left behind is in no line of the ledger
        cache = self._config.cache
        self._attention.allocate(num_blocks, num_host_blocks, cache.block_size, self._device, cache.pages_fd)

    def kv_memory(self) -> KVMemory:
        return self._attention.kv_memory(self._config)

    def warm_up(self) -> WarmUpReport:
        """Compile the model as configured, run a few small steps, so that nothing is built or tuned later, and capture
        the graphs that make serving good (`StepGraphs.capture_first`); `idle_work` captures the others.

        Without graphs, which are made of compiled pieces, steps can start eagerly: compiling is left to `compile_job`.
        Pieces that fail to compile, to run or to be captured cost speed, not the start: the model itself runs then.
        """
        started = time.perf_counter()
        if self._config.compile.mode == "pieces":
            compilable(self._model)
        with torch.inference_mode():
            self._sampler.warm_up()
        wanted = self._config.compile.mode == "pieces" and not self._compiles_behind
        if wanted:
            try:
                self._compiled = compiled_by_all(self._compile, self._group, self._device)
                self._start_with(self._compiled)
            except Exception as error:
                if self._is_invariant or (self._compiled is not None and self._group is not None):
                    raise  # the model itself has other bits; other ranks go on with their pieces
                self._leave_pieces(error)
        compiled = self._compiled or CompiledModel(run=self._model, report=CompileReport(0, 0, 0, 0, 0.0))
        if self._compiled is None:
            self._start_with(compiled)
        self._start_counting()
        return WarmUpReport(
            distinct_pieces=compiled.report.distinct_pieces,
            compiled=compiled.report.compiled,
            reused=compiled.report.loaded,
            seconds=time.perf_counter() - started,
            graph_bytes=self._graphs.memory_bytes if self._graphs else 0,
            graphs_captured=self._graphs.num_captured if self._graphs else 0,
            graphs_pending=self._graphs.num_pending if self._graphs else 0,
            swap_block_s=self._attention.time_swap(self._device),
            compile_failed=wanted and self._compiled is None,
        )

    def _start_with(self, compiled: CompiledModel) -> None:
        self._run = compiled.run
        self._run_warm_up_plans()
        if self._dispatcher.mode != "none":
            self._graphs = self._make_graphs(compiled)
            self._graphs.capture_first(FIRST_CAPTURES_S)
            self._step_done.record()
            self._run_warm_up_plans()

    def _leave_pieces(self, error: Exception) -> None:
        self._compiled = self._graphs = None
        self._dispatcher = make_dispatcher(self._config, self._attention.backend, self._facts, error)
        if taken := list(self._table.prompt_len):  # by a warm-up plan that failed
            self.execute(StepPlan(step_id=-4, released=taken)).wait()

    def compile_job(self) -> CompileJob | None:
        """What `warm_up` left to compile. The job may run in any thread while steps are executed; what it returns
        belongs between two steps. None: nothing is left."""
        if not self._compiles_behind:
            return None
        self._counts = False

        def job(stop: threading.Event) -> Swap:
            try:
                compiled = self._compile(stop)
            finally:
                self._start_counting()
            return lambda: self._adopt(compiled)

        return job

    @property
    def compiled(self) -> CompiledModel | None:
        """Whose program steps run; None while they run the model itself."""
        return self._compiled

    def _adopt(self, compiled: CompiledModel) -> None:
        self._compiled, self._run = compiled, compiled.run

    def _start_counting(self) -> None:
        self._counter.mark()
        self._counts = True

    def idle_work(self) -> bool:
        """One capture of those that `warm_up` left; to be called between steps. False when nothing is left. Steps that
        are queued go on: the captures' own work comes behind them, and the next step's behind it."""
        if self._graphs is None or not self._graphs.num_pending:
            return False
        more = self._graphs.capture_next()
        self._step_done.record()
        return more

    def compiles_after_ready(self) -> int:
        """Traces and compilations since `warm_up` returned, or since the job of `compile_job` ended."""
        return self._counter.since_mark() if self._counts else 0

    def execute(self, plan: StepPlan, masks: WaitForMasks = no_masks) -> PendingResult:
        """Start one step. On CUDA this returns when everything is queued; on CPU when it is computed. `masks` is called
        behind the start of the forward pass where the plan has masked rows, and may wait.

        Raises ValueError for a plan that does not fit the tables, EngineError for one that this runner cannot serve.
        """
        watched = self._config.device.debug_sync and is_steady_decode(plan)
        checks = hidden_syncs_are_errors() if watched else nullcontext()
        with torch.inference_mode(), checks, self._runs_modules:
            self._refuse(plan)
            self._is_watched = self._observer.step(plan)
            self._drafts.end(plan.released)
            self._table.stage(plan, self._sampler, self._writes)
            batch = self._queue_inputs(plan)
            if self._exchange is not None:
                self._exchange.begin(plan.round, 0 if batch is None else batch.num_tokens)
            if batch is None:
                if self._config.kv_transfer is not None:
                    end_moves_together(plan, self._all_ranks)
                step = SampledStep(plan.step_id, rows=(), sampled=None)
            else:
                hidden = self._forward(plan, batch)
                step = self._step_sampler.run(plan, batch, hidden, self._observer, masks)
                self._drafts.observe(batch, hidden)
            if self._exchange is not None:
                step = replace(step, round=self._exchange.end())
            self._step_done.record()
            self._observer.mark(step_profile.RESULTS)
            pending = self._results.start(step, self._step_done)
            self._observer.mark(step_profile.HAND_OVER)
            return pending

    def observe(self, observer: StepObserver | None) -> None:
        """Tell `observer` what every step spends its time on, from the next one on; None: none. To be called between
        steps. A step whose graph is replayed is one part, `MODEL`."""
        self._observer = observer or self.part_times
        self._observed = ObservedProgram(observer, self._model, self._attention.attend) if observer else None

    def _refuse(self, plan: StepPlan) -> None:
        if not self._attention.allocated and (len(plan.rows) or plan.block_copies):
            raise EngineError("the KV cache is not allocated: call allocate() before the first step")

    def _queue_inputs(self, plan: StepPlan) -> StepBatch | None:
        """Copies start at once; kernels wait until the step before has sampled and written its tokens back.

        Not earlier: a row that this plan gives away may still be written by that step's `post_update`, and the input
        buffers are read by its forward. The main stream, then, waits for these inputs.
        """
        batch, queued = None, self._streams.queued
        with self._streams.inputs:
            self._writes.send()
            sent = self._batches.send(plan.rows) if len(plan.rows) and queued else None
            self._step_done.wait()
            self._writes.apply()
            if sent is not None and not self._drafts.proposes:
                batch = self._batches.build(sent, self._dispatcher.dispatch)
            self._inputs_ready.record()
        self._inputs_ready.wait()
        self._attention.apply(plan)
        return self._behind_drafts(plan, sent) if self._drafts.proposes or not queued else batch

    def _behind_drafts(self, plan: StepPlan, sent: SentStep | None) -> StepBatch | None:
        """Inputs of a step that follow from its drafts, which follow from what is in the blocks."""
        drafted = self._drafts.propose(plan)
        if len(plan.rows) and not self._streams.queued:
            sent = self._batches.send(as_known(plan.rows, self._table.lengths.numpy(), drafted))
        if sent is None:
            return None
        self._proposed.record()
        with self._streams.inputs:
            self._proposed.wait()
            batch = self._batches.build(sent, self._dispatcher.dispatch)
            self._inputs_ready.record()
        self._inputs_ready.wait()
        return batch

    def learn(self, result: StepResult) -> None:
        """What was sampled from the states that this stage passed on, in the order of the steps."""
        if isinstance(self._step_sampler, PassingOn):
            self._step_sampler.learn(result)

    def _forward(self, plan: StepPlan, batch: StepBatch) -> torch.Tensor:
        """Hidden states of the real tokens; a graph's are overwritten by the next replay."""
        given = batch.input_ids if self._before is None else self._before.receive(plan.step_id, batch.num_tokens)
        self._observer.mark(step_profile.ATTENTION_PLAN)
        self._attention.begin_step(batch.attention, batch.rows)
        if self.adapters is not None:
            self.adapters.begin_step(self._table.adapter_slots, batch.rows, self._adapter_ring)
        self._observer.mark(step_profile.MODEL)
        if batch.dispatch.route == "eager" or self._graphs is None:
            observed = self._observed if self._is_watched else None
            return (self._run if observed is None else observed.program(self._compiled))(given, batch.positions)
        return self._graphs.replay(batch.dispatch)[: batch.num_tokens]

    def _compile(self, stop: threading.Event | None = None) -> CompiledModel:
        # A twin with the same parts and weights is traced: steps may run the model itself meanwhile.
        twin = copy.copy(compilable(self._model))
        mark(cast(CausalModel, twin), self._attention)
        cache_dir, largest = Path(self._config.compile.cache_dir), self._config.scheduler.max_num_batched_tokens
        settings = CompileSettings("pieces", cache_dir, largest_size=largest, invariant=self._is_invariant)
        alone = nullcontext() if self._group is None else self._group.alone()
        bound = bound_ops(self._attention, self._exchange)
        with torch.inference_mode(), inductor_lock, traces_hold(self._runs_modules), alone:
            return compile_model(
                twin,
                self._example,
                frozenset(bound),
                bound,
                settings,
                stop,
                self._fuse_steps(),
                fold if self._device.type == "cpu" else None,
            )

    def _fuse_steps(self) -> FuseSteps | None:
        if self._device.type != "cpu" or not self._attention.allocated:
            return None
        attention, dtype = self._attention, self._dtype
        return fuse_native_steps(lambda layer: attention.native_layer(layer, dtype), attention.native_steps)

    def _run_warm_up_plans(self) -> None:
        for plan in warm_up_plans(self._config, len(self._groups)):
            self.execute(plan).wait()
        if self._attention.states is not None:
            self._attention.states.clean([0])

    def _make_graphs(self, compiled: CompiledModel) -> StepGraphs:
        buffers = self._batches.buffers
        return StepGraphs(
            self._dispatcher,
            compiled,
            (buffers.input_ids, buffers.positions),
            self._capturer or CudaCapturer(self._device),
            self._before_capture,
            lambda: device_memory(self._device)[1],
            first_bytes=2 * graph_activation_bytes(self._dispatcher, self._facts, self._dtype_bytes),
            all_ranks=self._all_ranks,
        )

    def _before_capture(self, route: Route, size: int) -> None:
        """Inputs without effect; a full graph also records attention, which needs a step's metadata."""
        if route == "full":
            self._attention.begin_step(self._batches.stand_in(size))
        else:
            self._batches.clear(size)
