"""Do streams notice grammars that were made to take the engine down (`tests/end_to_end/grammar_bombs.py`)?

usage: python tools/bench_grammar_bombs.py MODEL [--streams N] [--rain N] [--seconds S] [--rounds N]

Streams go on all the time while phases take turns: nothing beside them; `--rain` clients that send one bomb after the
other, of which nothing is remembered; and as many plain requests as bombs were served, so that their own tokens are
not taken for the price of their grammars. Prints milliseconds between the tokens of a stream; JSON as the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "end_to_end")]

from grammar_bombs import BOMBS  # type: ignore[import-not-found]  # noqa: E402  # of the tests

from engine import AsyncEngine, EngineArgs, SamplingParams, StructuredOutputsParams  # noqa: E402
from engine.errors import EngineError  # noqa: E402
from engine.limits import Limits  # noqa: E402

SETTLING_S = 0.3
"""behind the beginning of a phase, what is not counted"""
BOMB_TOKENS = 8
_STREAM_TOKENS = 256
"""of one answer: short beside a phase, and they do not end together, so that phases have contexts of equal lengths"""
PHASES = ("alone", "bombs", "plain")


class Bench:
    def __init__(self, engine: AsyncEngine, options: argparse.Namespace) -> None:
        self._engine, self._options = engine, options
        self._bombs: Iterator[tuple[str, StructuredOutputsParams]] = itertools.cycle(BOMBS.items())
        self._gaps: list[float] | None = None
        """of the phase under way"""
        self.gaps: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self.ends: Counter[str] = Counter()
        self.worst: list[tuple[float, str]] = []
        """milliseconds of a gap, and which bombs were under way"""
        self._under_way: Counter[str] = Counter()

    async def run(self) -> None:
        streams = [asyncio.create_task(self._stream(number)) for number in range(self._options.streams)]
        served = 0
        for _ in range(self._options.rounds):
            await self._phase("alone", [])
            before = self.ends["served"]
            await self._phase("bombs", [self._rain() for _ in range(self._options.rain)])
            served = max(self.ends["served"] - before, 1)
            await self._phase("plain", [self._plain(self._options.seconds / served)])
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    async def _phase(self, name: str, beside: list[Coroutine[Any, Any, None]]) -> None:
        tasks = [asyncio.create_task(each) for each in beside]
        await asyncio.sleep(SETTLING_S)
        self._gaps = self.gaps[name]
        await asyncio.sleep(self._options.seconds)
        self._gaps = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(SETTLING_S)

    async def _stream(self, number: int) -> None:
        lengths = itertools.chain([32 * number + 32], itertools.repeat(_STREAM_TOKENS))
        for length in lengths:
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
            last, known = 0.0, 0
            async for output in self._engine.generate({"prompt_token_ids": [100 + number] * 16}, params):
                now, tokens = time.perf_counter(), len(output.outputs[0].token_ids)
                if last and self._gaps is not None:
                    self._gaps += [1000 * (now - last) / (tokens - known)] * (tokens - known)
                    if self._under_way and not number:
                        self.worst.append((1000 * (now - last), ", ".join(self._under_way)))
                        self.worst = sorted(self.worst, reverse=True)[:10]
                last, known = now, tokens

    async def _rain(self) -> None:
        while True:
            name, bomb = next(self._bombs)
            self._under_way[name] += 1
            try:
                await self._ask(bomb)
            finally:
                self._under_way -= Counter([name])

    async def _plain(self, pause_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._ask(None))
                await asyncio.sleep(pause_s)

    async def _ask(self, structured: StructuredOutputsParams | None) -> None:
        params = SamplingParams(max_tokens=BOMB_TOKENS, structured_outputs=structured)
        end = "refused"
        with suppress(EngineError):
            async for _ in self._engine.generate({"prompt_token_ids": [5, 6, 7, 8]}, params):
                end = "served"
        self.ends[end if structured is not None else "plain"] += 1


def main() -> int:
    options = _options()
    args = EngineArgs(
        model=options.model,
        quantization=options.quantization,
        threads=options.threads,
        kv_cache_memory="512MiB",
        max_num_seqs=2 * (options.streams + options.rain),
        enable_prefix_caching=False,
        limits=Limits(grammars=1, grammars_bytes=0),
    )
    bench = asyncio.run(_measured(args, options))
    figures: dict[str, float] = {}
    print(f"{'ms between tokens':<20}{'tokens':>8}{'p50':>8}{'p90':>8}{'p99':>8}{'longest':>9}")
    for phase, gaps in bench.gaps.items():
        cuts = statistics.quantiles(gaps, n=100)
        figures |= {f"{phase}_p50_ms": cuts[49], f"{phase}_p99_ms": cuts[98]}
        print(f"{phase:<20}{len(gaps):>8}{cuts[49]:>8.2f}{cuts[89]:>8.2f}{cuts[98]:>8.2f}{max(gaps):>9.2f}")
    for over in ("alone", "plain"):
        figures |= {f"p{p}_over_{over}": figures[f"bombs_p{p}_ms"] / figures[f"{over}_p{p}_ms"] for p in (50, 99)}
    for gap, names in bench.worst:
        print(f"{gap:8.1f} ms  {names}")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()} | bench.ends))
    return 0


async def _measured(args: EngineArgs, options: argparse.Namespace) -> Bench:
    engine = AsyncEngine.from_args(args)
    try:
        bench = Bench(engine, options)
        await bench._ask(None)
        while engine.stats().compiling:
            await asyncio.sleep(0.2)
            await bench._ask(None)
        await bench.run()
        return bench
    finally:
        await engine.shutdown()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int, help="compute threads")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rain", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase in each round")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
