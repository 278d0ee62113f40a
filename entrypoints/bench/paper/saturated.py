"""Why one system serves more than another: how many requests its steps have while others wait, and what a step takes.

Tokens a second are requests in a batch over seconds of a step. Memory alone decides the former; the latter grows with
it, for more contexts are read and more tokens computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from entrypoints.bench.paper.figure import Json, Study, Table
from entrypoints.bench.paper.simulate import Simulation
from entrypoints.bench.paper.systems import OURS, Setup
from entrypoints.bench.paper.traces import Workload


@dataclass(frozen=True)
class Saturated:
    """Means over the steps of a run while requests wait."""

    batched: float
    step_s: float
    reading_s: float
    """of `step_s`: keys and values"""

    @property
    def tokens_per_s(self) -> float:
        return self.batched / self.step_s


Steps = dict[str, dict[str, Saturated]]
"""of each server or workload, of each system"""


def saturated(study: Study, setup: Setup, workload: Workload) -> Saturated:
    study.progress(f"at saturation: {setup.server.name}, {workload.name}, {setup.system}")
    count = study.scale.backlog
    run = Simulation(setup, workload, workload.backlog(count, study.seed), warm_up_s=count / 40)
    meter = run.run().meter
    reading = run.cost.seconds_per_context_token * meter.context / meter.steps
    return Saturated(meter.step_rows / meter.steps, meter.seconds / meter.steps, reading)


def beside_ours(found: Steps) -> Table:
    """The last columns are ours over the row's system."""
    rows = []
    for name, systems in found.items():
        ours = systems[OURS]
        for system, one in systems.items():
            cells = [f"{one.batched:.1f}", f"{1e3 * one.step_s:.0f}", f"{1e3 * one.reading_s:.0f}"]
            ratios = [ours.batched / one.batched, ours.step_s / one.step_s, ours.tokens_per_s / one.tokens_per_s]
            over = [""] * 3 if system == OURS else [f"{ratio:.2f}x" for ratio in ratios]
            rows.append([f"{name}, {system}", *cells, *over])
    head = ["while requests wait", "in a batch", "step, ms", "of it reading KV", "ours: batch", "step", "tokens/s"]
    return Table(head, rows)


def steps_as_json(found: Steps) -> Json:
    return {
        name: {
            system: {"batched": one.batched, "step_s": one.step_s, "reading_s": one.reading_s}
            for system, one in systems.items()
        }
        for name, systems in found.items()
    }
