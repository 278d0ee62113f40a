"""`engine-batch run` on the scripted core, as a program: python batch_program.py MODEL KEY=VALUE... -- ARGUMENT..."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from scripted_server import Server

import engine
from engine.core.wire import CoreReady
from entrypoints import batch
from entrypoints.batch_lines import ResultFile


def options_of(arguments: list[str]) -> argparse.Namespace:
    return batch.build_parser().parse_args(["run", *arguments])


def run(server: Server, options: argparse.Namespace) -> int:
    async def go() -> int:
        await server.engine.start()
        server.script.answer = server.ids(server.answer)
        server.script.eos = server.engine.tokenizer.eos_token_id or 0
        output = ResultFile(options.output, overwrite=options.overwrite)
        try:
            return await batch.answer_all(server.engine, output, options)
        finally:
            output.close()
            await server.engine.shutdown()

    return asyncio.run(go())


def main() -> int:
    model, *rest = sys.argv[1:]
    at = rest.index("--")
    server = Server(Path(model))
    for setting in rest[:at]:
        name, value = setting.split("=")
        setattr(server.script, name, json.loads(value))
    start = server.engine.start

    async def started() -> CoreReady:
        ready = await start()
        server.script.answer = server.ids(server.answer)
        return ready

    server.engine.start = started  # type: ignore[method-assign]
    engine.AsyncEngine = lambda args: server.engine  # type: ignore[assignment, misc]
    return batch.main(["run", "--model", model, *rest[at + 1 :]])


if __name__ == "__main__":
    raise SystemExit(main())
