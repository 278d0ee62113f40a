"""Writes plans by hand for runner tests: rows, blocks, chunks and preemptions chosen at random, tokens never sent
back."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace
from shared_natives import cache_with_natives

from attention_backends.interface import AttentionBackend
from attention_backends.reference import ReferenceBackend
from compilation.graphs.capture import Capturer
from engine.config import (
    CacheConfig,
    CompileConfig,
    CompileMode,
    DeviceConfig,
    EngineConfig,
    GraphMode,
    ModelConfig,
    SchedulerConfig,
)
from engine.layer_groups import first_kept
from engine.models.decoder import Decoder
from engine.models.mixers import MixerSpec
from engine.models.spec import DecoderSpec, LayerSpec, MlpSpec, RopeSpec
from engine.runner.loading import RunnerParts
from engine.runner.model_runner import ModelRunner
from engine.runner.results import PendingResult
from engine.runner.streams import Streams
from engine.step import (
    NewRow,
    RowParams,
    Rows,
    ScheduledRow,
    StepPlan,
    TokenLogprobs,
    Write,
    Writes,
    decode_plan,
    encode_step,
)

BLOCK_SIZE, NUM_BLOCKS, MAX_ROWS, BUDGET, MAX_LEN = 4, 128, 4, 24, 60
GONE = -1
MIXER = MixerSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, rope=0)
MLP = MlpSpec(intermediate_size=48)
SPEC = DecoderSpec(
    family="llama",
    vocab_size=97,
    hidden_size=32,
    layers=(LayerSpec(mixer=MIXER, mlp=MLP), LayerSpec(mixer=replace(MIXER, window=9), mlp=MLP)),
    ropes=(RopeSpec(rotary_dim=8),),
    norm_eps=1e-5,
    max_position=64,
)


def config(
    cache_dir: Path,
    mode: CompileMode = "none",
    rows: int = MAX_ROWS,
    budget: int = BUDGET,
    graphs: GraphMode = "none",
    debug_sync: bool = False,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            path="tiny",
            tokenizer="tiny",
            served_name="tiny",
            dtype="float32",
            max_model_len=MAX_LEN,
            vocab_size=SPEC.vocab_size,
            eos_token_ids=(0,),
            seed=0,
            load_format="dummy",
        ),
        cache=CacheConfig(
            dtype="float32",
            block_size=BLOCK_SIZE,
            kv_cache_memory=None,
            memory_fraction=0.5,
            enable_prefix_caching=False,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=budget, max_model_len=MAX_LEN, max_waiting=8
        ),
        compile=CompileConfig(mode=mode, graphs=graphs, cache_dir=str(cache_with_natives(cache_dir))),
        device=DeviceConfig(kind="cpu", debug_sync=debug_sync),
        max_logprobs=5,
    )


def tiny_decoder(seed: int = 0) -> Decoder:
    model = Decoder(SPEC, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
            else:
                parameter.fill_(1.0)
    return model


def tiny_runner(
    cache_dir: Path,
    mode: CompileMode = "none",
    rows: int = MAX_ROWS,
    budget: int = BUDGET,
    graphs: GraphMode = "none",
    *,
    backend: AttentionBackend | None = None,
    capturer: Capturer | None = None,
    streams: Streams | None = None,
    debug_sync: bool = False,
) -> ModelRunner:
    def parts(_: EngineConfig) -> RunnerParts:
        attention = backend or ReferenceBackend()
        return RunnerParts(
            model=tiny_decoder(), facts=SPEC.facts, dtype=torch.float32, backend=attention, weight_bytes=1
        )

    settings = config(cache_dir, mode, rows, budget, graphs, debug_sync)
    runner = ModelRunner.load(settings, parts, streams=streams, capturer=capturer)
    runner.allocate(NUM_BLOCKS)
    return runner


@dataclass
class Sequence:
    prompt: list[int]
    num_tokens: int
    params: RowParams
    generated: list[int] = field(default_factory=list)
    planned: int = 0
    """tokens known or being sampled"""
    computed: int = 0
    row: int | None = None
    blocks: list[list[int]] = field(default_factory=list)
    """of each layer group; GONE where its window went past"""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    """of the steps in flight that compute some"""

    @property
    def finished(self) -> bool:
        return len(self.generated) == self.num_tokens


class PlanDriver:
    """Runs sequences to their end. `lag`: plan step N + 1 before step N's tokens are known, as the core does."""

    def __init__(
        self,
        runner: ModelRunner,
        rng: random.Random,
        preempt: float,
        lag: bool,
        guess: Callable[[Sequence], list[int]] = lambda _: [],
    ) -> None:
        """`guess`: drafts of a sequence."""
        self.runner, self.rng, self.preempt, self.lag = runner, rng, preempt, lag
        self.guess = guess
        self.drafted = self.accepted = 0
        self.free_blocks = list(range(NUM_BLOCKS))
        self.free_rows = list(range(MAX_ROWS))
        rng.shuffle(self.free_blocks)
        self.released: list[int] = []
        self.preemptions = self.steps = 0
        self.before_step: Callable[[], object] = lambda: None
        self._pending: dict[int, PendingResult] = {}

    def run(self, sequences: list[Sequence]) -> None:
        in_flight: tuple[StepPlan, dict[int, Sequence]] | None = None
        while not all(s.finished for s in sequences):
            plan, by_row = self._plan(sequences, may_preempt=in_flight is None)
            self.before_step()
            self._pending[plan.step_id] = self.runner.execute(plan)
            if in_flight is not None:
                self._complete(*in_flight)
            in_flight = (plan, by_row)
            if not self.lag or not len(plan.rows) or self.rng.random() < 0.3:
                self._complete(*in_flight)
                in_flight = None
            self.steps += 1
            assert self.steps < 2000
        plan, _ = self._plan(sequences, may_preempt=False)
        assert self.runner.execute(plan).wait().token_ids == []

    def _plan(self, sequences: list[Sequence], may_preempt: bool) -> tuple[StepPlan, dict[int, Sequence]]:
        if may_preempt:
            for s in sequences:
                if s.row is not None and not s.finished and self.rng.random() < self.preempt:
                    self._release(s)
                    self.preemptions += 1
        for s in sequences:
            if s.row is not None and s.finished:
                self._release(s)
        added, appends, scheduled = [], [], []
        drafts: list[Write] = []
        budget = BUDGET
        for s in sequences:
            if s.row is None and not s.finished and self.free_rows and self.rng.random() < 0.7:
                s.row = self.free_rows.pop()
                known = s.prompt + s.generated
                s.computed, s.planned = 0, len(known)
                added.append(NewRow(row=s.row, token_ids=known, prompt_len=len(s.prompt), params=s.params))
        running = [s for s in sequences if s.row is not None and s.planned < len(s.prompt) + s.num_tokens]
        for s in sorted(running, key=lambda s: s.planned - s.computed > 1):
            need = s.planned - s.computed
            take = min(need, budget, need if self.rng.random() < 0.4 else self.rng.randint(1, need))
            if take < 1:
                continue
            budget -= take
            appends += self._grow(s, s.computed + take)
            samples = int(take == need)
            assert s.row is not None
            unsure, guess = sum(map(len, s.drafts)), []
            if samples and s.planned == len(s.prompt) + len(s.generated):
                guess = self.guess(s)[: min(budget, s.num_tokens - len(s.generated) - 1)]
            if guess:
                drafts.append(Write(0, s.row, s.planned, guess))
                s.drafts.append(guess)
                budget -= len(guess)
                take, samples = take + len(guess), samples + len(guess)
                appends += self._grow(s, s.computed + take)
            scheduled.append(ScheduledRow(s.row, s.computed, take, samples, unsure))
            s.computed += take
            s.planned += samples
        released, self.released = self.released, []
        by_row = {s.row: s for s in sequences if s.row is not None}
        plan = StepPlan(
            step_id=self.steps,
            rows=Rows.of(scheduled),
            released=released,
            added=added,
            drafts=Writes.of(drafts),
            block_appends=Writes.of(appends),
        )
        return decode_plan(encode_step(plan)), by_row

    def _grow(self, s: Sequence, upto: int) -> list[Write]:
        """Blocks that no query sees from here on are anybody's."""
        assert s.row is not None
        appends = []
        certain = s.computed - sum(map(len, s.drafts))
        for group, window in enumerate(self.runner.report.windows):
            if len(s.blocks) <= group:
                s.blocks.append([])
            table = s.blocks[group]
            for index in range(first_kept(certain, window) // BLOCK_SIZE):
                if table[index] != GONE:
                    self.free_blocks.insert(self.rng.randrange(len(self.free_blocks) + 1), table[index])
                    table[index] = GONE
            missing = -(-upto // BLOCK_SIZE) - len(table)
            if missing > 0:
                new = [self.free_blocks.pop() for _ in range(missing)]
                appends.append(Write(group, s.row, len(table), new))
                table += new
        return appends

    def _release(self, s: Sequence) -> None:
        assert s.row is not None
        self.released.append(s.row)
        self.free_rows.append(s.row)
        self.free_blocks += [block for table in s.blocks for block in table if block != GONE]
        self.rng.shuffle(self.free_blocks)
        s.row, s.blocks = None, []

    def _complete(self, plan: StepPlan, by_row: dict[int, Sequence]) -> None:
        result = self._pending.pop(plan.step_id).wait()
        assert result.step_id == plan.step_id and not result.faults
        sampling = [row for row in plan.rows.each() if row.samples]
        tokens, logprobs = iter(result.token_ids), result.logprobs.by_row()
        for row, count in zip(sampling, result.counts or [1] * len(sampling), strict=True):
            s, brought = by_row[row.row], [next(tokens) for _ in range(count)]
            s.generated += brought
            s.logprobs += logprobs.get(row.row, [])[:count]
            if row.samples > 1:
                guess = s.drafts.pop(0)
                assert brought[:-1] == guess[: count - 1] and brought[-1:] != guess[count - 1 : count]
                s.computed -= row.samples - count
                s.planned -= row.samples - count
                self.drafted, self.accepted = self.drafted + len(guess), self.accepted + count - 1
        assert next(tokens, None) is None
        for row, entries in result.prompt_logprobs.items():
            by_row[row].prompt_logprobs += entries
