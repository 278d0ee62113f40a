"""Fig. 2 (what the KV memory holds) and Fig. 13 (how many requests that lets into a batch), both of OPT-13B."""

from __future__ import annotations

from entrypoints.bench.paper import published
from entrypoints.bench.paper.cost import OPT_13B
from entrypoints.bench.paper.figure import Figure, Json, Panel, Series, Study, Table, exactly, verdict
from entrypoints.bench.paper.lengths import ALPACA, SHAREGPT
from entrypoints.bench.paper.simulate import Outcome, Simulation
from entrypoints.bench.paper.systems import ORCA, OURS, Setup
from entrypoints.bench.paper.traces import plain

_PARTS = ("token states", "reserved", "internal", "external & others")
_SLACK = 3.0
"""points"""
_GIVE_UP_S = 0.8


def memory_use(study: Study) -> Figure:
    """Shares of the KV memory over time, while requests wait."""
    workload = plain(SHAREGPT)
    jobs = workload.backlog(study.scale.backlog, study.seed)
    found: dict[str, tuple[float, ...]] = {}
    rows = []
    for system in (*ORCA, OURS):
        study.progress(f"Fig. 2: {system}")
        outcome = Simulation(Setup(system, OPT_13B), workload, jobs, warm_up_s=study.scale.backlog / 40).run()
        found[system] = _parts(outcome, reserves=system != OURS)
        paper = published.MEMORY[system]
        shares = [f"{ours:.1f} ({theirs:.1f})" for ours, theirs in zip(found[system], paper)]
        rows.append([system, *shares, verdict(found[system][0], exactly(paper[0], " points"), _SLACK)])
    systems = list(found)
    panel = Panel(
        title="What the KV memory holds, OPT-13B, ShareGPT lengths (right of each pair: the paper)",
        x_label="",
        y_label="KV memory (%)",
        kind="stacked",
        categories=[label for system in systems for label in (system, "paper")],
        series=[
            Series(part, [share for s in systems for share in (found[s][i], published.MEMORY[s][i])])
            for i, part in enumerate(_PARTS)
        ],
        value_format="{:.0f}",
    )
    remarks = [
        "The spread of the output lengths was chosen with this figure in view (see `Lengths`); the batch sizes and the "
        "fragmentation follow from the buddy allocator.",
        "With ours, what holds no token is the unfilled end of each sequence's last block, and blocks that are free "
        "because the next request in the queue needs more of them.",
    ]
    if abs(found["Orca (Oracle)"][0] - published.MEMORY["Orca (Oracle)"][0]) > 1:
        remarks.append(
            "Oracle and Pow2 lose more outside of chunks than in the paper: first come, first served holds a large "
            "chunk's place while smaller ones would fit, and the real lengths are not log-normal."
        )
    return Figure(
        key="fig02",
        title="Fig. 2: memory use",
        about="Share of the KV memory (%), averaged over time while requests wait; in brackets the paper's.",
        tables=[Table(["system", *_PARTS, "token states against the paper"], rows)],
        panels=[panel],
        remarks=remarks,
        data={system: dict(zip(_PARTS, shares)) for system, shares in found.items()},
    )


def _parts(outcome: Outcome, *, reserves: bool) -> tuple[float, ...]:
    """In %: token states, reserved for later tokens, internal and external fragmentation."""
    meter, total = outcome.meter, outcome.num_slots * outcome.meter.seconds
    tokens = meter.token_states / total * 100
    if not reserves:
        return tokens, 0.0, 0.0, 100 - tokens
    final, policy = meter.final_slots / total * 100, meter.policy_slots / total * 100
    return tokens, final - tokens, policy - final, 100 - policy


def batched_requests(study: Study) -> Figure:
    """Requests in a step, at the rates of the paper's figure."""
    tables, panels = [], []
    data: Json = {}
    for lengths in (SHAREGPT, ALPACA):
        seconds = 3 * study.scale.seconds(lengths, OPT_13B)
        rate, paper = published.BATCHED_RATES[lengths.name], published.BATCHED[lengths.name]
        workload = plain(lengths)
        jobs = workload.jobs(rate, seconds, study.seed)
        found: dict[str, float] = {}
        for system in (*ORCA, OURS):
            study.progress(f"Fig. 13: {lengths.name}, {system}")
            run = Simulation(Setup(system, OPT_13B), workload, jobs, _GIVE_UP_S, warm_up_s=seconds / 6)
            found[system] = run.run().batched
        setup = Setup(OURS, OPT_13B, prompts_apart=True)
        apart = Simulation(setup, workload, jobs, warm_up_s=seconds / 6).run().batched
        rows = [[s, f"{found[s]:.1f}", f"{paper[s]:.1f}", f"{found[s] / found[ORCA[0]]:.1f}x"] for s in found]
        rows.append([f"{OURS}, prompts apart", f"{apart:.1f}", f"{paper[OURS]:.1f}", f"{apart / found[ORCA[0]]:.1f}x"])
        tables.append(Table([f"{lengths.name}, {rate:g}/s", "requests in a batch", "paper", "over Max"], rows))
        panels.append(
            Panel(
                title=f"{lengths.name}, {rate:g} requests/s",
                x_label="",
                y_label="requests in a batch",
                kind="bars",
                categories=[*found, "ours,\nprompts apart"],
                series=[
                    Series("here", [*found.values(), apart]),
                    Series("paper", [*(paper[s] for s in found), paper[OURS]]),
                ],
                value_format="{:.1f}",
            )
        )
        data[lengths.name] = {**found, "ours, prompts apart": apart}
        if lengths is SHAREGPT:
            tables.append(_ratios(found, apart))
    return Figure(
        key="fig13",
        title="Fig. 13: batched requests",
        about="Sequences in a step, averaged over time, OPT-13B.",
        tables=tables,
        panels=panels,
        remarks=[
            "A system that does not keep up holds what its memory holds; one that does holds arrivals x latency "
            "(Little's law), so fewer requests in ours' batch at a rate that it keeps up with mean a faster step. This "
            "scheduler mixes prompts with decodes. The paper's engine ran prompts in steps of their own: in the row "
            "`prompts apart` the cost model does so, too. Its `host_s` was fitted to that row on ShareGPT; the row on "
            "Alpaca is a check.",
        ],
        data=data,
    )


def _ratios(found: dict[str, float], apart: float) -> Table:
    """What the paper's text says of ShareGPT: how many times the requests of another system ours has."""
    rows = []
    for name, ours in (("ours", found[OURS]), ("ours, prompts apart", apart)):
        for other, told in published.BATCHED_OVER.items():
            ratio, paper = ours / found[other], exactly(told, "x")
            rows.append([f"{name} / {other}", f"{ratio:.2f}x", str(paper), verdict(ratio, paper, 0.3)])
    return Table(["ShareGPT, 2/s", "here", "paper", ""], rows)
