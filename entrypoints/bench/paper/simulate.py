"""The engine's scheduler on a virtual clock: requests arrive, steps take what a cost model says, no model computes.

Plan and result alternate in lockstep, as in the paper's engine: what a step costs the host is in the cost model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.config import SchedulerConfig
from engine.core.wire import AddRequest, BeamParams, Follower, SequenceDelta, each_delta
from engine.errors import EngineError
from engine.kv_cache.kv_cache import KVCache
from engine.scheduling.scheduler import Scheduler
from engine.step import NO_LOGPROBS, RowLogprobs, RowParams, StepPlan, StepResult
from entrypoints.bench.paper.candidates import SPREAD, BeamAnswers, Candidates
from entrypoints.bench.paper.cost import StepCost
from entrypoints.bench.paper.reservation import ReservingKVCache
from entrypoints.bench.paper.systems import Setup
from entrypoints.bench.paper.traces import Job, Workload

Execute = Callable[[StepPlan], tuple[float, StepResult]]
"""a step's seconds and its result"""
_CHECK_EVERY = 128
"""steps between looks at whether the run is lost already"""


@dataclass
class Meter:
    """Sums over virtual time, while requests still arrive or wait."""

    seconds: float = 0.0
    rows: float = 0.0
    token_states: float = 0.0
    """tokens whose KV is held, a shared one as often as sequences read it"""
    logical_blocks: float = 0.0
    used_blocks: float = 0.0
    final_slots: float = 0.0
    policy_slots: float = 0.0
    steps: int = 0
    step_rows: int = 0
    context: int = 0
    """rows, and tokens whose KV is read, summed over steps"""

    def observe(self, plan: StepPlan, kv: KVCache, seconds: float) -> None:
        size = kv.block_size
        lengths = plan.rows.computed + plan.rows.query_lens
        tokens, blocks = int(lengths.sum()), int((-(-lengths // size)).sum())
        self.steps += 1
        self.step_rows += len(plan.rows)
        self.context += tokens
        self.seconds += seconds
        self.rows += seconds * len(plan.rows)
        self.token_states += seconds * tokens
        self.logical_blocks += seconds * blocks
        self.used_blocks += seconds * kv.pool.num_used
        if isinstance(kv, ReservingKVCache):
            self.final_slots += seconds * kv.held.final
            self.policy_slots += seconds * kv.held.policy


@dataclass
class Outcome:
    """What a run showed."""

    requests: int
    normalised_latency_s: float
    """mean over requests of end-to-end latency / output length; where the run was given up, a lower bound"""
    gave_up: bool
    makespan_s: float
    meter: Meter
    preemptions: int
    steps: int
    num_slots: int
    swapped: int = 0
    """of the preempted sequences, those that went to the host"""
    blocks_moved: int = 0
    """to the host and back"""

    @property
    def batched(self) -> float:
        """Sequences in a step, averaged over time."""
        return self.meter.rows / self.meter.seconds

    @property
    def token_share(self) -> float:
        """Of the KV memory, what holds a token's state."""
        return self.meter.token_states / self.meter.seconds / self.num_slots

    @property
    def saved(self) -> float:
        """Blocks saved by sharing / blocks without sharing (the paper's Fig. 15)."""
        return 1 - self.meter.used_blocks / self.meter.logical_blocks


@dataclass
class _Live:
    job: Job
    left: int
    """samples that have not ended"""


@dataclass
class Simulation:
    """One run; with `execute` a real one, whose clock stands still while there is nothing to do. `give_up_above`: stop
    as soon as the mean normalised latency is certain to be above it."""

    setup: Setup
    workload: Workload
    jobs: list[Job]
    give_up_above: float | None = None
    warm_up_s: float = 0.0
    """nothing is metered before"""
    spread: float = SPREAD
    execute: Execute | None = None
    """who computes the steps; None: nobody, and the cost model tells their time"""
    now: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        setup = self.setup
        self.kv = setup.kv_cache()
        self.cost: StepCost = setup.cost(self.workload, self.spread)
        config = SchedulerConfig(
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.token_budget,
            max_model_len=setup.server.max_model_len,
            max_waiting=len(self.jobs) * self.workload.samples,
            preemption=setup.preemption,
        )
        self.scheduler = Scheduler(config, self.kv, swap_block_s=2 * self.cost.swap(1))
        self.meter = Meter()
        beams = self.workload.beams and not isinstance(self.kv, ReservingKVCache)
        self._beams = BeamAnswers(Candidates(self.workload.samples, self.spread)) if beams else None
        self._live: dict[int, _Live] = {}
        self._latencies = 0.0
        self._steps = 0

    def run(self) -> Outcome:
        """Raises EngineError when requests are left that can never start."""
        coming = deque(enumerate(self.jobs))
        execute = self.execute or self._pretend
        gave_up = False
        while not gave_up and (coming or self._live):
            while coming and coming[0][1].arrival_s <= self.now:
                self._add(*coming.popleft())
            plan = self.scheduler.plan() or self.scheduler.plan()  # a step in which all are preempted plans nothing
            if plan is None:
                if not coming:
                    raise EngineError(f"{len(self._live)} requests are left and none can start")
                self.now = coming[0][1].arrival_s
                continue
            seconds, result = execute(plan)
            if self.now >= self.warm_up_s and (coming or self.scheduler.stats().waiting):
                self.meter.observe(plan, self.kv, seconds)
            self.now += seconds
            for delta in each_delta(self.scheduler.complete(result, seconds)):
                if delta.finish_reason is not None:
                    self._end(delta)
            self._steps += 1
            if self.give_up_above is not None and self._steps % _CHECK_EVERY == 0:
                gave_up = self._least() > self.give_up_above
        stats = self.scheduler.stats()
        return Outcome(
            requests=len(self.jobs),
            normalised_latency_s=self._least(),
            gave_up=gave_up,
            makespan_s=self.now,
            meter=self.meter,
            preemptions=stats.preemptions,
            swapped=stats.preemptions_swapped,
            blocks_moved=stats.blocks_swapped_out + stats.blocks_swapped_in,
            steps=self._steps,
            num_slots=self.kv.pool.num_blocks * self.kv.block_size,
        )

    def _add(self, index: int, job: Job) -> None:
        """Ours: one request with its samples. A reserving system: each sample a request of its own."""
        self._live[index] = _Live(job, self.workload.samples)
        names = [f"{index}.{sample}" for sample in range(self.workload.samples)]
        params = RowParams(seed=index)
        if isinstance(self.kv, ReservingKVCache):
            for name in names:
                self.kv.expect(*self.setup.reservation(job))
                self.scheduler.add(_request(name, job, params))
        elif self.workload.beams:
            self._live[index].left = 1
            beams = BeamParams(width=len(names))
            self.scheduler.add(_request(names[0], job, params, beams=beams))
        else:
            followers = [Follower(request_id=name, seed=index) for name in names[1:]]
            self.scheduler.add(_request(names[0], job, params, followers=followers))

    def _pretend(self, plan: StepPlan) -> tuple[float, StepResult]:
        tokens = [7] * int(plan.rows.samples.sum())
        logprobs = NO_LOGPROBS if self._beams is None else RowLogprobs.of(self._beams.of(plan))
        return self.cost.of_plan(plan), StepResult(step_id=plan.step_id, token_ids=tokens, logprobs=logprobs)

    def _end(self, delta: SequenceDelta) -> None:
        index = int(delta.request_id.partition(".")[0])
        live = self._live[index]
        live.left -= 1
        if live.left == 0:
            del self._live[index]
            self._latencies += (self.now - live.job.arrival_s) / live.job.output

    def _least(self) -> float:
        """Mean normalised latency, if all that runs and waits ended now and nothing that is to come took any time."""
        running = sum((self.now - live.job.arrival_s) / live.job.output for live in self._live.values())
        return (self._latencies + running) / len(self.jobs)


def _request(
    name: str, job: Job, params: RowParams, followers: list[Follower] | None = None, beams: BeamParams | None = None
) -> AddRequest:
    return AddRequest(
        request_id=name,
        prompt_token_ids=job.prompt,
        params=params,
        max_tokens=job.output,
        followers=followers or [],
        beams=beams,
    )
