"""Normalised latency over request rate: Fig. 14 (samples and beams), 16 (shared prefix), 17 (chat)."""

from __future__ import annotations

from dataclasses import replace

from entrypoints.bench.paper import published
from entrypoints.bench.paper.cost import HOST_PER_ROW_S, LLAMA_13B, OPT_13B
from entrypoints.bench.paper.figure import Figure, Json, Published, Study, Table, exactly, verdict
from entrypoints.bench.paper.lengths import ALPACA, SHAREGPT, TRANSLATION
from entrypoints.bench.paper.rates import Curves, as_json, over, rate_curves, rate_panel, rates_row
from entrypoints.bench.paper.saturated import beside_ours, saturated, steps_as_json
from entrypoints.bench.paper.sustained import curve
from entrypoints.bench.paper.systems import ORCA, OURS, Setup
from entrypoints.bench.paper.traces import chat, plain, with_prefix

MAX, POW2, ORACLE = ORCA
PREFIX_TOKENS = {1: 80, 5: 341}
"""examples in the prefix → its tokens (not in the paper's text)"""
_ROW_S = 300e-6
CHAT_ROUNDS = 6.0
"""earlier rounds of a chat, on average, so that most prompts are as long as they may be (the paper: "most requests")"""
_FEW_ROUNDS = 1.0


def parallel_and_beams(study: Study) -> Figure:
    """Fig. 14: OPT-13B on Alpaca, more and more sequences of a prompt."""
    systems = (*ORCA, OURS)
    rates, panels = [], []
    beams_of: dict[int, Curves] = {}
    data: Json = {}
    workloads = [plain(ALPACA)]
    workloads += [plain(ALPACA, width, beams) for beams in (False, True) for width in study.scale.widths]
    for workload in workloads:
        found = rate_curves(study, "Fig. 14", systems, OPT_13B, workload, study.scale.alpaca_s / 2)
        width = workload.samples
        name = "one sample" if width == 1 else f"{'beam width' if workload.beams else 'samples'} {width}"
        if width > 1:
            panels.append(rate_panel(study, name, found))
        if width == 1 or workload.beams:
            beams_of[width] = found
        rates.append([*rates_row(name, found, systems), *(f"{over(found, other):.2f}x" for other in reversed(ORCA))])
        data[name] = as_json(found)
    dearer = replace(OPT_13B, name=f"OPT-13B with {_ROW_S * 1e6:.0f} us a row", host_per_row_s=_ROW_S)
    found = rate_curves(study, "Fig. 14", (POW2, ORACLE, OURS), dearer, workloads[0], study.scale.alpaca_s / 2)
    data[dearer.name] = as_json(found)
    more = (
        f"a row of a batch costs the host {HOST_PER_ROW_S * 1e6:.0f} us here; with {_ROW_S * 1e6:.0f} us, ours is "
        f"{over(found, ORACLE):.2f}x over Oracle and {over(found, POW2):.2f}x over Pow2 with one sample."
    )
    return Figure(
        key="fig14",
        title="Fig. 14: parallel sampling and beam search",
        about="OPT-13B, Alpaca lengths: sustained requests/s.",
        tables=[
            Table(["", *systems, "ours over Oracle", "over Pow2", "over Max"], rates),
            Table(["ours is ahead of", "beams", "here", "paper", ""], _beams_beside(beams_of)),
        ],
        panels=panels,
        remarks=[
            "With one sample ours is further ahead than in the paper. On Alpaca its batches are large, so that is a "
            f"question of what each request more in a batch costs the engine beside the GPU's work: {more}",
            "A baseline runs each sample as a request of its own, with its own chunk and prompt. Its beams do not wait "
            "for each other, and they copy KV that they take over from another (how many do: as ours' candidates have "
            "it).",
            f"Traces are of {study.scale.alpaca_s / 2:g} s here, half as long as in Fig. 12, for they have more "
            "sequences; that lifts all rates alike.",
        ],
        data=data,
    )


def _beams_beside(beams_of: dict[int, Curves]) -> list[list[str]]:
    rows = []
    for other, told in ((ORACLE, published.SPEEDUP_OVER_ORACLE), (POW2, published.SPEEDUP_OVER_POW2)):
        for width, found in beams_of.items():
            if width in told:
                here, paper = over(found, other), exactly(told[width], "x")
                rows.append([other, str(width), f"{here:.2f}x", str(paper), verdict(here, paper, 0.3)])
    return rows


def shared_prefix(study: Study) -> Figure:
    """Fig. 16: a translation prompt that all requests begin with."""
    systems = (ORACLE, OURS)
    rows, panels, once = [], [], {}
    data: Json = {}
    for examples, tokens in PREFIX_TOKENS.items():
        workload = with_prefix(TRANSLATION, tokens)
        found = rate_curves(study, "Fig. 16", systems, LLAMA_13B, workload, study.scale.alpaca_s)
        ratio, paper = over(found, ORACLE), published.PREFIX[examples]
        name = f"{examples} example{'s' if examples > 1 else ''}, {tokens} tokens"
        panels.append(rate_panel(study, name, found))
        study.progress(f"Fig. 16: {name}, read once a step")
        setup = Setup(OURS, LLAMA_13B, prefix_caching=True, read_once=tokens)
        read_once = curve(setup, workload, study.scale.alpaca_s, study.scale, study.seed)
        once[examples] = read_once.sustained / found[ORACLE].sustained
        cells = [f"{ratio:.2f}x", str(paper), verdict(ratio, paper, 0.5), f"{once[examples]:.2f}x"]
        rows.append([*rates_row(name, found, systems), *cells])
        data[name] = {**as_json(found), "read once, over Oracle": once[examples]}
    longest = max(PREFIX_TOKENS)
    layer_mb = PREFIX_TOKENS[longest] * LLAMA_13B.slot_bytes / LLAMA_13B.layers / 1e6
    return Figure(
        key="fig16",
        title="Fig. 16: shared prefix",
        about="LLaMA-13B, translation: sustained requests/s.",
        tables=[Table(["prefix", *systems, "ours over Oracle", "paper", "", "were it read once a step"], rows)],
        panels=panels,
        remarks=[
            "Lengths of the prefixes and sentences are not in the paper's text: 80 and 341 tokens, and 35 in, 45 out "
            "on average, are assumed. The prefix is found in the prefix cache, so it is stored and computed once.",
            "It is read by each sequence, though, and the cost model charges every one of these reads to the memory's "
            "bandwidth: with five examples that is most of what a step reads. If a step read the prefix once, ours "
            f"would be {once[longest]:.2f}x over Oracle (last column); the paper's {published.PREFIX[longest]} lies "
            f"between. A layer's keys and values of this prefix are {layer_mb:.0f} MB, and an A100 has 40 MB of L2, so "
            "on a GPU some of these reads do not reach the memory. How many is not known here, and not assumed.",
        ],
        data=data,
    )


def chatbot(study: Study) -> Figure:
    """Fig. 17: prompts are histories, cut to 1,024 tokens."""
    systems = (*ORCA, OURS)
    workload, short = chat(SHAREGPT, CHAT_ROUNDS), chat(SHAREGPT, _FEW_ROUNDS)
    found = rate_curves(study, "Fig. 17", systems, OPT_13B, workload, study.scale.sharegpt_s)
    fewer = rate_curves(study, f"Fig. 17, {_FEW_ROUNDS:g} rounds", systems, OPT_13B, short, study.scale.sharegpt_s)
    steps = {"chat": {system: saturated(study, Setup(system, OPT_13B), workload) for system in systems}}
    paper: Published = published.CHAT_OVER_ORCA
    rows = [
        [s, f"{found[s].sustained:.2f}", f"{ahead:.2f}x", str(paper), verdict(ahead, paper, 0.3), f"{few:.2f}x"]
        for s, ahead, few in ((system, over(found, system), over(fewer, system)) for system in ORCA)
    ]
    rows.append([OURS, f"{found[OURS].sustained:.2f}", "", "", "", ""])
    ours, most = steps["chat"][OURS], steps["chat"][MAX]
    head = ["system", "sustained", "ours is ahead", "paper", "", f"with {_FEW_ROUNDS:g} earlier round"]
    return Figure(
        key="fig17",
        title="Fig. 17: chat",
        about="OPT-13B, ShareGPT lengths, prompts with their history cut to 1,024 tokens: sustained requests/s.",
        tables=[Table(head, rows), beside_ours(steps)],
        panels=[rate_panel(study, "chat, OPT-13B", found)],
        remarks=[
            "The three baselines are alike, as in the paper: next to a prompt of 1,024 tokens any output makes a chunk "
            f"of 2,048. Ours holds {ours.batched / most.batched:.2f}x the requests of Max, which is the paper's 2x; "
            f"but its steps take {ours.step_s / most.step_s:.2f}x as long ({1e3 * most.step_s:.0f} and "
            f"{1e3 * ours.step_s:.0f} ms), of which {1e3 * (ours.reading_s - most.reading_s):.0f} ms are contexts to "
            "read, the rest products of long prompts. So the rates are less far apart than the batches.",
            f"A chat has {CHAT_ROUNDS:g} earlier rounds on average here, so that most prompts are cut. With "
            f"{_FEW_ROUNDS:g} round (last column) ours is further ahead, but the baselines are no longer alike.",
        ],
        data={**as_json(found), "few rounds": as_json(fewer), "while requests wait": steps_as_json(steps)},
    )
