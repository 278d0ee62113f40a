"""Fig. 18b: what the block size is worth (OPT-13B)."""

from __future__ import annotations

from entrypoints.bench.paper import published
from entrypoints.bench.paper.cost import OPT_13B
from entrypoints.bench.paper.figure import Figure, Json, Panel, Series, Study, Table
from entrypoints.bench.paper.lengths import ALPACA, SHAREGPT
from entrypoints.bench.paper.simulate import Outcome, Simulation
from entrypoints.bench.paper.systems import OURS, Setup
from entrypoints.bench.paper.traces import plain

_LOAD = 0.8
"""of what blocks of 16 sustain, roughly"""
_GIVE_UP_S = 1.0
_GOOD = 1.1


def block_size(study: Study) -> Figure:
    """Normalised latency at a fixed rate, for each data set."""
    sizes = study.scale.block_sizes
    rows, series, best = [], [], []
    data: Json = {}
    for lengths in (SHAREGPT, ALPACA):
        rate = _LOAD * Setup(OURS, OPT_13B).guess(plain(lengths), study.seed)
        name = f"{lengths.name}, {rate:.2g}/s"
        found: dict[int, Outcome] = {}
        for size in sizes:
            study.progress(f"Fig. 18b: {lengths.name}, blocks of {size}")
            jobs = plain(lengths).jobs(rate, study.scale.seconds(lengths, OPT_13B), study.seed)
            found[size] = Simulation(Setup(OURS, OPT_13B, size), plain(lengths), jobs, _GIVE_UP_S).run()
        rows.append([f"{name}: s/token", *(shown_latency(outcome) for outcome in found.values())])
        rows.append([f"{name}: preemptions", *(str(outcome.preemptions) for outcome in found.values())])
        latencies = [min(outcome.normalised_latency_s, _GIVE_UP_S) for outcome in found.values()]
        series.append(Series(name, latencies, [float(size) for size in sizes]))
        least = min(outcome.normalised_latency_s for outcome in found.values())
        good = [str(size) for size, outcome in found.items() if outcome.normalised_latency_s <= _GOOD * least]
        best.append([lengths.name, ", ".join(good), published.GOOD_BLOCK_SIZES[lengths.name]])
        data[lengths.name] = {str(size): outcome.normalised_latency_s for size, outcome in found.items()}
    return Figure(
        key="fig18b",
        title="Fig. 18b: block size",
        about="OPT-13B, mean normalised latency at a fixed rate (`>`: given up there).",
        tables=[
            Table(["block size", *(str(size) for size in sizes)], rows),
            Table(["", f"at most {_GOOD - 1:.0%} above the best", "the paper's best"], best),
        ],
        panels=[by_block_size("Latency over block size", "s/token", series, log_y=True)],
        remarks=[
            "On Alpaca larger blocks are much worse, in the paper, too, for sequences become shorter than blocks. The "
            "scheduler and the block pool are the engine's here, so what "
            "large blocks waste is counted; what small blocks cost a kernel is an assumption (`SMALL_BLOCK_TOKENS`).",
        ],
        data=data,
    )


def shown_latency(outcome: Outcome) -> str:
    return f"{'> ' if outcome.gave_up else ''}{outcome.normalised_latency_s:.3f}"


def by_block_size(title: str, y_label: str, series: list[Series], log_y: bool = False) -> Panel:
    return Panel(
        title=title, x_label="block size", y_label=y_label, kind="lines", series=series, log_x=True, log_y=log_y
    )
