"""`engine-batch`: a file of requests in OpenAI's batch format, answered by the handlers of the server, without one.

A run that was ended is taken up where it stood by the same command.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from entrypoints.options import FlexibleArgumentParser, add_engine_options, count, engine_args
from entrypoints.serve import add_lora_modules, add_served_names, add_speech_options
from entrypoints.start import INTERRUPTED, interrupts_raise

if TYPE_CHECKING:
    import httpx

    from engine import AsyncEngine
    from engine.limits import Limits
    from entrypoints.batch_lines import Asked, Result, ResultFile

SOME_FAILED = 3
_PAUSE_S = (0.05, 2.0)
"""before a request is sent again that found no place: at first, and at most"""
_TRIES = 20
"""of a request while nobody else finds a place either"""
_NO_PLACE = (503, 529)


def build_parser() -> argparse.ArgumentParser:
    parser = FlexibleArgumentParser(prog="engine-batch", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="answer every line of a file",
        description='Lines of the input: {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": '
        "{...}}. The exit status is 0, 3 where some lines of the output are errors, and 1 where it could not be "
        "finished.",
    )
    run.add_argument("-i", "--input", type=Path, required=True, metavar="FILE", help="JSON lines")
    run.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="answers, as they come; gone on with if there"
    )
    run.add_argument("--overwrite", action="store_true", help="start anew where the output exists")
    run.add_argument("--model", help="Hugging Face directory, GGUF file, or hub's name; without it, the demo model")
    run.add_argument(
        "--max-in-flight",
        type=count,
        metavar="N",
        help="requests that are under way at a time; default: twice as many as sequences can run",
    )
    run.add_argument("--no-progress", dest="progress", action="store_false", help="show no progress bar")
    run.add_argument("--strict-fields", action="store_true", help="refuse fields that nobody knows")
    add_served_names(run)
    add_lora_modules(run)
    add_speech_options(run)
    run.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    add_engine_options(run)
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for library in ("httpx", "httpx2"):  # a line for each request
        logging.getLogger(library).setLevel(logging.WARNING)
    from engine.errors import EngineError

    interrupts_raise()
    try:
        with asyncio.Runner() as runner:
            status = runner.run(_run(options))
    except (EngineError, OSError) as error:
        print(f"engine-batch: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        status = 128 + signal.SIGTERM
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status >= 128:
        print("engine-batch: interrupted; the same command goes on from here", file=sys.stderr)
    return status


async def _run(options: argparse.Namespace) -> int:
    from engine import AsyncEngine
    from engine.errors import ConfigError, EngineError
    from entrypoints.batch_lines import ResultFile
    from entrypoints.server.before_start import check_adapters, check_speech
    from entrypoints.server.run import signals_abandon

    args = engine_args(options, options.model)
    check_speech(options)
    check_adapters(options)
    if not options.input.is_file():
        raise ConfigError(f"--input {options.input}: there is no such file")
    if options.output.exists() and options.output.samefile(options.input):
        raise ConfigError(f"--output {options.output} is the input")
    output = ResultFile(options.output, overwrite=options.overwrite)
    engine = AsyncEngine(args)
    signals: list[int] = []
    try:
        with signals_abandon(engine.abandon, signals):
            await engine.start()
        with _ended_by_sigterm():
            return await answer_all(engine, output, options)
    except (asyncio.CancelledError, EngineError):
        if not signals:
            raise
        return 128 + signals[0]
    finally:
        await engine.shutdown()
        output.close()


async def answer_all(engine: AsyncEngine, output: ResultFile, options: argparse.Namespace) -> int:
    """Every line of `options.input` that `output` does not answer yet. The engine must be started. Returns the exit
    status. Raises what ends the core, `InvalidRequestError` of an adapter, and OSError where the output cannot be
    written."""
    import httpx

    from entrypoints.server.app import create_app
    from entrypoints.server.context import ServerSettings

    given = {name: value for name, value in vars(options).items() if name in ServerSettings.__struct_fields__}
    settings = ServerSettings(**given)
    app = create_app(engine, engine.served_name, settings=settings)
    await app.state.adapters.load_all(settings.lora_modules)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client,
    ):
        batch = Batch(engine, client, output, options.max_in_flight, progress=options.progress)
        await batch.run(options.input)
    print(batch.summary(), file=sys.stderr)
    return SOME_FAILED if output.num_failed else 0


class Batch:
    """Lines that are under way, as many as keep the engine busy; answers are written as they come."""

    def __init__(
        self,
        engine: AsyncEngine,
        client: httpx.AsyncClient,
        output: ResultFile,
        max_in_flight: int | None = None,
        *,
        progress: bool = False,
    ) -> None:
        scheduler = engine.config.scheduler
        self._engine, self._client, self._output = engine, client, output
        self._places = asyncio.Semaphore(max_in_flight or min(2 * scheduler.max_num_seqs, scheduler.max_waiting))
        self._under_way = 0
        self._turned_away: set[str] = set()
        """of those under way, who found no place"""
        self._progress = progress
        self.answered = self.failed = self.skipped = 0

    def summary(self) -> str:
        before = f", {self.skipped} were answered before" if self.skipped else ""
        return f"engine-batch: {self.answered} lines answered, {self.failed} of them with errors{before}"

    async def run(self, path: Path) -> None:
        from tqdm import tqdm

        from entrypoints.batch_lines import numbered_lines

        limits = self._engine.config.limits
        with open(path, "rb") as file:
            total = sum(1 for _ in numbered_lines(file, limits))
        bar = tqdm(total=total, desc="Answered lines", dynamic_ncols=True, disable=None if self._progress else True)
        try:
            with bar, open(path, "rb") as file:
                async with asyncio.TaskGroup() as tasks:
                    await self._send(file, limits, tasks, bar)
        except ExceptionGroup as group:  # of tasks; the first is the cause
            raise group.exceptions[0] from None

    async def _send(self, file: BinaryIO, limits: Limits, tasks: asyncio.TaskGroup, bar: Any) -> None:
        from engine.errors import InvalidRequestError
        from entrypoints.batch_lines import LineError, Result, custom_id_of, numbered_lines, read_line, result_id

        seen: set[str] = set()
        for number, line in numbered_lines(file, limits):
            name = result_id(number)
            try:
                asked = read_line(line, limits)
                if asked.custom_id in seen:
                    raise InvalidRequestError("the custom_id is that of an earlier line", code="duplicate_custom_id")
            except InvalidRequestError as error:
                if name in self._output.refused:
                    self._skip(bar)
                else:
                    reason = LineError(error.code or "invalid_line", str(error))
                    self._write(Result(name, custom_id_of(line), error=reason), bar)
                continue
            seen.add(asked.custom_id)
            if asked.custom_id in self._output.answered:
                self._skip(bar)
                continue
            await self._places.acquire()
            tasks.create_task(self._answer(name, asked, bar))

    async def _answer(self, name: str, asked: Asked, bar: Any) -> None:
        from entrypoints.batch_lines import Answered, Result

        self._under_way += 1
        try:
            reply = await self._ask(asked)
            try:
                body = reply.json()
            except ValueError:
                body = reply.text
            answered = Answered(reply.status_code, reply.headers.get("x-request-id", ""), body)
            self._write(Result(name, asked.custom_id, answered), bar)
        finally:
            self._under_way -= 1
            self._places.release()

    async def _ask(self, asked: Asked) -> httpx.Response:
        """Again and again while there is no place for it. Raises `CoreDiedError`: that is no line's fault."""
        pause, tries = _PAUSE_S[0], 0
        headers = {"content-type": "application/json"}
        try:
            while True:
                reply = await self._client.post(asked.url, content=bytes(asked.body), headers=headers)
                if reply.status_code >= 500:
                    self._engine.check_health()
                if reply.status_code not in _NO_PLACE:
                    return reply
                self._turned_away.add(asked.custom_id)
                tries = tries + 1 if len(self._turned_away) == self._under_way else 0
                if tries == _TRIES:
                    return reply
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSE_S[1])
        finally:
            self._turned_away.discard(asked.custom_id)

    def _write(self, result: Result, bar: Any) -> None:
        self._output.write(result)
        self.answered += 1
        self.failed += result.failed
        bar.update(1)

    def _skip(self, bar: Any) -> None:
        self.skipped += 1
        bar.update(1)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """As Ctrl-C ends it."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


if __name__ == "__main__":
    from entrypoints.start import batch

    raise SystemExit(batch())
