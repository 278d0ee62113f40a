"""The paper's baseline FasterTransformer: batches that run to their end, prompts padded to the longest (§6.1).

The scheduler takes up to as many of the earliest requests as memory holds at the model's longest sequence, and the
next batch starts when the last sequence of this one has ended.
"""

from __future__ import annotations

from entrypoints.bench.paper.cost import StepCost
from entrypoints.bench.paper.simulate import Meter, Outcome
from entrypoints.bench.paper.systems import Setup
from entrypoints.bench.paper.traces import Job


def batch_seconds(cost: StepCost, batch: list[Job]) -> float:
    """One step for the prompts, then one a token until the longest output is there."""
    rows, prompt = len(batch), max(len(job.prompt) for job in batch)
    decodes = max(job.output for job in batch) - 1
    # A step's cost is linear in its context, so all decode steps together cost what as many average ones do.
    mean_context = rows * (prompt + (decodes + 1) / 2)
    return cost.of(rows, rows * prompt, rows * prompt) + decodes * cost.of(rows, rows, mean_context)


def run_static(setup: Setup, jobs: list[Job], give_up_above: float | None = None) -> Outcome:
    """Serve the jobs in the order of arrival; a result leaves when its whole batch has ended."""
    cost = StepCost(setup.server, paged=False)
    at_once = max(1, setup.server.num_slots // setup.server.max_model_len)
    now = latencies = 0.0
    done = steps = 0
    meter = Meter()
    while done < len(jobs) and (give_up_above is None or latencies <= give_up_above * len(jobs)):
        now = max(now, jobs[done].arrival_s)
        batch = [job for job in jobs[done : done + at_once] if job.arrival_s <= now]
        seconds = batch_seconds(cost, batch)
        now += seconds
        done += len(batch)
        steps += max(job.output for job in batch)
        latencies += sum((now - job.arrival_s) / job.output for job in batch)
        meter.seconds += seconds
        meter.rows += seconds * len(batch)
    return Outcome(
        requests=len(jobs),
        normalised_latency_s=latencies / len(jobs),
        gave_up=done < len(jobs),
        makespan_s=now,
        meter=meter,
        preemptions=0,
        steps=steps,
        num_slots=setup.server.num_slots,
    )
