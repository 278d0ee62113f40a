"""`engine-serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import logging
import sys

from entrypoints.options import add_engine_options, engine_args


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine-serve", description="Serve a model with OpenAI's HTTP API.")
    parser.add_argument("model", nargs="?", help="Hugging Face directory or GGUF file; without it, the demo model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", help="the model's name in the API; default: its directory or file name")
    parser.add_argument("--api-key", help="required of clients as `Authorization: Bearer KEY`")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    add_engine_options(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    import asyncio

    from engine.errors import EngineError

    try:
        return asyncio.run(_serve(options))
    except EngineError as error:
        print(f"engine-serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


async def _serve(options: argparse.Namespace) -> int:
    import uvicorn

    from engine import AsyncEngine
    from entrypoints.server.app import create_app

    engine = AsyncEngine(engine_args(options, options.model))
    await engine.start()
    try:
        app = create_app(engine, engine.served_name, options.api_key)
        config = uvicorn.Config(
            app,
            host=options.host,
            port=options.port,
            log_level=options.log_level,
            access_log=False,
            timeout_keep_alive=60,
        )
        server = uvicorn.Server(config)
        await server.serve()
        return 0 if server.started else 1
    finally:
        await engine.shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
