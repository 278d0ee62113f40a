"""Command-line options shared by the doors, and how they become `EngineArgs`. Nothing heavy: --help is instant.

An option that is None was not set: then the setting's own default holds.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import EngineArgs


def size_bytes(text: str) -> int:
    """'4GiB', '512M', '1000000' → bytes."""
    from engine.sizes import parse_size  # not at the top: --help is instant

    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def json_object(text: str) -> dict[str, object]:
    """'{"top_p": 0.9}' → {"top_p": 0.9}."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f'cannot read {text[:100]!r} as a JSON object; write for example {{"top_p": 0.9}}'
        )
    return value


def core_list(text: str) -> tuple[int, ...]:
    """'0,2-4' → (0, 2, 3, 4)."""
    try:
        ranges = [part.split("-") for part in text.split(",")]
        return tuple(core for first, *last in ranges for core in range(int(first), int((last or [first])[-1]) + 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"cannot read {text!r} as a list of CPUs; write 0,1 or 0-3") from None


def refuse_without_effect(
    parser: argparse.ArgumentParser, options: argparse.Namespace, names: Iterable[str], because: str
) -> None:
    """Exits with a usage error when one of the options `names` was set although it would do nothing."""
    for action in parser._actions:
        if action.dest in names and getattr(options, action.dest) != action.default:
            parser.error(f"{'/'.join(action.option_strings)} has no effect {because}")


def default_cache_dir() -> str:
    """PAGELOOM_CACHE, or `pageloom` in the user's cache directory (XDG_CACHE_HOME)."""
    own = os.environ.get("PAGELOOM_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return own or str(Path(base) / "pageloom")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Names follow vLLM's where it has the option."""
    group = parser.add_argument_group("engine")
    group.add_argument("--tokenizer", help="directory or GGUF file of the tokenizer, where it is not the model's own")
    group.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    group.add_argument(
        "--quantization",
        default="auto",
        choices=["auto", "none", "int8", "int4"],
        help="of weights (CPU); auto: a GGUF file runs from its blocks; none decodes it",
    )
    group.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    group.add_argument("--max-model-len", type=int, help="longest sequence, prompt and answer, in tokens")
    group.add_argument("--max-num-seqs", type=int, help="sequences that run at once")
    group.add_argument("--max-num-batched-tokens", type=int, help="tokens computed in one step")
    group.add_argument(
        "--max-mixed-prefill-tokens", type=int, help="tokens of prompts in a step that makes others' next tokens, too"
    )
    group.add_argument("--max-waiting", type=int, help="sequences that may wait; more are answered with 503")
    _add_memory_options(group)
    group.add_argument("--scheduling-policy", default="fcfs", choices=["fcfs", "priority"])
    group.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="plan a step while the one before computes; default: on a GPU",
    )
    group.add_argument("--compile", default="pieces", choices=["none", "pieces"])
    group.add_argument(
        "--graphs",
        choices=["auto", "none", "piecewise", "full_decode", "both"],
        help="CUDA graphs; default: all that --compile and the attention backend allow",
    )
    group.add_argument("--attention-backend", metavar="NAME")
    group.add_argument("--threads", type=int, help="compute threads on a CPU")
    group.add_argument(
        "--cores", type=core_list, metavar="LIST", help="CPUs that the compute threads are bound to, as 0,1 or 0-3"
    )
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--max-logprobs", type=int, help="alternatives that a request may ask for, of each token")
    group.add_argument(
        "--override-generation-config",
        type=json_object,
        default={},
        metavar="JSON",
        help="""sampling where a request says nothing, before what the model's files say, as '{"temperature": 0.7}'""",
    )
    group.add_argument(
        "--limit",
        dest="limits",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another bound on requests, as body_bytes=64MiB; may be repeated; docs/limits.md lists them",
    )
    group.add_argument("--cache-dir", help="compiled code; default: PAGELOOM_CACHE or ~/.cache/pageloom")
    group.add_argument(
        "--debug-sync", action="store_true", help="fail a decode step in which the host waits for the GPU"
    )
    group.add_argument("--load-format", default="auto", choices=["auto", "dummy"], help="dummy: random weights")


def _add_memory_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--block-size", type=int, help="tokens per KV block")
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=["auto", "bf16", "int8", "fp8"],
        help="half the memory: int8 on a CPU, fp8 on a GPU",
    )
    group.add_argument("--kv-cache-memory", type=size_bytes, metavar="SIZE", help="memory of the KV cache, as 4GiB")
    group.add_argument("--memory-fraction", type=float, default=0.9, help="share of the device's memory to use")
    group.add_argument("--no-prefix-caching", dest="enable_prefix_caching", action="store_false")
    group.add_argument(
        "--swap-space",
        type=size_bytes,
        default=0,
        metavar="SIZE",
        help="host memory for KV blocks of preempted sequences and of prefixes that the device evicts, as 4GiB",
    )
    group.add_argument(
        "--preemption",
        default="auto",
        choices=["auto", "recompute", "swap"],
        help="how a preempted sequence comes back; auto: what costs less here",
    )


def engine_args(options: argparse.Namespace, model: str | None) -> EngineArgs:
    """EngineArgs from parsed options; without a model, the demo model and what its authors recommend."""
    import msgspec

    from engine.config import EngineArgs
    from engine.frontend.demo import RECOMMENDED_GENERATION, demo_model_path
    from engine.limits import parse_limits

    names = {field.name for field in msgspec.structs.fields(EngineArgs)}
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    given["limits"] = parse_limits(options.limits)
    given["cache_dir"] = given.get("cache_dir") or default_cache_dir()
    if model is None:
        given["override_generation_config"] = RECOMMENDED_GENERATION | options.override_generation_config
    given["model"] = model if model is not None else demo_model_path()
    return msgspec.convert(given, EngineArgs)
