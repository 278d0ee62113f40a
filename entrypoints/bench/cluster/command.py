"""`engine-bench step-costs` measures what steps take here; `engine-bench cluster` asks what so many replicas would
do."""

from __future__ import annotations

import argparse
import functools
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrypoints.options import (
    add_engine_options,
    add_model,
    check_writable,
    count,
    counts,
    engine_args,
    positive,
    refuse_without_effect,
)

if TYPE_CHECKING:
    from entrypoints.bench.cluster.layouts import Layout
    from entrypoints.bench.cluster.outcome import Outcome
    from entrypoints.bench.cluster.runs import Runs
    from entrypoints.bench.cluster.traffic import Traffic

MOST_REPLICAS = 64
"""that are simulated beside each other"""
MOST_IN_CELLS = 4096
MOST_REQUESTS, MOST_TOKENS = 200_000, 100_000_000
"""of a layout's runs: some minutes, and GB"""
_COLUMNS = ("tokens_per_s", "ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "hits", "load_max_over_mean", "pace")
_LINK = ("transfer_ms", "transfer_mb_per_s")

Told = tuple[str, "Layout", "Outcome"]
"""simulated or real"""


def _layouts(text: str) -> list[Layout]:
    from entrypoints.bench.cluster.layouts import layout

    try:
        return [layout(each) for each in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_commands(commands: Any) -> None:
    costs = commands.add_parser("step-costs", help="what a step takes here, by its plan: a table for `cluster`")
    add_model(costs)
    costs.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the table goes (JSON)")
    costs.add_argument("--rounds", type=count, default=1, help="of all sizes of steps")
    beside_help = "and what they take while another such engine computes here, for `cluster --real`"
    costs.add_argument("--beside", action="store_true", help=beside_help)
    costs.add_argument(
        "--most-error",
        type=positive,
        default=0.15,
        metavar="SHARE",
        help="a table that is off by more in the mean is not written: the exit status is 1 (default: 0.15)",
    )
    add_engine_options(costs)
    costs.set_defaults(parser=costs)

    cluster = commands.add_parser("cluster", help="the scheduler and the router on a virtual clock: many replicas")
    add_model(cluster)
    cluster.add_argument("--costs", type=Path, required=True, metavar="FILE", help="of `engine-bench step-costs`")
    cluster.add_argument("--replicas", type=counts, metavar="N,N", help="each in turn; default: 1,2,4")
    cluster.add_argument(
        "--layouts",
        type=_layouts,
        metavar="NxS,NP+ND,…",
        help="in place of --replicas: so many replicas of so many stages, which have a machine each; or so many "
        "servers that compute prompts for so many that decode. With --ttft: so many times each as hold",
    )
    cluster.add_argument("--transfer-ms", type=positive, metavar="MS", help="that any prompt's pages take to move")
    cluster.add_argument(
        "--transfer-mb-per-s",
        type=positive,
        metavar="MB",
        help="and how many MB a second move then; tools/bench_disaggregation.py measures both",
    )
    hop_help = "from one stage of a replica to the next; tools/bench_stages.py measures it (default: nothing)"
    cluster.add_argument("--hop-ms", type=positive, metavar="MS", help=hop_help)
    cluster.add_argument(
        "--cell",
        type=count,
        metavar="N",
        help="so many replicas stand for all, with their share of the traffic: what thousands would do, in minutes",
    )
    cluster.add_argument("--rate", type=positive, required=True, help="requests a second, Poisson")
    cluster.add_argument("--seconds", type=positive, default=60.0, help="of traffic")
    cluster.add_argument("--seeds", type=count, default=3, help="runs, whose means and deviations are told")
    cluster.add_argument("--input-len", type=count, default=128, help="prompt tokens per request, heads included")
    cluster.add_argument("--output-len", type=count, default=64)
    cluster.add_argument("--range-ratio", type=float, default=0.5, help="lengths vary by this share around their mean")
    cluster.add_argument("--heads", type=count, default=0, help="beginnings, one of which each prompt has")
    cluster.add_argument("--head-tokens", type=count, default=64)
    cluster.add_argument("--router", choices=("work", "turns"), default="work")
    cluster.add_argument("--lose-at", type=positive, metavar="S", help="a replica is lost then")
    cluster.add_argument("--ttft", type=positive, metavar="S", help="with --tpot: the fewest devices whose p90 holds")
    cluster.add_argument("--tpot", type=positive, metavar="S")
    cluster.add_argument("--real", action="store_true", help="beside each: as many real replicas, here")
    cluster.add_argument("--plot", type=Path, metavar="FILE", help="draw the table (PNG, SVG or PDF); needs matplotlib")
    add_engine_options(cluster)
    cluster.set_defaults(parser=cluster)


def check_step_costs(options: argparse.Namespace) -> None:
    """Raises ValueError."""
    check_writable(options.out)
    because = "here: steps of one replica and of all layers are measured, which `cluster` puts together"
    refuse_without_effect(options.parser, options, ("data_parallel_size", "pipeline_parallel_size"), because)


def check(options: argparse.Namespace) -> None:
    """Raises ValueError."""
    if options.plot is not None:
        from entrypoints.bench.profile_plot import check_plot

        check_plot(options.plot)
    if (options.ttft is None) != (options.tpot is None):
        raise ValueError("--ttft and --tpot go together")
    if options.real and options.ttft is not None:
        raise ValueError("--real runs what is named: leave --ttft and --tpot out")
    wanted = wanted_layouts(options)
    apart = any(each.prefill for each in wanted)
    _check_effects(options, apart)
    if all(each.stages == 1 for each in wanted):
        refuse_without_effect(options.parser, options, ("hop_ms",), "without layouts of stages, as 1x2")
    _check_loss(options, wanted)
    _check_link(options, apart)
    if options.cell is not None and options.real:
        raise ValueError("--cell stands for many replicas, and --real runs each: leave one out")
    if options.cell is not None and apart:
        raise ValueError("--cell stands for replicas that are alike: leave layouts as 1P+1D out")
    if (options.cell or 0) > MOST_REPLICAS:
        raise ValueError(f"--cell is at most {MOST_REPLICAS}, got {options.cell}")
    most = _most(options)
    if (largest := max(each.servers for each in wanted)) > most:
        hint = "" if options.cell else "; more with --cell"
        raise ValueError(f"there are at most {most} replicas, got {largest}{hint}")
    _check_traffic(options, wanted)


def _check_effects(options: argparse.Namespace, apart: bool) -> None:
    """Exits with a usage error."""
    refuse = functools.partial(refuse_without_effect, options.parser, options)
    refuse(
        ("data_parallel_size", "enable_eplb", "eplb_config"), "here: --replicas or --layouts says how many there are"
    )
    refuse(("kv_transfer_config",), "here: layouts as 1P+1D say who computes prompts")
    refuse(("kv_events_config",), "here: nothing of a simulation is published")
    if options.layouts is not None:
        refuse(("replicas", "pipeline_parallel_size"), "with --layouts, which says both, as 4x2")
    if options.ttft is not None:
        refuse(("replicas",), "with --ttft and --tpot, which ask how many")
    if apart:
        refuse(("router",), "on layouts as 1P+1D, whose servers have a router of their own")
    if not options.heads:
        refuse(("head_tokens",), "without --heads")


def _check_loss(options: argparse.Namespace, wanted: list[Layout]) -> None:
    if options.lose_at is None:
        return
    if options.lose_at >= options.seconds:
        raise ValueError(
            f"--lose-at ({options.lose_at:g}) is not within the --seconds ({options.seconds:g}) of traffic"
        )
    if options.cell is not None or options.real:
        raise ValueError("--lose-at is of each replica on the virtual clock: leave --cell and --real out")
    if options.ttft is None and (alone := [str(each) for each in wanted if each.servers == 1]):
        raise ValueError(f"--lose-at takes one of several servers away, and {alone[0]} is one")


def _check_link(options: argparse.Namespace, wanted: bool) -> None:
    missing = ["--" + name.replace("_", "-") for name in _LINK if getattr(options, name) is None]
    if wanted and missing:
        raise ValueError(f"layouts as 1P+1D need {' and '.join(missing)} (of tools/bench_disaggregation.py)")
    if not wanted:
        refuse_without_effect(options.parser, options, _LINK, "without layouts as 1P+1D")


def _check_traffic(options: argparse.Namespace, wanted: list[Layout]) -> None:
    share = max(min(options.cell or each.servers, each.servers) / each.servers for each in wanted)
    requests = max(options.rate * options.seconds * share, 1.0) * options.seeds
    tokens = requests * (options.input_len + options.output_len) + options.heads * options.head_tokens
    if requests > MOST_REQUESTS or tokens > MOST_TOKENS:
        raise ValueError(
            f"--rate, --seconds and --seeds make {requests:.3g} requests of {tokens:.3g} tokens; at most "
            f"{MOST_REQUESTS:,} of {MOST_TOKENS:,} are simulated"
        )


def _most(options: argparse.Namespace) -> int:
    return MOST_REPLICAS if options.cell is None else MOST_IN_CELLS


def wanted_layouts(options: argparse.Namespace) -> list[Layout]:
    import msgspec

    from entrypoints.bench.cluster.layouts import Layout

    stages, ranks = options.pipeline_parallel_size or 1, options.tensor_parallel_size or 1
    sizes = [1] if options.ttft is not None else options.replicas or [1, 2, 4]
    layouts = options.layouts or [Layout(replicas, stages) for replicas in sizes]
    return [msgspec.structs.replace(each, ranks=ranks) for each in layouts]


def step_costs(options: argparse.Namespace) -> list[dict[str, object]]:
    """Raises what starting an engine raises, and ConfigError for a poor fit."""
    import msgspec

    from engine.errors import ConfigError
    from engine.resolve import resolve_here
    from entrypoints.bench.cluster.measure import measure

    _, config = resolve_here(engine_args(options, options.model))
    device = config.device
    where = f"{device.threads} threads of a {platform.machine()} CPU" if device.kind == "cpu" else "a GPU"
    source = f"{where}, measured"
    found = measure(config, rounds=options.rounds, seed=options.seed, source=source, beside=options.beside)
    if found.error > options.most_error:
        raise ConfigError(
            f"the step costs are off by {100 * found.error:.1f} % in the mean of steps that were not fitted to, and "
            f"--most-error is {100 * options.most_error:g} %: measure while nothing else runs, or with more --rounds"
        )
    try:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"--out: {error}") from error
    if options.beside:
        print(f"beside another engine steps take {found.beside:.2f} times as long")
    print(f"{found.steps} steps; off by {100 * found.error:.1f} % in the mean, of steps that were not fitted to")
    return [msgspec.to_builtins(found)]


def cluster(options: argparse.Namespace) -> list[dict[str, object]]:
    """Raises ConfigError."""
    import msgspec

    from engine.errors import ConfigError
    from entrypoints.bench.cluster.costs import read_costs
    from entrypoints.bench.cluster.runs import Runs

    try:
        costs = read_costs(options.costs.read_bytes(), str(options.costs))
    except OSError as error:
        raise ConfigError(f"--costs: {error}") from error
    layouts = wanted_layouts(options)
    runs = Runs(options, engine_args(options, options.model), costs, _traffic(options), layouts)
    measured = ", ".join(f"{name} {value}" for name, value in msgspec.to_builtins(costs.of).items())
    print(f"step costs: {measured}; {costs.source}; off by {100 * costs.error:.1f} %")
    if options.ttft is not None:
        told = _fewest(options, runs, layouts)
    else:
        told = [("simulated", each, runs.simulated(each)) for each in layouts]
    if options.real:
        real = [(each, runs.real(each)) for each in layouts]
        told += [("real", *each) for each in real]
        told += [("at its pace", each, runs.simulated(each, pace=seen.pace)) for each, seen in real if seen.pace]
    print(_table(told))
    if options.plot is not None:
        from entrypoints.bench.cluster.plot import draw

        draw(told, {"ttft_p90": options.ttft, "tpot_p90": options.tpot}, options.plot)
    if options.real and len(layouts) > 1:
        print(_ranked(told))
    return [{"kind": kind, "layout": str(layout), **msgspec.to_builtins(outcome)} for kind, layout, outcome in told]


def _fewest(options: argparse.Namespace, runs: Runs, layouts: list[Layout]) -> list[Told]:
    """What was simulated of each layout, up to the fewest that hold. Raises ConfigError where none does."""
    from engine.errors import ConfigError
    from entrypoints.bench.cluster.search import fewest

    def holds(seen: Outcome) -> bool:
        return bool(seen.ttft_p90 <= options.ttft and seen.tpot_p90 <= options.tpot)

    told: list[Told] = []
    best: list[Layout] = []
    failed = None
    for layout in layouts:
        try:
            found = fewest(functools.partial(runs.simulated, layout), holds, _most(options) // layout.servers)
        except ConfigError as error:
            failed = error
            print(f"{layout}: {error}")
            continue
        told += [("simulated", layout.times(count), outcome) for count, outcome in found]
        best.append(layout.times(found[-1][0]))
    if not best:
        raise failed or ConfigError("no layout is named")
    least = min(best, key=lambda each: each.devices)
    of_each = ", ".join(f"{each} ({each.devices})" for each in best)
    print(f"fewest devices: {least.devices}, as {least}; of each: {of_each}")
    return told


def _traffic(options: argparse.Namespace) -> Traffic:
    from entrypoints.bench.cluster.traffic import Traffic

    return Traffic(
        rate=options.rate,
        input_len=options.input_len,
        output_len=options.output_len,
        range_ratio=options.range_ratio,
        heads=options.heads,
        head_tokens=options.head_tokens,
    )


def _table(told: list[Told]) -> str:
    """A line each, with deviations behind ±."""
    rows = [["", "layout", *_COLUMNS]]
    for kind, layout, outcome in told:
        row = [kind, str(layout)]
        for name in _COLUMNS:
            value, spread = getattr(outcome, name), outcome.spread.get(name, 0.0)
            row.append("" if value is None else f"{value:.3g}" + (f" ±{spread:.1g}" if spread else ""))
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def _ranked(told: list[Told]) -> str:
    from entrypoints.bench.cluster.outcome import ranked_alike

    simulated, real = ([outcome for kind, _, outcome in told if kind == wanted] for wanted in ("simulated", "real"))
    found = (f"by {name} {ranked_alike(simulated, real, name)}" for name in ("ttft_p90", "tpot_p90"))
    return "pairs ranked alike: " + "; ".join(found)
