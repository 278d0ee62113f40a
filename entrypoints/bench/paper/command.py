"""`engine-bench paper`: which figures, how much of them, and where to."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from entrypoints.bench.paper.figure import DEFAULT, QUICK, Figure, Study

MODES = ("simulated",)
FIGURES = ("2", "12", "13", "14", "15", "16", "17", "18b", "19")


def _figures(text: str) -> list[str]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in FIGURES]
    if unknown or not wanted:
        raise argparse.ArgumentTypeError(f"unknown figures {unknown}; known: {', '.join(FIGURES)}")
    return wanted


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    paper = commands.add_parser("paper", help="the PagedAttention paper's evaluation, beside its values")
    paper.add_argument("--mode", choices=MODES, default="simulated", help="simulated: the scheduler on a virtual clock")
    paper.add_argument("--figures", type=_figures, default=list(FIGURES), metavar="2,12,18b", help="default: all")
    paper.add_argument("--out", type=Path, default=Path("paper"), metavar="DIR", help="default: paper")
    paper.add_argument("--quick", action="store_true", help="short traces, one model: for tests, not for figures")
    paper.add_argument("--no-plots", dest="plots", action="store_false", help="tables alone, without matplotlib")
    paper.add_argument("--seed", type=int, default=0)
    paper.add_argument("--no-progress", dest="progress", action="store_false")
    paper.set_defaults(parser=paper)


def check(options: argparse.Namespace) -> None:
    """Refuse what could not be done, before it takes time. Raises ValueError."""
    if options.plots:
        from entrypoints.bench.paper.plots import require_matplotlib

        require_matplotlib()
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out} is a file")


def paper(options: argparse.Namespace) -> list[dict[str, object]]:
    """Run, write, and tell what was written."""
    from entrypoints.bench.paper.report import write

    start = time.monotonic()

    def progress(text: str) -> None:
        if options.progress:
            print(f"[{time.monotonic() - start:6.1f} s] {text}", file=sys.stderr, flush=True)

    scale = QUICK if options.quick else DEFAULT
    figures = simulated(Study(scale, options.seed, progress), options.figures)
    settings: dict[str, object] = {"mode": options.mode, "scale": scale.name, "seed": options.seed}
    write(figures, options.out, _about(options), settings, options.plots)
    return [{"mode": options.mode, "figures": [figure.key for figure in figures], "out": str(options.out)}]


def simulated(study: Study, wanted: list[str]) -> list[Figure]:
    from entrypoints.bench.paper import fig_blocks, fig_memory, fig_rates, fig_sharing

    makers: dict[str, Callable[[Study], Figure]] = {
        "2": fig_memory.memory_use,
        "12": fig_rates.basic_sampling,
        "13": fig_memory.batched_requests,
        "14": fig_rates.parallel_and_beams,
        "15": fig_sharing.memory_saved,
        "16": fig_rates.shared_prefix,
        "17": fig_rates.chatbot,
        "18b": fig_blocks.block_size,
        "19": fig_blocks.recovery,
    }
    return [makers[name](study) for name in FIGURES if name in wanted]


def _about(options: argparse.Namespace) -> list[str]:
    return []
