"""Steps of every size, measured on this machine: an engine's own loop and executor, without a front end."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.core.loop import CoreLoop
from engine.core.start import DEFAULT_EXECUTOR, build_core, load_executor
from engine.core.wire import AddRequest
from engine.step import RowParams
from entrypoints.bench.cluster.busy_engine import busy_engine
from entrypoints.bench.cluster.costs import Measured, StepCosts, fit
from entrypoints.bench.cluster.virtual import NotingExecutor

_COMPILING_LOOK_S = 0.2
_MIXED, _MIXED_REQUESTS = 4, 12
"""batches of requests that are not alike, and how many are in each"""

Shape = tuple[int, int, int]
"""of a request: the turn at which it comes, its prompt's and its output's tokens"""


class Measurement:
    """An engine's loop, whose steps are noted. Raises what starting an engine raises."""

    def __init__(self, config: EngineConfig, seed: int) -> None:
        self._config = config
        self._executor = NotingExecutor(load_executor(DEFAULT_EXECUTOR, config))
        self._draw, self._numbers = np.random.default_rng(seed), itertools.count()
        try:
            self._loop, _ = build_core(config, self._executor)
            while self._executor.compile_state() == "running":
                time.sleep(_COMPILING_LOOK_S)
            self._run([(0, 64, 8)] * 4)  # first calls of everything
        except BaseException:
            self._executor.close()
            raise
        self.forget()

    def round(self) -> None:
        """All sizes of steps once."""
        for shapes in _batches(self._config, self._draw):
            self._run(shapes)

    def forget(self) -> None:
        self._executor.works.clear()
        self._executor.seconds.clear()

    def fitted(self, source: str) -> StepCosts:
        return fit(
            self._executor.works,
            self._executor.seconds,
            source=source,
            of=Measured.of(self._config),
            budget=self._config.scheduler.max_num_batched_tokens,
            report=self._executor.report,
            swap_block_s=self._executor.swap_block_s,
        )

    def over(self, costs: StepCosts) -> float:
        """What the noted steps took, over what a table says of them: the median."""
        told = [costs.seconds(work) for work in self._executor.works]
        return float(np.median(np.array(self._executor.seconds) / np.array(told)))

    def close(self) -> None:
        self._executor.close()

    def _run(self, shapes: list[Shape]) -> None:
        _run(self._loop, self._config, self._draw, shapes, self._numbers)


def measure(config: EngineConfig, *, rounds: int, seed: int, source: str, beside: bool = False) -> StepCosts:
    """`beside`: once more while another such engine computes on this machine. Raises what starting an engine raises."""
    measurement = Measurement(config, seed)
    try:
        for _ in range(rounds):
            measurement.round()
        costs = measurement.fitted(source)
        if beside:
            measurement.forget()
            with busy_engine(config):
                measurement.round()
            costs = msgspec.structs.replace(costs, beside=max(measurement.over(costs), 1.0))
        return costs
    finally:
        measurement.close()


def _batches(config: EngineConfig, draw: np.random.Generator) -> Iterator[list[Shape]]:
    """Requests that run together: few and many, short and long, alike and not, at once and one after another."""
    longest, most = config.scheduler.max_model_len - 1, config.scheduler.max_num_seqs
    for prompt, counts in ((16, (1, 2, 4, 8, 16, 32, 64, 128, 256)), (256, (1, 4, 8)), (1024, (1, 2))):
        if prompt < longest:
            yield from ([(0, prompt, min(8, longest - prompt))] * count for count in counts if count <= most)
    yield from ([(0, prompt, 1)] for prompt in (32, 128, 512, 2048) if prompt < longest)
    for _ in range(_MIXED):  # prompts beside those that decode, as in traffic
        prompts = draw.integers(1, max(min(512, longest - 48), 2), size=_MIXED_REQUESTS)
        outputs = draw.integers(1, min(48, longest), size=_MIXED_REQUESTS)
        turns = np.cumsum(draw.integers(0, 12, size=_MIXED_REQUESTS))
        yield list(zip(turns.tolist(), prompts.tolist(), outputs.tolist(), strict=True))


def _run(
    loop: CoreLoop, config: EngineConfig, draw: np.random.Generator, shapes: list[Shape], numbers: Iterator[int]
) -> None:
    """Until all have ended."""
    left, turn = deque(sorted(shapes)), 0
    while left or loop.has_work:
        while left and (left[0][0] <= turn or not loop.has_work):
            _, prompt, output = left.popleft()
            request = AddRequest(
                request_id=f"measured-{next(numbers)}",
                prompt_token_ids=draw.integers(0, config.model.vocab_size, size=prompt).tolist(),
                params=RowParams(seed=0, temperature=0.0),
                max_tokens=output,
            )
            loop.inbox.put(request)
        loop.turn(wait=False)
        turn += 1
