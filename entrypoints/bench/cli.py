"""`engine-bench`: latency, throughput and serving benchmarks, profiles, the paper's
evaluation, clusters on a virtual clock. The last line of the output is one JSON object."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from entrypoints.bench import profile
from entrypoints.bench.cluster import command as cluster
from entrypoints.bench.paper import command as paper
from entrypoints.options import (
    FlexibleArgumentParser,
    add_engine_options,
    add_model,
    count,
    engine_args,
    json_object,
    positive,
    refuse_without_effect,
)
from entrypoints.start import INTERRUPTED, interrupts_raise

if TYPE_CHECKING:
    from engine.request import StructuredOutputsParams

_RANDOM_ONLY = {
    "throughput": {"input_len", "output_len", "num_prompts", "range_ratio"},
    "serve": {"input_len", "output_len", "num_prompts", "range_ratio", "request_rate", "vocab_size", "seed"},
}
"""a named workload fixes these"""


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def _rate(text: str) -> float:
    return float("inf") if text.lower() == "inf" else positive(text)


def _base_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with http:// or https://")
    return text.rstrip("/").removesuffix("/v1")


def _structured(text: str) -> StructuredOutputsParams:
    import msgspec

    from engine.errors import InvalidRequestError
    from engine.request import StructuredOutputsParams

    try:
        return msgspec.json.decode(text, type=StructuredOutputsParams)
    except (msgspec.MsgspecError, InvalidRequestError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _shape_options(parser: argparse.ArgumentParser, *, input_len: int, output_len: int) -> None:
    parser.add_argument("--input-len", type=count, default=input_len, help="prompt tokens per request")
    parser.add_argument("--output-len", type=count, default=output_len, help="generated tokens per request")
    parser.add_argument("--no-progress", dest="progress", action="store_false")


def _many_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", type=_names, metavar="W1,W2", help="named workloads instead of a random one")
    parser.add_argument("--num-prompts", type=count, default=64)
    parser.add_argument("--range-ratio", type=_share, default=0.0, help="lengths vary by this share around their mean")
    parser.add_argument("--reps", type=count, default=1, help="repeats; the median is printed")


def build_parser() -> argparse.ArgumentParser:
    parser = FlexibleArgumentParser(prog="engine-bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    latency = commands.add_parser("latency", help="time of one batch, in process")
    add_model(latency)
    _shape_options(latency, input_len=32, output_len=128)
    latency.add_argument("--batch-size", type=count, default=8)
    latency.add_argument("--warmup", "--num-iters-warmup", type=int, default=2, help="repeats that are not counted")
    latency.add_argument("--reps", "--num-iters", type=count, default=5, help="repeats; the median is printed")
    add_engine_options(latency)
    latency.set_defaults(parser=latency)

    throughput = commands.add_parser("throughput", help="many requests at once, in process")
    add_model(throughput)
    _shape_options(throughput, input_len=128, output_len=128)
    _many_options(throughput)
    throughput.add_argument(
        "--structured-outputs",
        type=_structured,
        metavar="JSON",
        help='what outputs must be ({"json": {...}}): each repeat runs without and with it; their ratio is told',
    )
    add_engine_options(throughput)
    throughput.set_defaults(parser=throughput)

    profile.add_command(commands)
    paper.add_command(commands)
    cluster.add_commands(commands)

    serve = commands.add_parser("serve", help="HTTP load on any OpenAI-compatible server")
    serve.add_argument("--base-url", type=_base_url, default="http://127.0.0.1:8000")
    serve.add_argument("--model", help="default: the first that the server lists")
    serve.add_argument("--api-key")
    serve.add_argument("--request-rate", type=_rate, default=float("inf"), help="Poisson arrivals a second; or inf")
    serve.add_argument("--max-concurrency", type=count)
    serve.add_argument("--vocab-size", type=int, default=10000, help="random ids are drawn below this")
    serve.add_argument("--seed", type=int, default=0)
    serve.add_argument("--timeout", type=positive, default=900.0)
    serve.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="merged into every request")
    _shape_options(serve, input_len=128, output_len=64)
    _many_options(serve)
    serve.set_defaults(parser=serve)
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    checks = {
        "profile": profile.check,
        "paper": paper.check,
        "step-costs": cluster.check_step_costs,
        "cluster": cluster.check,
    }
    if options.command in checks:
        try:
            checks[options.command](options)
        except ValueError as error:
            options.parser.error(str(error))
    elif getattr(options, "workload", None):
        refuse_without_effect(options.parser, options, _RANDOM_ONLY[options.command], "with --workload")
    from engine.errors import EngineError

    try:
        results = _run(options)
    except (EngineError, ValueError) as error:
        print(f"engine-bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("engine-bench: interrupted", file=sys.stderr)
        return INTERRUPTED
    print(json.dumps({"command": options.command, "results": results}))
    return 0


def _run(options: argparse.Namespace) -> list[dict[str, object]]:
    if options.command == "serve":
        from entrypoints.bench import http_load

        return http_load.serve(options)
    if options.command == "profile":
        return profile.profile(options)
    if options.command == "paper":
        return paper.paper(options)
    if options.command in ("step-costs", "cluster"):
        return cluster.step_costs(options) if options.command == "step-costs" else cluster.cluster(options)
    if options.command == "throughput" and options.workload:
        from entrypoints.bench.workloads import workload

        for name in options.workload:
            if any(r.arrival_s for r in workload(name)):
                raise ValueError(f"{name} has arrival times, and offline all requests arrive at once: use `serve`")
    from engine import LLM
    from entrypoints.bench import offline

    with LLM.from_args(engine_args(options, options.model)) as llm:
        interrupts_raise()
        llm.wait_compiled()  # what is measured is the steady state
        return offline.latency(llm, options) if options.command == "latency" else offline.throughput(llm, options)


if __name__ == "__main__":
    from entrypoints.start import bench

    raise SystemExit(bench())
