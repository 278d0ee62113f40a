"""`engine-bench step-costs` measures what steps take here; `engine-bench cluster` asks what so many replicas would
do."""

from __future__ import annotations

import argparse
import functools
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrypoints.options import add_engine_options, add_model, engine_args

if TYPE_CHECKING:
    from entrypoints.bench.cluster.layouts import Layout
    from entrypoints.bench.cluster.outcome import Outcome
    from entrypoints.bench.cluster.runs import Runs
    from entrypoints.bench.cluster.traffic import Traffic

MOST_REPLICAS = 64
"""that are simulated beside each other"""
MOST_IN_CELLS = 4096
_COLUMNS = ("tokens_per_s", "ttft_p50", "ttft_p90", "tpot_p50", "tpot_p90", "hits", "load_max_over_mean")
_LINK = ("transfer_ms", "transfer_mb_per_s")

Told = tuple[str, "Layout", "Outcome"]
"""simulated or real"""


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _counts(text: str) -> list[int]:
    return [_count(each) for each in text.split(",")]


def _positive(text: str) -> float:
    if not 0.0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


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
    costs.add_argument("--rounds", type=_count, default=1, help="of all sizes of steps")
    costs.add_argument(
        "--most-error",
        type=float,
        default=0.15,
        metavar="SHARE",
        help="a table that is off by more in the mean is not written: the exit status is 1 (default: 0.15)",
    )
    add_engine_options(costs)
    costs.set_defaults(parser=costs)

    cluster = commands.add_parser("cluster", help="the scheduler and the router on a virtual clock: many replicas")
    add_model(cluster)
    cluster.add_argument("--costs", type=Path, required=True, metavar="FILE", help="of `engine-bench step-costs`")
    cluster.add_argument("--replicas", type=_counts, default=[1, 2, 4], metavar="N,N", help="each in turn")
    cluster.add_argument(
        "--layouts",
        type=_layouts,
        metavar="NxS,NP+ND,…",
        help="in place of --replicas: so many replicas of so many stages, which have a machine each; or so many "
        "servers that compute prompts for so many that decode. With --ttft: so many times each as hold",
    )
    cluster.add_argument("--transfer-ms", type=_positive, metavar="MS", help="that any prompt's pages take to move")
    cluster.add_argument(
        "--transfer-mb-per-s",
        type=_positive,
        metavar="MB",
        help="and how many MB a second move then; tools/bench_disaggregation.py measures both",
    )
    cluster.add_argument(
        "--cell",
        type=_count,
        metavar="N",
        help="so many replicas stand for all, with their share of the traffic: what thousands would do, in minutes",
    )
    cluster.add_argument("--rate", type=float, required=True, help="requests a second, Poisson")
    cluster.add_argument("--seconds", type=float, default=60.0, help="of traffic")
    cluster.add_argument("--seeds", type=_count, default=3, help="runs, whose means and deviations are told")
    cluster.add_argument("--input-len", type=_count, default=128, help="prompt tokens per request, heads included")
    cluster.add_argument("--output-len", type=_count, default=64)
    cluster.add_argument("--range-ratio", type=float, default=0.5, help="lengths vary by this share around their mean")
    cluster.add_argument("--heads", type=int, default=0, help="beginnings, one of which each prompt has")
    cluster.add_argument("--head-tokens", type=_count, default=64)
    cluster.add_argument("--router", choices=("work", "turns"), default="work")
    cluster.add_argument("--lose-at", type=float, metavar="S", help="a replica is lost then")
    cluster.add_argument("--ttft", type=float, metavar="S", help="with --tpot: the fewest devices whose p90 holds")
    cluster.add_argument("--tpot", type=float, metavar="S")
    cluster.add_argument("--real", action="store_true", help="beside each: as many real replicas, here")
    cluster.add_argument("--plot", type=Path, metavar="FILE", help="draw the table (PNG, SVG or PDF); needs matplotlib")
    add_engine_options(cluster)
    cluster.set_defaults(parser=cluster)


def check(options: argparse.Namespace) -> None:
    """Raises ValueError."""
    if options.plot is not None:
        from entrypoints.bench.profile_plot import check_plot

        check_plot(options.plot)
    if (options.ttft is None) != (options.tpot is None):
        raise ValueError("--ttft and --tpot go together")
    if options.lose_at is not None and options.lose_at < 0:
        raise ValueError(f"--lose-at must not be negative, got {options.lose_at:g}")
    wanted = wanted_layouts(options)
    if options.lose_at is not None and options.ttft is None and all(each.servers == 1 for each in wanted):
        raise ValueError("--lose-at takes one of several servers away, and there is one")
    if options.real and options.ttft is not None:
        raise ValueError("--real runs what is named: leave --ttft and --tpot out")
    if options.cell is not None and (options.real or options.lose_at is not None):
        raise ValueError("--cell stands for many replicas: --real and --lose-at are of each")
    if options.cell is not None and any(each.prefill for each in wanted):
        raise ValueError("--cell stands for replicas that are alike: leave layouts as 1P+1D out")
    if (options.cell or 0) > MOST_REPLICAS:
        raise ValueError(f"--cell is at most {MOST_REPLICAS}, got {options.cell}")
    most = _most(options)
    if (largest := max(each.servers for each in wanted)) > most:
        hint = "" if options.cell else "; more with --cell"
        raise ValueError(f"there are at most {most} replicas, got {largest}{hint}")
    _check_link(options, any(each.prefill for each in wanted))


def _check_link(options: argparse.Namespace, wanted: bool) -> None:
    for name in _LINK:
        option = "--" + name.replace("_", "-")
        if wanted and getattr(options, name) is None:
            raise ValueError(f"layouts as 1P+1D need {option} (tools/bench_disaggregation.py measures it)")
        if not wanted and getattr(options, name) is not None:
            raise ValueError(f"{option} is of layouts as 1P+1D, and there is none")


def _most(options: argparse.Namespace) -> int:
    return MOST_REPLICAS if options.cell is None else MOST_IN_CELLS


def wanted_layouts(options: argparse.Namespace) -> list[Layout]:
    from entrypoints.bench.cluster.layouts import Layout

    if options.layouts is not None:
        return list(options.layouts)
    stages = options.pipeline_parallel_size or 1
    return [Layout(replicas, stages) for replicas in ([1] if options.ttft is not None else options.replicas)]


def step_costs(options: argparse.Namespace) -> list[dict[str, object]]:
    """Raises what starting an engine raises, and ConfigError for a poor fit."""
    import msgspec

    from engine.errors import ConfigError
    from engine.resolve import resolve_here
    from entrypoints.bench.cluster.measure import measure

    _, config = resolve_here(engine_args(options, options.model))
    device = config.device
    where = f"{device.threads} threads of a {platform.machine()} CPU" if device.kind == "cpu" else "a GPU"
    source = f"{config.model.served_name}, {config.model.dtype}, {config.model.quantization}; {where}, measured"
    found = measure(config, rounds=options.rounds, seed=options.seed, source=source)
    if found.error > options.most_error:
        raise ConfigError(
            f"the step costs are off by {100 * found.error:.1f} % in the mean of steps that were not fitted to, and "
            f"--most-error is {100 * options.most_error:g} %: measure while nothing else runs, or with more --rounds"
        )
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
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
    print(f"step costs: {costs.source}; off by {100 * costs.error:.1f} %")
    if options.ttft is not None:
        told = _fewest(options, runs, layouts)
    else:
        told = [("simulated", each, runs.simulated(each)) for each in layouts]
    if options.real:
        told += [("real", each, runs.real(each)) for each in layouts]
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
            spread = outcome.spread.get(name, 0.0)
            row.append(f"{getattr(outcome, name):.3g}" + (f" ±{spread:.1g}" if spread else ""))
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def _ranked(told: list[Told]) -> str:
    from entrypoints.bench.cluster.outcome import ranked_alike

    simulated, real = ([outcome for kind, _, outcome in told if kind == wanted] for wanted in ("simulated", "real"))
    found = [(ranked_alike(simulated, real, name), name) for name in ("ttft_p90", "tpot_p90")]
    return "pairs ranked alike: " + ", ".join(f"{alike} of {pairs} by {name}" for (alike, pairs), name in found)
