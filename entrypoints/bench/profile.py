"""`engine-bench profile`: where a step's time goes, beside the floor that bytes and operations give."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from entrypoints.options import (
    FlexibleArgumentParser,
    add_engine_options,
    add_model,
    check_writable,
    count,
    counts,
    engine_args,
    json_object,
    refuse_without_effect,
)

if TYPE_CHECKING:
    from entrypoints.bench.profile_cases import Case
    from entrypoints.bench.profile_engine import ProfiledEngine

_DEFAULT_BATCHES, _DEFAULT_CONTEXTS, _DEFAULT_PROMPTS = [1, 16, 64], [128], [512, 2048]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def add_command(commands: argparse._SubParsersAction[FlexibleArgumentParser]) -> None:
    profile = commands.add_parser("profile", help="where a step's time goes, beside the machine's floor")
    add_model(profile)
    profile.add_argument("--batch", type=counts, metavar="1,16", help="decode with so many sequences")
    profile.add_argument("--context", type=counts, metavar="128,1024", help="decode at these lengths (default 128)")
    profile.add_argument("--prompt", type=counts, metavar="512,2048", help="prefill of one prompt of so many tokens")
    profile.add_argument("--workload", type=_names, metavar="W1,W2", help="named workloads, as totals")
    profile.add_argument("--steps", type=count, default=32, help="decode steps that are timed, of each kind")
    profile.add_argument("--reps", type=count, default=5, help="prompts that are timed, of each kind")
    profile.add_argument("--workload-reps", type=count, default=1, help="runs of a workload, of each kind")
    profile.add_argument(
        "--sampling", type=json_object, default={}, metavar="JSON", help="sampling parameters, as '{\"top_k\": 50}'"
    )
    profile.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    profile.add_argument("--plot", type=Path, metavar="FILE", help="draw them (PNG, SVG or PDF); needs matplotlib")
    add_engine_options(profile)
    profile.set_defaults(parser=profile)


def check(options: argparse.Namespace) -> None:
    """Refuse what would have no effect, and files that could not be written, before anything is loaded.

    Raises ValueError.
    """
    batches, prompts = _decodes_and_prefills(options)
    unused = [("context", batches, "without --batch"), ("steps", batches, "without --batch")]
    unused += [("reps", prompts, "without --prompt"), ("workload_reps", options.workload, "without --workload")]
    for name, needed, because in unused:
        if not needed:
            refuse_without_effect(options.parser, options, {name}, because)
    if options.json is not None:
        check_writable(options.json)
    if options.plot is not None:
        from entrypoints.bench.profile_plot import check_plot

        check_plot(options.plot)


def profile(options: argparse.Namespace) -> list[dict[str, object]]:
    """Every case in turn; prints a table of each at the end.

    Raises ValueError for a case that does not fit the engine's settings.
    """
    import msgspec

    from entrypoints.bench.profile_cases import figures, record, run_case, sampling_params
    from entrypoints.bench.profile_device import best_of
    from entrypoints.bench.profile_engine import ProfiledEngine
    from entrypoints.bench.profile_table import case_table, ceilings_table
    from entrypoints.bench.workloads import BenchRequest

    sampling_params(options.sampling, 1)  # a mistake shows before anything is loaded
    with ProfiledEngine(engine_args(options, options.model)) as engine:
        cases = _cases(engine, options)
        vocab = engine.llm.model_config.vocab_size
        warm_up = [BenchRequest([i % vocab for i in range(16)], 8, 0.0) for _ in range(2)]
        record(engine, warm_up, options.sampling)  # its pieces are looked at, and no figure is made of it
        # Between all cases, and the best of them counts: others may be at work on this machine for a while.
        ceilings = engine.measure_ceilings()
        recorded = []
        for case in cases:
            print(f"{case.name} …", file=sys.stderr, flush=True)
            recorded.append(run_case(engine, case, options.sampling))
            ceilings = best_of(ceilings, engine.measure_ceilings())
        found = [figures(one, engine, ceilings) for one in recorded]
    print(ceilings_table(ceilings))
    for one in found:
        print(f"\n{case_table(one)}", flush=True)
    results = [{**msgspec.to_builtins(one), "ceilings": msgspec.to_builtins(ceilings)} for one in found]
    if options.json is not None:
        options.json.write_text(json.dumps({"command": "profile", "results": results}, indent=1) + "\n")
    if options.plot is not None:
        from entrypoints.bench.profile_plot import draw

        draw(found, ceilings, options.plot)
    return results


def _decodes_and_prefills(options: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Batches and prompts; both by default where no case at all is named."""
    chosen = options.batch or options.prompt or options.workload
    return (
        options.batch or ([] if chosen else _DEFAULT_BATCHES),
        options.prompt or ([] if chosen else _DEFAULT_PROMPTS),
    )


def _cases(engine: ProfiledEngine, options: argparse.Namespace) -> list[Case]:
    from entrypoints.bench.profile_cases import decode_case, prefill_case, workload_case

    batches, prompts = _decodes_and_prefills(options)
    cases = [
        decode_case(engine, batch, context, options.steps)
        for batch in batches
        for context in options.context or _DEFAULT_CONTEXTS
    ]
    cases += [prefill_case(engine, length, options.reps) for length in prompts]
    cases += [workload_case(engine, name, options.workload_reps) for name in options.workload or []]
    return cases
