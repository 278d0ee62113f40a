"""Fig. 15: blocks saved by sharing among the samples or beams of a prompt, in the engine's own block pool."""

from __future__ import annotations

import numpy as np

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
    rows, panels, prompts = [], [], ""
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
            if lengths is ALPACA and not beams:
                prompts = _prompt_share(found)
            data[name] = {str(width): saved for width, saved in found.items()}
    by_spread = _by_spread(study)
    panels.append(
        Panel(
            title="the candidate model",
            x_label="spread of the candidates",
            y_label="blocks saved (%)",
            kind="lines",
            series=[Series(name, list(saved.values()), list(saved)) for name, saved in by_spread.items()],
            log_x=True,
            y_max=100.0,
        )
    )
    data["by spread"] = {
        name: {f"{spread:g}": one for spread, one in saved.items()} for name, saved in by_spread.items()
    }
    return Figure(
        key="fig15",
        title="Fig. 15: memory saved by sharing",
        about="Blocks saved by sharing / blocks without sharing, OPT-13B, blocks of 16 tokens, averaged over time.",
        tables=[
            Table(["", "sequences", "here", "paper", "its range for 2 to 6", ""], rows),
            Table(
                ["spread of the candidates", *(f"{spread:g}" for spread in _SPREADS)],
                [[name, *(f"{one:.1f} %" for one in saved.values())] for name, saved in by_spread.items()],
            ),
        ],
        panels=panels,
        remarks=[
            prompts,
            "How much beams share depends on how fast one beam's children push out the others, so on the model. Here "
            "candidates are drawn at random (`Candidates`); the two constants of that model were chosen with this "
            "figure in view, and the second table shows what the first of them is worth. Beams of a sure model, once "
            "parted, stay apart; those of an unsure one coalesce.",
            *_limit(by_spread),
        ],
        data=data,
    )


def _prompt_share(found: dict[int, float]) -> str:
    """`found`: saved by samples on Alpaca."""
    shares = [saved * width / (width - 1) for width, saved in found.items()]
    return (
        "Samples share their prompt's full blocks: (n - 1)/n of the prompts' share of the memory. By what is saved on "
        f"Alpaca that share is {min(shares):.1f} to {max(shares):.1f} % here; the paper's text has 12 % (§3)."
    )


def _by_spread(study: Study) -> dict[str, dict[float, float]]:
    """The ends of the paper's ranges for beams, over the candidates' spread."""
    narrowest, widest = study.scale.widths[0], study.scale.widths[-1]
    wanted = dict.fromkeys([(ALPACA, narrowest), (ALPACA, widest), (SHAREGPT, widest)])
    return {
        f"{lengths.name}, {width} beams": {
            spread: saved_share(study, lengths, width, True, spread) for spread in _SPREADS
        }
        for lengths, width in wanted
    }


def _limit(by_spread: dict[str, dict[float, float]]) -> list[str]:
    """Where one constant would have to be for each end of a range, so why one model of candidates misses some."""
    bars = published.SAVED_BARS[True]
    wanted = {
        "Alpaca, 2 beams": bars[2],
        "Alpaca, 6 beams": bars[6],
        "ShareGPT, 6 beams": published.SAVED["ShareGPT", True].high,
    }
    needed = [
        f"{np.interp(paper, list(by_spread[name].values()), list(by_spread[name])):.2g} for the {paper:g} % of {name}"
        for name, paper in wanted.items()
        if name in by_spread
    ]
    if not needed:
        return []
    return [
        f"By that table the paper's values would need a spread of {'; '.join(needed)}. No one spread gives all: real "
        "text is not equally sure at every length and width, as candidates drawn from one distribution are. That is "
        "a limit of the model of candidates; block tables, forks and copies are the engine's own."
    ]


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
