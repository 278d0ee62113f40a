"""What a step costs the scheduler: flat in the number of waiting requests and in the length of the contexts.

Runs without a model: plan, answer at once, complete, one step ahead as the core does. Prints microseconds per step
(median over steps) and, as the last line, JSON. Usage: ``python tools/bench_scheduler.py [--rows 64] [--steps 300]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from engine.config import SchedulerConfig
from engine.core.wire import AddRequest
from engine.kv_cache.kv_cache import KVCache
from engine.scheduling.scheduler import Scheduler
from engine.step import RowParams, StepPlan, StepResult

WAITING = (10, 100, 1_000, 10_000, 100_000)
CONTEXT = (1_000, 10_000, 30_000, 100_000)
BLOCK_SIZE = 16
BUDGET = 8192


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
        by_context[context] = measure(args.rows, args.steps, waiting=10, context=context)
        print(f"{10:>9} waiting, context {context:>8}: {by_context[context]:8.1f} us")
    ratio_waiting = by_waiting[WAITING[-1]] / by_waiting[WAITING[0]]
    ratio_context = by_context[CONTEXT[-1]] / by_context[CONTEXT[0]]
    print(f"\n{WAITING[-1]} waiting cost {ratio_waiting:.2f}x of {WAITING[0]} waiting")
    print(f"{CONTEXT[-1]} tokens of context cost {ratio_context:.2f}x of {CONTEXT[0]}")
    figures = {
        "rows": args.rows,
        "steps": args.steps,
        "us_per_step_by_waiting": by_waiting,
        "us_per_step_by_context": by_context,
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
    while len(pending.rows) < rows or any(row.query_len > 1 for row in pending.rows):
        following = _plan(scheduler)
        scheduler.complete(_answer(pending))
        pending = following
    costs = []
    for _ in range(steps):
        result = _answer(pending)
        start = time.perf_counter()
        following = _plan(scheduler)
        scheduler.complete(result)
        costs.append(time.perf_counter() - start)
        pending = following
    if scheduler.num_waiting != waiting or len(pending.rows) != rows:
        raise SystemExit("the measured steps were not the steady decode steps that they should be")
    return statistics.median(costs) * 1e6


def _plan(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    if plan is None:
        raise SystemExit("nothing to plan")
    return plan


def _answer(plan: StepPlan) -> StepResult:
    return StepResult(step_id=plan.step_id, token_ids=[7 for row in plan.rows if row.samples])


if __name__ == "__main__":
    main()
