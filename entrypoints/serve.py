"""`engine-serve`: the server of OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

from entrypoints.options import FlexibleArgumentParser, add_engine_options, add_model, engine_args
from entrypoints.router.run import add_role_options, check_role, serve_router
from entrypoints.server.logs import logging_to_stderr
from entrypoints.sources import add_config, parse_all, told
from entrypoints.start import interrupts_raise

MOST_LOGGED = 1 << 16
"""characters of a prompt that a line of the log may hold"""
MOST_SECONDS = 1e6


def build_parser() -> argparse.ArgumentParser:
    parser = FlexibleArgumentParser(prog="engine-serve", description="Serve a model with OpenAI's HTTP API.")
    add_model(parser)
    add_config(parser)
    _add_place(parser)
    add_served_names(parser)
    _add_keys(parser)
    parser.add_argument(
        "--allowed-origins",
        type=_origins,
        default=[],
        metavar="JSON",
        help="""web pages whose scripts may call this server, as '["https://a.example"]' or '["*"]'""",
    )
    _add_times(parser)
    parser.add_argument(
        "--pinned-prefixes",
        type=Path,
        metavar="FILE",
        help="prefixes to compute and keep from the start: JSON lines, each with name and prompt or messages",
    )
    parser.add_argument(
        "--strict-fields",
        action="store_true",
        help="refuse fields that the server does not know, instead of ignoring them, and requests without a model",
    )
    parser.add_argument(
        "--enable-sleep-mode",
        action="store_true",
        help="serve POST /sleep, /wake_up and /update_weights_from_disk, with --keys to keys of the scope admin: "
        "memory is free while nobody asks, and other weights of the model are loaded while requests wait "
        "(docs/sleep.md)",
    )
    parser.add_argument(
        "--profile-dir",
        type=Path,
        metavar="DIR",
        help="serve POST /start_profile, /stop_profile and /log_level, with --keys to keys of the scope admin: torch's "
        "traces of some steps, and tables of where their time goes, are written there (docs/performance.md)",
    )
    add_speech_options(parser)
    add_lora_modules(parser)
    parser.add_argument(
        "--check",
        action="store_true",
        help="serve nothing: print what the model needs, whether it fits, and which setting would make it fit; nothing "
        "large is fetched for it. The exit status is 0 where it fits, else 1",
    )
    parser.add_argument("--json", action="store_true", help="what --check prints as one JSON object")
    _add_log_options(parser)
    add_role_options(parser)
    add_engine_options(parser)
    return parser


def _add_place(parser: argparse.ArgumentParser) -> None:
    """Where it is found, and how many listen there."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_port, default=8000, help="0: any that is free")
    parser.add_argument("--uds", type=Path, metavar="PATH", help="listen at this Unix socket, not at a host and port")
    parser.add_argument(
        "--api-server-count",
        "-asc",
        type=_processes,
        default=1,
        metavar="N",
        help="processes that take requests, on the same port and for the same cores, where one is not enough for the "
        "tokens that these make (docs/front-ends.md)",
    )
    parser.add_argument(
        "--root-path", default="", metavar="PATH", help="under which a proxy in front of this server offers it"
    )
    parser.add_argument("--ssl-certfile", type=Path, metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    parser.add_argument("--ssl-keyfile", type=Path, metavar="FILE", help="its key, if it is not in the same file")


def _add_keys(parser: argparse.ArgumentParser) -> None:
    key = parser.add_mutually_exclusive_group()
    key.add_argument(
        "--api-key",
        help="required of clients as `Authorization: Bearer KEY` or `x-api-key: KEY`; whoever lists processes reads "
        "it, other than in --api-key-file or PAGELOOM_API_KEY",
    )
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the API key")
    key.add_argument(
        "--keys",
        type=Path,
        metavar="FILE",
        help="many clients' keys, as hashes, each with scopes, a share, and limits of requests and tokens (TOML; "
        "docs/keys.md); read again when it changes",
    )
    parser.add_argument(
        "--usage-log",
        type=Path,
        metavar="FILE",
        help="with --keys: a line of JSON for each request, of its key and its tokens; the file only grows, and may be "
        "moved away",
    )


def _add_log_options(parser: argparse.ArgumentParser) -> None:
    """What is told of requests, and where."""
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", default="text", choices=["text", "json"], help="json: one object a line")
    parser.add_argument(
        "--log-requests",
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="a line for each request that has ended: what was asked for, counts, times; no texts",
    )
    parser.add_argument(
        "--log-prompts",
        action="store_true",
        help="prompts and answers, too, in the lines of --log-requests and in the spans of --otlp-endpoint",
    )
    parser.add_argument(
        "--max-log-len",
        type=_characters,
        default=2000,
        metavar="N",
        help="characters of a prompt, and of its answers together, that are shown (default: 2000)",
    )
    parser.add_argument(
        "--otlp-endpoint",
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span for each request to this OpenTelemetry collector, by OTLP over HTTP, as "
        "http://localhost:4318; needs the packages of pip install 'pageloom[otlp]'",
    )


def add_served_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        action=_Names,
        metavar="NAME",
        help="the model's name in the API, and others that requests may use; default: its directory or file name",
    )
    parser.set_defaults(model_aliases=())


def add_lora_modules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lora-modules",
        nargs="+",
        type=_lora_module,
        default=(),
        metavar="NAME=PATH",
        help="adapters as PEFT saves them, under the names that requests give (--enable-lora); also as JSON: "
        """'{"name": "NAME", "path": "PATH", "base_model_name": "NAME"}'""",
    )


def add_speech_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tool-call-parser",
        default="auto",
        metavar="NAME",
        help="how the model writes calls of tools (hermes, qwen3_coder, llama3_json, mistral, ...; none), or a .json "
        "file with a response template as transformers has them; default: as its chat template shows",
    )
    parser.add_argument(
        "--reasoning-parser",
        default="auto",
        metavar="NAME",
        help="how the model marks its thinking (think, mistral, ...; none); default: as its chat template shows",
    )
    parser.add_argument(
        "--reasoning-field",
        default="reasoning",
        choices=["reasoning", "reasoning_content", "both"],
        help="under which name thinking is given out (default: reasoning); both are taken",
    )
    parser.add_argument(
        "--response-store",
        type=Path,
        metavar="FILE",
        help="keep what /v1/responses stores in this SQLite file, beyond the server's end; default: in memory",
    )
    parser.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="has no effect: tools may always be called"
    )


class _Names(argparse.Action):
    """The first of several names is the model's."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.served_model_name, *aliases = values
        namespace.model_aliases = tuple(aliases)


def _refuse_swallowed_model(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """An option of several names takes a model that stands behind it for one of them."""
    if options.model is None and options.model_aliases and Path(options.model_aliases[-1]).exists():
        parser.error(f"--served-model-name takes {options.model_aliases[-1]} for a name: put the model before it")


def _lora_module(text: str) -> object:
    import msgspec

    from entrypoints.server.adapters import LoRAModule

    name, equals, path = text.partition("=")
    try:
        if text.startswith("{"):
            return msgspec.json.decode(text, type=LoRAModule)
    except msgspec.ValidationError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    except msgspec.DecodeError:
        equals = ""
    if not (name and equals and path):
        raise argparse.ArgumentTypeError(f"{text!r} is neither NAME=PATH nor a JSON object with name and path")
    return LoRAModule(name, path)


def _processes(text: str) -> int:
    from engine.limits import MAX_FRONT_ENDS

    if not text.isdecimal() or not 1 <= int(text) <= MAX_FRONT_ENDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes: 1 to {MAX_FRONT_ENDS}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


def _add_times(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long SIGTERM and Ctrl-C let running requests go on before they are ended; a second signal ends them "
        "at once (default: 30)",
    )
    parser.add_argument(
        "--drain-delay",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="how long, before that, new requests are taken while /ready says 503: until whoever balances load has "
        "seen it (default: 0)",
    )
    parser.add_argument(
        "--default-timeout",
        type=_some_seconds,
        metavar="SECONDS",
        help="in which a request must end that has no header x-request-timeout: what cannot be served so soon is "
        "refused at once, and what is late ends (default: requests have time)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds: 0 to {MOST_SECONDS:,.0f}")
    return seconds


def _some_seconds(text: str) -> float:
    seconds = _seconds(text)
    if seconds == 0:
        raise argparse.ArgumentTypeError("it must be above 0 seconds")
    return seconds


def _characters(text: str) -> int:
    if not text.isdecimal() or int(text) > MOST_LOGGED:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of characters: 0 to {MOST_LOGGED}")
    return int(text)


def _origins(text: str) -> list[str]:
    import json

    try:
        origins = json.loads(text)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(o, str) for o in origins):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of strings")
    return origins


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    given = sys.argv[1:] if argv is None else argv
    options = parse_all(parser, given, os.environ)
    _refuse_swallowed_model(parser, options)
    check_role(parser, options)
    if options.log_prompts and not options.log_requests and options.otlp_endpoint is None:
        parser.error("--log-prompts has no effect without --log-requests or --otlp-endpoint")
    if options.usage_log is not None and options.keys is None:
        parser.error("--usage-log has no effect without --keys")
    if options.json and not options.check:
        parser.error("--json has no effect without --check")
    quiet_libraries()
    with logging_to_stderr(options.log_level.upper(), options.log_format):
        return _run(options)


def quiet_libraries() -> None:
    """They log a line for each request to a hub."""
    for library in ("httpx", "httpx2"):
        logging.getLogger(library).setLevel(logging.WARNING)


def _run(options: argparse.Namespace) -> int:
    import asyncio

    from engine.errors import EngineError
    from entrypoints.check import check
    from entrypoints.server.run import run_loop

    interrupts_raise()
    try:
        if options.check:
            return check(options)
        return run_loop(_serve(options))
    except EngineError as error:
        if options.log_format == "json":
            logging.getLogger("pageloom.server").critical("%s", told(error, options))
        else:
            print(f"engine-serve: {told(error, options)}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:  # SIGTERM while starting
        return 143
    except KeyboardInterrupt:
        return 130


async def _serve(options: argparse.Namespace) -> int:
    from engine import AsyncEngine
    from entrypoints.server.front_ends import serve_front_ends
    from entrypoints.server.run import listening, serve_engine

    if options.api_server_count > 1:
        return await serve_front_ends(options)
    with listening(options.host, options.port, options.uds) as listener:  # first: a taken port is told at once
        if options.role == "router":
            return await serve_router(options, listener)
        return await serve_engine(AsyncEngine(engine_args(options, options.model)), listener, options)


if __name__ == "__main__":
    from entrypoints.start import serve

    raise SystemExit(serve())
