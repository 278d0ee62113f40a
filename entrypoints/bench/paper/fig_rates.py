"""Normalised latency over request rate: Fig. 12 (one sample), 14 (samples and beams), 16 (shared prefix), 17 (chat)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from entrypoints.bench.paper import published
from entrypoints.bench.paper.cost import LLAMA_13B, OPT_13B, OPT_175B, SERVERS, Server
from entrypoints.bench.paper.figure import Figure, Json, Panel, Published, Series, Study, Table, verdict
from entrypoints.bench.paper.lengths import ALPACA, SHAREGPT, TRANSLATION, Lengths
from entrypoints.bench.paper.sustained import Curve, curve
from entrypoints.bench.paper.systems import ORCA, OURS, STATIC, Setup
from entrypoints.bench.paper.traces import Workload, chat, plain, with_prefix

MAX, _, ORACLE = ORCA
PREFIX_TOKENS = {1: 80, 5: 341}
"""examples in the prefix → its tokens (not in the paper's text)"""
_DRIVING_S = 0.04
CHAT_ROUNDS = 6.0
"""earlier rounds of a chat, on average, so that most prompts are as long as they may be (the paper: "most requests")"""

Curves = dict[str, Curve]


def _curves(
    study: Study, what: str, systems: Sequence[str], server: Server, workload: Workload, seconds: float
) -> Curves:
    found = {}
    for system in systems:
        study.progress(f"{what}: {server.name}, {workload.name}, {system}")
        setup = Setup(system, server, prefix_caching="prefix" in workload.name and system == OURS)
        found[system] = curve(setup, workload, seconds, study.scale, study.seed)
    return found


def _panel(study: Study, title: str, curves: Curves) -> Panel:
    series = [
        Series(system, [point.latency_s for point in found.points], [p.rate for p in found.points])
        for system, found in curves.items()
    ]
    return Panel(
        title=title,
        x_label="requests/s",
        y_label="s/token",
        kind="lines",
        series=series,
        y_max=study.scale.give_up_s,
        bound=study.scale.bound_s,
    )


def _over(curves: Curves, other: str) -> float:
    """How many times the sustained rate of `other` ours is."""
    return curves[OURS].sustained / curves[other].sustained if curves[other].sustained else float("inf")


def _json(curves: Curves) -> Json:
    return {
        system: {
            "sustained_per_s": found.sustained,
            "points": [[point.rate, point.latency_s] for point in found.points],
        }
        for system, found in curves.items()
    }


def _row(name: str, curves: Curves, systems: Sequence[str]) -> list[str]:
    return [name, *(f"{curves[system].sustained:.2f}" for system in systems)]


def basic_sampling(study: Study) -> Figure:
    """Fig. 12: three models, two data sets, all systems."""
    systems = (STATIC, *ORCA, OURS)
    rates, ratios, panels = [], [], []
    data: Json = {}
    outside: list[str] = []
    for lengths in (SHAREGPT, ALPACA):
        for server in SERVERS[: study.scale.num_servers]:
            found = _curves(study, "Fig. 12", systems, server, plain(lengths), study.scale.seconds(lengths, server))
            name = f"{server.name}, {lengths.name}"
            panels.append(_panel(study, name, found))
            rates.append(_row(name, found, systems))
            data[name] = _json(found)
            ratios.append([name, *_ratios(found, lengths, outside, name)])
    remarks = [
        "Sustained: the highest rate with a mean normalised latency of at most "
        f"{study.scale.bound_s:g} s/token (dashed). The paper's ratios are ranges over its three models.",
        "Absolute rates depend on the cost model; ratios much less, for all systems run on the same one. On Alpaca "
        "ours is further ahead of FasterTransformer than 22x: its steps take prompts along, where the paper's engine "
        "stopped for them (Fig. 13).",
        "FasterTransformer has batches of as many requests as memory holds at 2,048 tokens each; its rate is the one "
        "with 1 s/token after an hour, as in the paper.",
    ]
    if outside:
        remarks.append(f"Outside the paper's ranges: {'; '.join(outside)}.")
    if study.scale.num_servers == len(SERVERS):
        remarks.append(
            "OPT-175B on Alpaca: the paper, too, finds ours less far ahead of Oracle and Pow2 there: all three hold as "
            "many requests as may run at once (256 rows), and the rest is computing."
        )
        slower = replace(OPT_175B, name=f"OPT-175B with {_DRIVING_S * 1e3:.0f} ms more a step")
        slower = replace(slower, host_s=slower.host_s + _DRIVING_S)
        seconds = study.scale.seconds(SHAREGPT, OPT_175B)
        found = _curves(study, "Fig. 12", (MAX, ORACLE, OURS), slower, plain(SHAREGPT), seconds)
        data[slower.name] = _json(found)
        remarks.append(
            "OPT-175B on ShareGPT: 60K slots let Oracle hold about 50 requests and Max 29, so weights are read for "
            "many tokens already, and what ours adds to a batch costs products and KV to read. The cost model has no "
            "cost of driving eight workers, which the paper's engine did by remote calls: with "
            f"{_DRIVING_S * 1e3:.0f} ms more a step, whatever the batch, ours is {_over(found, ORACLE):.2f}x over "
            f"Oracle and {_over(found, MAX):.2f}x over Max."
        )
    return Figure(
        key="fig12",
        title="Fig. 12: normalised latency over request rate",
        about="Sustained requests/s, and how far ours is ahead; the paper's ranges are those of §6.2 on ShareGPT.",
        tables=[
            Table(["", *systems], rates),
            Table(["ours over", "Oracle", "paper", "", "Max", "paper", "", "FasterTransformer", "paper"], ratios),
        ],
        panels=panels,
        remarks=remarks,
        data=data,
    )


def _ratios(found: Curves, lengths: Lengths, outside: list[str], name: str) -> list[str]:
    """Cells of one model; ratios outside the paper's ranges are appended to `outside`."""
    cells = []
    for other, paper in ((ORACLE, published.RATE_OVER_ORACLE), (MAX, published.RATE_OVER_MAX)):
        ratio = _over(found, other)
        told = str(paper) if lengths is SHAREGPT else "-"
        cells += [f"{ratio:.2f}x", told, verdict(ratio, paper) if lengths is SHAREGPT else ""]
        if lengths is SHAREGPT and not paper.holds(ratio):
            outside.append(f"{name} over {other} {ratio:.2f}x")
    return [*cells, f"{_over(found, STATIC):.1f}x", "up to 22x"]


def parallel_and_beams(study: Study) -> Figure:
    """Fig. 14: OPT-13B on Alpaca, more and more sequences of a prompt."""
    systems = (*ORCA, OURS)
    rates, panels, over = [], [], {}
    data: Json = {}
    for beams in (False, True):
        for width in study.scale.widths:
            workload = plain(ALPACA, width, beams)
            found = _curves(study, "Fig. 14", systems, OPT_13B, workload, study.scale.alpaca_s / 2)
            name = f"{'beam width' if beams else 'samples'} {width}"
            panels.append(_panel(study, name, found))
            over[name] = _over(found, ORACLE)
            rates.append([*_row(name, found, systems), f"{over[name]:.2f}x", f"{_over(found, MAX):.2f}x"])
            data[name] = _json(found)
    widest = f"beam width {study.scale.widths[-1]}"
    paper = published.OVER_ORACLE_BEAM_6
    rows = [[widest, f"{over[widest]:.2f}x", str(paper), verdict(over[widest], paper, 0.3)]]
    return Figure(
        key="fig14",
        title="Fig. 14: parallel sampling and beam search",
        about="OPT-13B, Alpaca lengths: sustained requests/s.",
        tables=[
            Table(["", *systems, "ours over Oracle", "over Max"], rates),
            Table(["ours over Oracle", "here", "paper", ""], rows),
        ],
        panels=panels,
        remarks=[
            "The paper's advantage over Oracle grows from 1.3x with one sample to 2.3x with six beams.",
            "A baseline runs each sample as a request of its own, with its own chunk and prompt. Its beams do not wait "
            "for each other, and they copy KV that they take over from another (how many do: as ours' candidates have "
            "it).",
        ],
        data=data,
    )


def shared_prefix(study: Study) -> Figure:
    """Fig. 16: a translation prompt that all requests begin with."""
    systems = (ORACLE, OURS)
    rows, panels = [], []
    data: Json = {}
    for examples, tokens in PREFIX_TOKENS.items():
        workload = with_prefix(TRANSLATION, tokens)
        found = _curves(study, "Fig. 16", systems, LLAMA_13B, workload, study.scale.alpaca_s)
        ratio, paper = _over(found, ORACLE), published.PREFIX[examples]
        name = f"{examples} example{'s' if examples > 1 else ''}, {tokens} tokens"
        panels.append(_panel(study, name, found))
        rows.append([*_row(name, found, systems), f"{ratio:.2f}x", str(paper), verdict(ratio, paper, 0.5)])
        data[name] = _json(found)
    return Figure(
        key="fig16",
        title="Fig. 16: shared prefix",
        about="LLaMA-13B, translation: sustained requests/s.",
        tables=[Table(["prefix", *systems, "ours over Oracle", "paper", ""], rows)],
        panels=panels,
        remarks=[
            "Lengths of the prefixes and sentences are not in the paper's text: 80 and 341 tokens, and 35 in, 45 out "
            "on average, are assumed. The prefix is found in the prefix cache, so it is stored and computed once. "
            "It is read by each sequence, though, and with five examples that is most of what a step reads: ours "
            "stays behind the paper's distance.",
        ],
        data=data,
    )


def chatbot(study: Study) -> Figure:
    """Fig. 17: prompts are histories, cut to 1,024 tokens."""
    systems = (*ORCA, OURS)
    found = _curves(study, "Fig. 17", systems, OPT_13B, chat(SHAREGPT, CHAT_ROUNDS), study.scale.sharegpt_s)
    paper: Published = published.CHAT_OVER_ORCA
    over = {system: _over(found, system) for system in ORCA}
    rows = [[s, f"{found[s].sustained:.2f}", *_chat_cells(over.get(s), paper)] for s in systems]
    return Figure(
        key="fig17",
        title="Fig. 17: chat",
        about="OPT-13B, ShareGPT lengths, prompts with their history cut to 1,024 tokens: sustained requests/s.",
        tables=[Table(["system", "sustained", "ours is ahead", "paper", ""], rows)],
        panels=[_panel(study, "chat, OPT-13B", found)],
        remarks=[
            "The three baselines are alike, as in the paper: next to a prompt of 1,024 tokens any output makes a chunk "
            "of 2,048. With such prompts ours holds at most about 12 requests to the baselines' 7, so it is ahead by "
            "1.7x at most; the paper's 2x needs more short prompts or shorter outputs than are assumed here "
            f"({CHAT_ROUNDS:g} earlier rounds on average, outputs as in ShareGPT).",
        ],
        data=_json(found),
    )


def _chat_cells(ratio: float | None, paper: Published) -> list[str]:
    return ["", "", ""] if ratio is None else [f"{ratio:.2f}x", str(paper), verdict(ratio, paper, 0.3)]
