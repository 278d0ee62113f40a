"""The evaluation on this machine: the real engine under the same reservations, and the simulator held against it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from attention_backends.reference import ReferenceBackend
from entrypoints.bench.paper import published
from entrypoints.bench.paper.device import (
    BLOCK_SIZE,
    LENGTHS,
    MAX_NUM_SEQS,
    TOKEN_BUDGET,
    Device,
    MeasuredCost,
    as_json,
    calibrate,
)
from entrypoints.bench.paper.figure import Figure, Json, Panel, Series, Study, Table
from entrypoints.bench.paper.simulate import Outcome, Simulation
from entrypoints.bench.paper.systems import ORCA, OURS, Setup
from entrypoints.bench.paper.traces import Job, Workload, plain

_WIDTHS = (2, 4)
_SWAPPED_TOKENS = 256
_REPEATS = 5


Runs = dict[str, Outcome]


@dataclass(frozen=True)
class Bench:
    """What all figures of this mode share."""

    device: Device
    text: list[int]
    """in the model's tokens; prompts are cut from it"""
    study: Study

    def setup(self, system: str) -> Setup:
        server = self.device.server
        return Setup(system, server, BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS, token_budget=TOKEN_BUDGET)

    def jobs(self, count: int) -> list[Job]:
        """All there from the start; a prompt is a piece of the text."""
        starts = np.random.default_rng(self.study.seed).integers(0, len(self.text) - LENGTHS.prompt.longest, size=count)
        shapes = plain(LENGTHS).backlog(count, self.study.seed)
        return [
            Job(0.0, self.text[start : start + len(job.prompt)], job.output)
            for start, job in zip(starts.tolist(), shapes)
        ]

    def run(self, system: str, workload: Workload, jobs: list[Job]) -> Outcome:
        self.device.begin()
        return Simulation(self.setup(system), workload, jobs, execute=self.device).run()


def memory_and_rate(bench: Bench, count: int) -> tuple[Figure, MeasuredCost]:
    """A backlog under each reservation policy, then the same in the simulator with the cost that was measured."""
    workload, jobs = plain(LENGTHS), bench.jobs(count)
    bench.study.progress("real: warm-up")
    bench.run(OURS, workload, jobs[: count // 4])
    bench.device.steps.clear()
    real = {}
    for system in (*ORCA, OURS):
        bench.study.progress(f"real: {system}")
        real[system] = bench.run(system, workload, jobs)
    cost = calibrate(bench.device.server, bench.device.steps)
    pretended = {}
    for system in real:
        run = Simulation(bench.setup(system), workload, jobs)
        run.cost = cost
        pretended[system] = run.run()
    return _rates_figure(bench, real, pretended, cost), cost


def _rates_figure(bench: Bench, real: Runs, pretended: Runs, cost: MeasuredCost) -> Figure:
    count = next(iter(real.values())).requests
    rates = {system: outcome.requests / outcome.makespan_s for system, outcome in real.items()}
    rows = [
        [
            system,
            f"{100 * outcome.token_share:.1f} %",
            f"{published.MEMORY[system][0]:.1f} %",
            f"{outcome.batched:.1f}",
            f"{rates[system]:.2f}",
            f"{rates[system] / rates[ORCA[0]]:.2f}x",
            f"{outcome.requests / pretended[system].makespan_s:.2f}",
            str(outcome.steps),
            str(outcome.preemptions),
        ]
        for system, outcome in real.items()
    ]
    head = ["system", "token states", "paper", "batched", "requests/s", "over Max", "simulated", "steps", "preemptions"]
    return Figure(
        key="real",
        title="On this machine",
        about=f"A backlog of {count} requests, lengths of {LENGTHS.name}, in a pool that is to them as OPT-13B's is in "
        "the paper. Every step is computed; block tables are those of the policy.",
        tables=[Table(head, rows), _constants(cost)],
        panels=[
            Panel(
                title=f"{bench.device.server.name}: a backlog under each policy",
                x_label="",
                y_label="requests/s",
                kind="bars",
                categories=list(real),
                series=[
                    Series("measured", list(rates.values())),
                    Series("simulated", [o.requests / o.makespan_s for o in pretended.values()]),
                ],
                value_format="{:.2f}",
            )
        ],
        remarks=[
            "Simulated: the same requests on the virtual clock, with a cost model of the same form fitted to the steps "
            "that were measured. On a CPU a row in a batch costs nearly as much as a step of its own, so holding more "
            "requests gains less there than on a GPU.",
        ],
        data={
            "requests_per_s": dict(rates),
            "token_share": {system: outcome.token_share for system, outcome in real.items()},
            "simulated_requests_per_s": {s: o.requests / o.makespan_s for s, o in pretended.items()},
            "cost": as_json(cost),
        },
    )


def _constants(cost: MeasuredCost) -> Table:
    fixed, a_row, a_token, a_context = cost.weights
    cells = [f"{1e3 * fixed:.2f} ms", f"{1e6 * a_row:.0f} us", f"{1e6 * a_token:.0f} us", f"{1e9 * a_context:.0f} ns"]
    return Table(["measured step", "a row", "a prompt token beyond", "a token of context"], [cells])


def sharing(bench: Bench, count: int) -> Figure:
    """Samples and beams of the real model: what Fig. 15 simulates."""
    rows = []
    data: Json = {}
    for beams in (False, True):
        for width in _WIDTHS:
            name = f"{'beam width' if beams else 'samples'} {width}"
            bench.study.progress(f"real: {name}")
            workload = plain(LENGTHS, width, beams)
            # A last request that never comes in time keeps the meter running to the end.
            real = bench.run(OURS, workload, [*bench.jobs(count), Job(1e9, [1], 1)]).saved
            pretended = Simulation(bench.setup(OURS), workload, [*bench.jobs(count), Job(1e9, [1], 1)]).run().saved
            rows.append([name, f"{100 * real:.1f} %", f"{100 * pretended:.1f} %"])
            data[name] = real
    return Figure(
        key="real_sharing",
        title="Memory saved by sharing, on this machine",
        about=f"{count} prompts of English text, lengths of {LENGTHS.name}: blocks saved / blocks without sharing.",
        tables=[Table(["", "real model", "simulated candidates"], rows)],
        panels=[],
        remarks=["The second column holds the model of candidates (Fig. 15) against the beams of a real model."],
        data=data,
    )


def recovery(bench: Bench, cost: MeasuredCost) -> Figure:
    """Fig. 19a with copies between two pools in memory, and recomputing as measured."""
    sizes = bench.study.scale.block_sizes
    recompute = cost.of(1, _SWAPPED_TOKENS, _SWAPPED_TOKENS)
    swaps = {size: _swap_seconds(bench.device, size) for size in sizes}
    rows = [
        ["recompute, ms", *(f"{1e3 * recompute:.1f}" for _ in sizes)],
        ["swap in and out, ms", *(f"{2e3 * seconds:.2f}" for seconds in swaps.values())],
    ]
    xs = [float(size) for size in sizes]
    return Figure(
        key="real_recovery",
        title="Recomputing against swapping, on this machine",
        about=f"One sequence of {_SWAPPED_TOKENS} tokens; `AttentionBackend.swap_blocks` between two pools in memory.",
        tables=[Table(["block size", *(str(size) for size in sizes)], rows)],
        panels=[
            Panel(
                title=f"{_SWAPPED_TOKENS} tokens, {bench.device.server.name}",
                x_label="block size",
                y_label="ms",
                kind="lines",
                series=[
                    Series("recompute", [1e3 * recompute] * len(sizes), xs),
                    Series("swap in and out", [2e3 * seconds for seconds in swaps.values()], xs),
                ],
                log_x=True,
            )
        ],
        remarks=[
            "Both pools are in the same memory here, so there is no link; what remains is the cost of many copies."
        ],
        data={"recompute_s": recompute, "swap_one_way_s": {str(size): seconds for size, seconds in swaps.items()}},
    )


def _swap_seconds(device: Device, block_size: int) -> float:
    """Median of copying the blocks of one sequence in all layers."""
    blocks = -(-_SWAPPED_TOKENS // block_size)
    layer_bytes = device.block_bytes // BLOCK_SIZE // device.layers * block_size
    here, there = (
        [torch.zeros(blocks, layer_bytes, dtype=torch.uint8) for _ in range(device.layers)] for _ in range(2)
    )
    pairs = [(block, blocks - 1 - block) for block in range(blocks)]
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        ReferenceBackend().swap_blocks(here, there, pairs)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))
