"""Fig. 15: blocks saved by sharing among the samples or beams of a prompt, in the engine's own block pool."""

from __future__ import annotations

from entrypoints.bench.paper import published
from entrypoints.bench.paper.candidates import SPREAD
from entrypoints.bench.paper.cost import OPT_13B
from entrypoints.bench.paper.figure import Figure, Json, Panel, Published, Series, Study, Table, exactly, verdict
from entrypoints.bench.paper.lengths import ALPACA, SHAREGPT, Lengths
from entrypoints.bench.paper.simulate import Simulation
from entrypoints.bench.paper.systems import OURS, Setup
from entrypoints.bench.paper.traces import plain

_SPREADS = (0.25, 0.5, 1.0, 2.0, 4.0)
_LOAD = 0.5
"""of what is sustained: near it, those preempted and started again have little but their prompts, and share more"""
_SLACK = 3.0
"""points, for beams"""


def saved_share(study: Study, lengths: Lengths, width: int, beams: bool, spread: float = SPREAD) -> float:
    """In %, averaged over time while requests arrive."""
    study.progress(f"Fig. 15: {lengths.name}, {'beam width' if beams else 'samples'} {width}, spread {spread:g}")
    workload = plain(lengths, width, beams)
    setup, seconds = Setup(OURS, OPT_13B), 2 * study.scale.seconds(lengths, OPT_13B)
    jobs = workload.jobs(_LOAD * setup.guess(workload, study.seed), seconds, study.seed)
    outcome = Simulation(setup, workload, jobs, warm_up_s=seconds / 6, spread=spread).run()
    return 100 * outcome.saved


def memory_saved(study: Study) -> Figure:
    rows, panels = [], []
    data: Json = {}
    for lengths in (ALPACA, SHAREGPT):
        for beams in (False, True):
            paper = published.SAVED[lengths.name, beams]
            bars = published.SAVED_BARS[beams] if lengths is ALPACA else {}
            found = {width: saved_share(study, lengths, width, beams) for width in study.scale.widths}
            name = f"{lengths.name}, {'beams' if beams else 'samples'}"
            for width, saved in found.items():
                told = str(exactly(bars[width], " %", 2)) if bars else ""
                stands = verdict(saved, paper, _SLACK if beams else 0.5)
                rows.append([name, str(width), f"{saved:.1f} %", told, str(paper), stands])
            panels.append(_panel(name, found, bars, paper))
            data[name] = {str(width): saved for width, saved in found.items()}
    widest = study.scale.widths[-1]
    by_spread = {spread: saved_share(study, ALPACA, widest, True, spread) for spread in _SPREADS}
    panels.append(
        Panel(
            title=f"Alpaca, {widest} beams: the candidate model",
            x_label="spread of the candidates",
            y_label="blocks saved (%)",
            kind="lines",
            series=[Series("here", list(by_spread.values()), list(by_spread))],
            log_x=True,
            y_max=100.0,
        )
    )
    data["by spread"] = {f"{spread:g}": saved for spread, saved in by_spread.items()}
    return Figure(
        key="fig15",
        title="Fig. 15: memory saved by sharing",
        about="Blocks saved by sharing / blocks without sharing, OPT-13B, blocks of 16 tokens, averaged over time.",
        tables=[
            Table(["", "sequences", "here", "paper", "its range for 2 to 6", ""], rows),
            Table(
                ["spread of the candidates", *(f"{spread:g}" for spread in by_spread)],
                [[f"saved, Alpaca, {widest} beams", *(f"{saved:.1f} %" for saved in by_spread.values())]],
            ),
        ],
        panels=panels,
        remarks=[
            "Samples share their prompt's full blocks: (n - 1)/n of the prompt's share of the memory.",
            "How much beams share depends on how fast one beam's children push out the others, so on the model. Here "
            "candidates are drawn at random (`Candidates`); the two constants of that model were chosen with this "
            "figure in view, and the second table shows what the first of them is worth. Beams of a sure model, once "
            "parted, stay apart; those of an unsure one coalesce. That one model of candidates gives more at width 6 "
            "and less at width 2 than OPT-13B did is a limit of the model of candidates: block tables, forks and "
            "copies are the engine's own.",
        ],
        data=data,
    )


def _panel(name: str, found: dict[int, float], bars: dict[int, float], paper: Published) -> Panel:
    series = [Series("here", list(found.values()))]
    if bars:
        series.append(Series("paper", [bars[width] for width in found]))
    return Panel(
        title=name,
        x_label="sequences of a prompt",
        y_label="blocks saved (%)",
        kind="bars",
        categories=[str(width) for width in found],
        series=series,
        value_format="{:.1f}",
        band=None if bars else (paper.low, paper.high),
    )
