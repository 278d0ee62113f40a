"""`engine-bench paper`: which figures, how much of them, and where to."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from entrypoints.options import FlexibleArgumentParser, add_model, engine_args, refuse_without_effect

if TYPE_CHECKING:  # not at the top: --help is instant
    from entrypoints.bench.paper.figure import Figure, Study

MODES = ("simulated", "real")
FIGURES = ("2", "12", "13", "14", "15", "16", "17", "18b", "19")


def _figures(text: str) -> list[str]:
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in FIGURES]
    if unknown or not wanted:
        raise argparse.ArgumentTypeError(f"unknown figures {unknown}; known: {', '.join(FIGURES)}")
    return wanted


def add_command(commands: argparse._SubParsersAction[FlexibleArgumentParser]) -> None:
    paper = commands.add_parser("paper", help="the PagedAttention paper's evaluation, beside its values")
    paper.add_argument(
        "--mode",
        choices=MODES,
        default="simulated",
        help="simulated: the scheduler on a virtual clock, for the paper's servers; real: a model on this machine",
    )
    add_model(paper, "of --mode real; default: the demo model")
    paper.add_argument("--threads", type=int, help="of --mode real")
    paper.add_argument("--figures", type=_figures, default=list(FIGURES), metavar="2,12,18b", help="default: all")
    paper.add_argument("--out", type=Path, default=Path("paper"), metavar="DIR", help="default: paper")
    paper.add_argument("--quick", action="store_true", help="short traces, one model: for tests, not for figures")
    paper.add_argument("--no-plots", dest="plots", action="store_false", help="tables alone, without matplotlib")
    paper.add_argument("--seed", type=int, default=0)
    paper.add_argument("--no-progress", dest="progress", action="store_false")
    paper.set_defaults(parser=paper)


def check(options: argparse.Namespace) -> None:
    """Refuse what could not be done, before it takes time. Raises ValueError."""
    if options.mode == "simulated":
        refuse_without_effect(options.parser, options, {"model", "threads"}, "with --mode simulated")
    else:
        refuse_without_effect(options.parser, options, {"figures"}, "with --mode real, which has its own")
    if options.plots:
        from entrypoints.bench.paper.plots import require_matplotlib

        require_matplotlib()
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out} is a file")


def paper(options: argparse.Namespace) -> list[dict[str, object]]:
    """Run, write, and tell what was written."""
    from entrypoints.bench.paper.figure import DEFAULT, QUICK, Study
    from entrypoints.bench.paper.report import write

    start = time.monotonic()

    def progress(text: str) -> None:
        if options.progress:
            print(f"[{time.monotonic() - start:6.1f} s] {text}", file=sys.stderr, flush=True)

    scale = QUICK if options.quick else DEFAULT
    study = Study(scale, options.seed, progress)
    figures = simulated(study, options.figures) if options.mode == "simulated" else real(study, options)
    settings: dict[str, object] = {"mode": options.mode, "scale": scale.name, "seed": options.seed}
    write(figures, options.out, _about(options), settings, options.plots)
    return [{"mode": options.mode, "figures": [figure.key for figure in figures], "out": str(options.out)}]


def simulated(study: Study, wanted: list[str]) -> list[Figure]:
    from entrypoints.bench.paper import fig_basic, fig_blocks, fig_memory, fig_rates, fig_recovery, fig_sharing

    makers: dict[str, Callable[[Study], Figure]] = {
        "2": fig_memory.memory_use,
        "12": fig_basic.basic_sampling,
        "13": fig_memory.batched_requests,
        "14": fig_rates.parallel_and_beams,
        "15": fig_sharing.memory_saved,
        "16": fig_rates.shared_prefix,
        "17": fig_rates.chatbot,
        "18b": fig_blocks.block_size,
        "19": fig_recovery.recovery,
    }
    return [makers[name](study) for name in FIGURES if name in wanted]


def real(study: Study, options: argparse.Namespace) -> list[Figure]:
    from entrypoints.bench.paper import fig_real
    from entrypoints.bench.paper.device import Device, english

    args = engine_args(options, options.model)
    study.progress(f"real: loading {args.model}")
    device = Device(args)
    try:
        bench = fig_real.Bench(device, english(device), study)
        count = study.scale.real_requests
        figure, cost = fig_real.memory_and_rate(bench, count)
        return [figure, fig_real.sharing(bench, count // 4), fig_real.recovery(bench, cost)]
    finally:
        device.close()


def _about(options: argparse.Namespace) -> list[str]:
    """How the figures came about: the command, what is real, what is modelled, what was fitted."""
    from entrypoints.bench.paper import candidates, cost, lengths, published

    command = "engine-bench paper" + (" --quick" if options.quick else "") + f" --seed {options.seed}"
    if options.mode == "real":
        return [
            f"`{command} --mode real`: the scheduler, block pool, runner and model are the engine's; a baseline is the "
            "same scheduler over a cache that reserves contiguous chunks (`ReservingKVCache`), whose block tables the "
            "device follows. The clock is the sum of the steps' times; it stands still while nothing is to be done."
        ]
    servers = "; ".join(f"{one.name} on {one.gpus}, {one.num_slots:,} slots" for one in cost.SERVERS)
    fits = "; ".join(
        f"{one.name} {one.prompt.mean:g} in (sigma {one.prompt.sigma:g}), {one.output.mean:g} out "
        f"(sigma {one.output.sigma:g})"
        for one in (lengths.SHAREGPT, lengths.ALPACA)
    )
    return [
        f"`{command}`. The scheduler and the block manager are the engine's; requests arrive and steps end on a "
        "virtual clock. A baseline is the same scheduler over a cache that reserves contiguous chunks from a buddy "
        "allocator for a request's whole life (`ReservingKVCache`); FasterTransformer is a loop of static batches. No "
        "model computes, so nothing here says how fast this engine is on a GPU: the figures say what its memory "
        "management is worth where a step costs what the cost model says.",
        f"Servers (the paper's Table 1): {servers}. Lengths, log-normal with the paper's means, cut at "
        f"{lengths.LONGEST:,}: {fits}. Arrivals are Poisson.",
        "A step costs host time + max(reading the weights, products) + reading the KV of all contexts + all-reduces, "
        f"from the A100's data sheet at {cost.READ_EFFICIENCY:.0%} of its bandwidth for weights, "
        f"{cost.KV_EFFICIENCY:.0%} for KV (pages: {cost.PAGED_PENALTY:g}x, the paper's 7.1) and "
        f"{cost.MATH_EFFICIENCY:.0%} of its FLOP/s. Fitted: host time, {cost.HOST_S * 1e3:g} ms a step, to the 30.4 "
        "requests that OPT-13B batches at 2/s (Fig. 13a); the spreads of the lengths, to Fig. 2 and 13; the model of "
        f"beam candidates (spread {candidates.SPREAD:g}, surer after {candidates.SURER_AFTER} tokens), to Fig. 15. "
        "Everything else follows.",
        published.SETTING,
    ]
