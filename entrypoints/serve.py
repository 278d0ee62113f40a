"""`engine-serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from entrypoints.options import add_engine_options, engine_args
from entrypoints.start import interrupts_raise


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine-serve", description="Serve a model with OpenAI's HTTP API.")
    parser.add_argument("model", nargs="?", help="Hugging Face directory or GGUF file; without it, the demo model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", help="the model's name in the API; default: its directory or file name")
    parser.add_argument("--api-key", help="required of clients as `Authorization: Bearer KEY`")
    parser.add_argument(
        "--allowed-origins",
        type=_origins,
        default=[],
        metavar="JSON",
        help="""web pages whose scripts may call this server, as '["https://a.example"]' or '["*"]'""",
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long SIGTERM and Ctrl-C let running requests go on before they are ended",
    )
    parser.add_argument(
        "--pinned-prefixes",
        type=Path,
        metavar="FILE",
        help="prefixes to compute and keep from the start: JSON lines, each with name and prompt or messages",
    )
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    add_engine_options(parser)
    return parser


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
    options = build_parser().parse_args(argv)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    import asyncio

    from engine.errors import EngineError
    from entrypoints.server.run import run_loop

    interrupts_raise()
    try:
        return run_loop(_serve(options))
    except EngineError as error:
        print(f"engine-serve: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:  # SIGTERM while starting
        return 143
    except KeyboardInterrupt:
        return 130


async def _serve(options: argparse.Namespace) -> int:
    from engine import AsyncEngine
    from entrypoints.server.run import listen, serve_engine

    listener = listen(options.host, options.port)  # first: a taken port is told before the model is loaded
    with listener:
        return await serve_engine(AsyncEngine(engine_args(options, options.model)), listener, options)


if __name__ == "__main__":
    from entrypoints.start import serve

    raise SystemExit(serve())
