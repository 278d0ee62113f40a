"""What a step costs the scheduler: flat in the number of waiting requests and in the length of the contexts; and how
much with many sequences, a part of them beams.

Runs without a model: plan, answer at once, complete, one step ahead as the core does (a search then computes in every
second step); with beams in lockstep, too, so that every step computes and chooses for all of them. Prints microseconds
of CPU time per step (median over steps, with beams the mean) and, as the last line, JSON.
Usage: ``python tools/bench_scheduler.py [--rows 64] [--steps 300]``.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections import deque

import numpy as np

from engine.config import SchedulerConfig
from engine.core.wire import AddRequest, BeamParams, Follower
from engine.kv_cache.kv_cache import KVCache
from engine.scheduling.scheduler import Scheduler
from engine.step import RowLogprobs, RowParams, StepPlan, StepResult

WAITING = (10, 100, 1_000, 10_000, 100_000)
CONTEXT = (1_000, 10_000, 100_000, 1_000_000)
CONTEXT_ROWS = 4
"""sequences of such a context"""
BLOCK_SIZE = 16
BUDGET = 8192
MIXED = ((64, 0), (1_000, 0), (0, 50), (800, 50))
"""(plain sequences, searches of `WIDTH` beams)"""
WIDTH = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="sequences that decode at once")
    parser.add_argument("--steps", type=int, default=300, help="decode steps measured per point")
    args = parser.parse_args()

    print(
        f"{args.rows} sequences decode, {args.steps} steps, one step ahead; microseconds per step (plan + complete)\n"
    )
    by_waiting = {}
    for waiting in WAITING:
        by_waiting[waiting] = measure(args.rows, args.steps, waiting=waiting, context=200)
        print(f"{waiting:>9} waiting, context      200: {by_waiting[waiting]:8.1f} us")
    by_context = {}
    for context in CONTEXT:
        by_context[context] = measure(CONTEXT_ROWS, args.steps, waiting=10, context=context)
        print(f"{CONTEXT_ROWS:>9} sequences, context {context:>8}: {by_context[context]:8.1f} us")
    mixed = {}
    for plain, searches in MIXED:
        pair = [measure_mixed(plain, searches, args.steps, depth) for depth in (1, 0)]
        mixed[f"{plain}+{searches}x{WIDTH}"] = pair
        print(
            f"{plain:>9} sequences and {searches:>2} searches of {WIDTH} beams: {pair[0]:8.1f} us, "
            f"in lockstep {pair[1]:8.1f} us"
        )
    ratio_waiting = by_waiting[WAITING[-1]] / by_waiting[WAITING[0]]
    ratio_context = by_context[CONTEXT[-1]] / by_context[CONTEXT[0]]
    print(f"\n{WAITING[-1]} waiting cost {ratio_waiting:.2f}x of {WAITING[0]} waiting")
    print(f"{CONTEXT[-1]} tokens of context cost {ratio_context:.2f}x of {CONTEXT[0]}")
    figures = {
        "rows": args.rows,
        "steps": args.steps,
        "us_per_step_by_waiting": by_waiting,
        "us_per_step_by_context": by_context,
        "us_per_step_with_beams": mixed,
        "ratio_waiting": round(ratio_waiting, 3),
        "ratio_context": round(ratio_context, 3),
    }
    print(json.dumps(figures))


def measure(rows: int, steps: int, *, waiting: int, context: int) -> float:
    """Median microseconds of a decode step while ``waiting`` requests queue behind full rows."""
    warm_up_steps = rows * context // BUDGET + rows
    max_model_len = context + warm_up_steps + steps + 64
    blocks = rows * (max_model_len // BLOCK_SIZE + 1) * 101 // 100 + 8
    kv = KVCache(blocks, BLOCK_SIZE, enable_prefix_caching=True)
    config = SchedulerConfig(
        max_num_seqs=rows, max_num_batched_tokens=BUDGET, max_model_len=max_model_len, max_waiting=waiting + rows
    )
    scheduler = Scheduler(config, kv)
    for index in range(rows + waiting):
        prompt = [index] + [1] * (context - 1 if index < rows else 63)
        scheduler.add(
            AddRequest(
                request_id=str(index), prompt_token_ids=prompt, params=RowParams(seed=index), max_tokens=max_model_len
            )
        )
    pending = _plan(scheduler)
    while len(pending.rows) < rows or (pending.rows.query_lens > 1).any():
        following = _plan(scheduler)
        scheduler.complete(_answer(pending))
        pending = following
    costs = []
    for _ in range(steps):
        result = _answer(pending)
        start = time.thread_time()
        following = _plan(scheduler)
        scheduler.complete(result)
        costs.append(time.thread_time() - start)
        pending = following
    if scheduler.stats().waiting != waiting or len(pending.rows) != rows:
        raise SystemExit("the measured steps were not the steady decode steps that they should be")
    return statistics.median(costs) * 1e6


def measure_mixed(plain: int, searches: int, steps: int, depth: int) -> float:
    """Mean microseconds of a step while `plain` sequences and `searches` searches decode, `depth` steps ahead; contexts
    of 200 tokens and more."""
    draw = random.Random(0)
    rows = plain + searches * WIDTH
    config = SchedulerConfig(
        max_num_seqs=rows, max_num_batched_tokens=BUDGET, max_model_len=4096, max_waiting=plain + searches
    )
    kv = KVCache(rows * (400 + steps) // BLOCK_SIZE, BLOCK_SIZE, enable_prefix_caching=True)
    scheduler = Scheduler(config, kv)
    for index in range(plain + searches):
        followers = [Follower(request_id=f"{index}.{i}", seed=i) for i in range(1, WIDTH)]
        beams = index >= plain
        request = AddRequest(
            request_id=str(index),
            prompt_token_ids=[index] + [1] * draw.randrange(200, 232),
            params=RowParams(seed=index),
            max_tokens=3000,
            followers=followers if beams else [],
            beams=BeamParams(width=WIDTH) if beams else None,
        )
        scheduler.add(request)
    answers = _Answers(draw)
    results: deque[StepResult] = deque()
    computed, costs = 0, []
    warm_up = 2 * (rows * 232 // BUDGET + 10)
    for step in range(warm_up + steps):
        if step == warm_up:
            gc.collect()
            gc.freeze()  # as the core does
        start = time.thread_time()
        plan = scheduler.plan()
        planned = time.thread_time()
        if plan is not None:
            results.append(answers.of(plan))
        answered = time.thread_time()
        if plan is None or len(results) > depth:
            scheduler.complete(results.popleft())
        if step >= warm_up:
            costs.append(time.thread_time() - answered + planned - start)
            computed += len(plan.rows) if plan is not None else 0
    if computed != steps * plain + steps * searches * WIDTH // (1 + depth):
        raise SystemExit("the measured steps were not the steady decode steps that they should be")
    return statistics.fmean(costs) * 1e6


class _Answers:
    """A token for everybody, and candidates with random probabilities for beams: about a third of them is dropped in
    every step."""

    def __init__(self, draw: random.Random) -> None:
        self._beams: set[int] = set()
        self._draw = draw
        tokens, logprobs = [], []
        for _ in range(500):
            likely = sorted((-draw.expovariate(0.6) for _ in range(2 * WIDTH)), reverse=True)
            logprobs.append([likely[0], *likely])
            words = draw.sample(range(1000), 2 * WIDTH)
            tokens.append([words[0], *words])
        self._tokens, self._logprobs = np.array(tokens, dtype=np.int32), np.array(logprobs)

    def of(self, plan: StepPlan) -> StepResult:
        self._beams -= {new.row for new in plan.added if new.params.logprobs is None}
        self._beams |= {new.row for new in plan.added if new.params.logprobs is not None}
        rows = plan.rows.row[plan.rows.samples > 0].tolist()
        beams = [row for row in rows if row in self._beams]
        drawn = self._draw.choices(range(len(self._tokens)), k=len(beams))
        ones = np.ones(len(beams), dtype=np.int32)
        widths = (2 * WIDTH + 1) * ones
        found = RowLogprobs(np.array(beams, np.int32), widths, self._tokens[drawn], self._logprobs[drawn], ones)
        return StepResult(step_id=plan.step_id, token_ids=[7] * len(rows), logprobs=found)


def _plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    if plan is None:
        raise SystemExit("nothing to plan")
    return plan


def _answer(plan: StepPlan) -> StepResult:
    return StepResult(step_id=plan.step_id, token_ids=[7] * int(plan.rows.samples.sum()))


if __name__ == "__main__":
    main()
