"""`engine-bench step-costs` measures what steps take here; `engine-bench cluster` asks what so many replicas would
do."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entrypoints.options import add_engine_options, add_model, engine_args

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.models.description import ModelDescription
    from entrypoints.bench.cluster.costs import StepCosts
    from entrypoints.bench.cluster.outcome import Outcome

MOST_REPLICAS = 64
"""that are simulated beside each other"""
MOST_IN_CELLS = 4096
_COLUMNS = (
    "replicas",
    "stages",
    "tokens_per_s",
    "ttft_p50",
    "ttft_p90",
    "tpot_p50",
    "tpot_p90",
    "hits",
    "load_max_over_mean",
)


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _counts(text: str) -> list[int]:
    return [_count(each) for each in text.split(",")]


def _layouts(text: str) -> list[tuple[int, int]]:
    """ "4x1,2x2": (replicas, stages of each)."""
    found = []
    for each in text.split(","):
        replicas, _, stages = each.partition("x")
        found.append((_count(replicas), _count(stages or "1")))
    return found


def add_commands(commands: Any) -> None:
    costs = commands.add_parser("step-costs", help="what a step takes here, by its plan: a table for `cluster`")
    add_model(costs)
    costs.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the table goes (JSON)")
    costs.add_argument("--rounds", type=_count, default=2, help="of all sizes of steps")
    add_engine_options(costs)
    costs.set_defaults(parser=costs)

    cluster = commands.add_parser("cluster", help="the scheduler and the router on a virtual clock: many replicas")
    add_model(cluster)
    cluster.add_argument("--costs", type=Path, required=True, metavar="FILE", help="of `engine-bench step-costs`")
    cluster.add_argument("--replicas", type=_counts, default=[1, 2, 4], metavar="N,N", help="each in turn")
    cluster.add_argument(
        "--layouts",
        type=_layouts,
        metavar="NxS,…",
        help="in place of --replicas: so many replicas of so many stages, which have a machine each",
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
    cluster.add_argument("--ttft", type=float, metavar="S", help="with --tpot: the fewest replicas whose p90 holds")
    cluster.add_argument("--tpot", type=float, metavar="S")
    cluster.add_argument("--real", action="store_true", help="beside each: as many real replicas, here")
    add_engine_options(cluster)
    cluster.set_defaults(parser=cluster)


def check(options: argparse.Namespace) -> None:
    """Raises ValueError."""
    if (options.ttft is None) != (options.tpot is None):
        raise ValueError("--ttft and --tpot go together")
    if options.lose_at is not None and options.lose_at < 0:
        raise ValueError(f"--lose-at must not be negative, got {options.lose_at:g}")
    if options.lose_at is not None and options.ttft is None and set(wanted_replicas(options)) == {1}:
        raise ValueError("--lose-at takes one of several replicas away, and there is one")
    if options.real and options.ttft is not None:
        raise ValueError("--real runs what --replicas names: leave --ttft and --tpot out")
    if options.layouts is not None and options.ttft is not None:
        raise ValueError("--layouts are what is simulated, and --ttft asks for the fewest replicas: give one of them")
    if options.cell is not None and (options.real or options.lose_at is not None):
        raise ValueError("--cell stands for many replicas: --real and --lose-at are of each")
    if (options.cell or 0) > MOST_REPLICAS:
        raise ValueError(f"--cell is at most {MOST_REPLICAS}, got {options.cell}")
    most = MOST_REPLICAS if options.cell is None else MOST_IN_CELLS
    if max(wanted := wanted_replicas(options)) > most:
        hint = "" if options.cell else "; more with --cell"
        raise ValueError(f"there are at most {most} replicas, got {max(wanted)}{hint}")


def wanted_replicas(options: argparse.Namespace) -> list[int]:
    return options.replicas if options.layouts is None else [replicas for replicas, _ in options.layouts]


def step_costs(options: argparse.Namespace) -> list[dict[str, object]]:
    """Raises what starting an engine raises."""
    import msgspec

    from engine.resolve import resolve_here
    from entrypoints.bench.cluster.measure import measure

    _, config = resolve_here(engine_args(options, options.model))
    device = config.device
    where = f"{device.threads} threads of a {platform.machine()} CPU" if device.kind == "cpu" else "a GPU"
    source = f"{config.model.served_name}, {config.model.dtype}, {config.model.quantization}; {where}, measured"
    found = measure(config, rounds=options.rounds, seed=options.seed, source=source)
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    print(f"{found.steps} steps; off by {100 * found.error:.1f} % in the mean, of steps that were not fitted to")
    return [msgspec.to_builtins(found)]


def cluster(options: argparse.Namespace) -> list[dict[str, object]]:
    """Raises ConfigError."""
    import msgspec

    from engine.errors import ConfigError
    from engine.resolve import resolve_here
    from entrypoints.bench.cluster.costs import read_costs

    args = engine_args(options, options.model)
    try:
        costs = read_costs(options.costs.read_bytes(), str(options.costs))
    except OSError as error:
        raise ConfigError(f"--costs: {error}") from error
    layouts = options.layouts or [(replicas, args.pipeline_parallel_size) for replicas in options.replicas]
    resolved = {
        stages: resolve_here(msgspec.structs.replace(args, pipeline_parallel_size=stages)) for _, stages in layouts
    }
    runs = {stages: _runner(options, *found, costs) for stages, found in resolved.items()}
    print(f"step costs: {costs.source}; off by {100 * costs.error:.1f} %")
    if options.ttft is None:
        outcomes = [("simulated", runs[stages](replicas)) for replicas, stages in layouts]
    else:
        from entrypoints.bench.cluster.search import fewest

        def holds(seen: Outcome) -> bool:
            return bool(seen.ttft_p90 <= options.ttft and seen.tpot_p90 <= options.tpot)

        most = MOST_REPLICAS if options.cell is None else MOST_IN_CELLS
        outcomes = [("simulated", each) for each in fewest(runs[args.pipeline_parallel_size], holds, most)]
    if options.real:
        outcomes += [("real", _real(options, resolved[stages][1], replicas)) for replicas, stages in layouts]
    print(_table(outcomes))
    return [{"kind": kind, **msgspec.to_builtins(outcome)} for kind, outcome in outcomes]


def _runner(
    options: argparse.Namespace, model: ModelDescription, config: EngineConfig, costs: StepCosts
) -> Callable[[int], Outcome]:
    from engine.errors import ConfigError
    from entrypoints.bench.cluster.outcome import for_all, mean_of
    from entrypoints.bench.cluster.routers import ROUTERS
    from entrypoints.bench.cluster.simulate import Cluster
    from entrypoints.bench.cluster.stages import stages_of
    from entrypoints.bench.cluster.traffic import arrivals, check

    if costs.max_num_batched_tokens < config.scheduler.max_num_batched_tokens:
        raise ConfigError(
            f"max_num_batched_tokens ({config.scheduler.max_num_batched_tokens}) exceeds the "
            f"{costs.max_num_batched_tokens} that the step costs were measured for"
        )
    traffic, stages = _traffic(options), stages_of(model.spec, config.parallel.pipeline)
    check(traffic, config.model.max_model_len)

    def run(replicas: int) -> Outcome:
        cell, found = min(options.cell or replicas, replicas), []
        share = traffic.of_some(cell / replicas)
        for seed in range(options.seeds):
            made = Cluster(config, costs, cell, ROUTERS[options.router](config.cache.block_size), stages)
            given = arrivals(share, options.seconds, seed, config.model.vocab_size)
            outcome = made.run(given, options.lose_at if replicas > 1 else None)
            found.append(for_all(outcome, replicas, len(stages.shares)))
        return mean_of(found)

    return run


def _real(options: argparse.Namespace, config: EngineConfig, size: int) -> Outcome:
    import msgspec

    from entrypoints.bench.cluster.outcome import for_all, mean_of
    from entrypoints.bench.cluster.real import run_really
    from entrypoints.bench.cluster.routers import ROUTERS
    from entrypoints.bench.cluster.traffic import arrivals

    parallel = msgspec.structs.replace(config.parallel, data=size)
    of_all = msgspec.structs.replace(config, parallel=parallel)
    found = []
    for seed in range(options.seeds):
        given = arrivals(_traffic(options), options.seconds, seed, config.model.vocab_size)
        outcome = run_really(of_all, ROUTERS[options.router](config.cache.block_size), given)
        found.append(for_all(outcome, size, config.parallel.pipeline))
    return mean_of(found)


def _traffic(options: argparse.Namespace) -> Any:
    from entrypoints.bench.cluster.traffic import Traffic

    return Traffic(
        rate=options.rate,
        input_len=options.input_len,
        output_len=options.output_len,
        range_ratio=options.range_ratio,
        heads=options.heads,
        head_tokens=options.head_tokens,
    )


def _table(outcomes: list[tuple[str, Outcome]]) -> str:
    """A line each, with deviations behind ±."""
    rows = [["", *_COLUMNS]]
    for kind, outcome in outcomes:
        row = [kind]
        for name in _COLUMNS:
            spread = outcome.spread.get(name, 0.0)
            row.append(f"{getattr(outcome, name):.3g}" + (f" ±{spread:.1g}" if spread else ""))
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)
