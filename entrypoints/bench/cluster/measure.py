"""Steps of every size, measured on this machine: an engine's own loop and executor, without a front end."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from engine.config import EngineConfig
from engine.core.loop import CoreLoop
from engine.core.start import DEFAULT_EXECUTOR, build_core, load_executor
from engine.core.wire import AddRequest
from engine.step import RowParams
from entrypoints.bench.cluster.costs import Measured, StepCosts, fit
from entrypoints.bench.cluster.virtual import NotingExecutor

_COMPILING_LOOK_S = 0.2
_MIXED, _MIXED_REQUESTS = 4, 12
"""batches of requests that are not alike, and how many are in each"""

Shape = tuple[int, int, int]
"""of a request: the turn at which it comes, its prompt's and its output's tokens"""


def measure(config: EngineConfig, *, rounds: int, seed: int, source: str) -> StepCosts:
    """Raises what starting an engine raises."""
    executor = NotingExecutor(load_executor(DEFAULT_EXECUTOR, config))
    try:
        loop, _ = build_core(config, executor)
        while executor.compile_state() == "running":
            time.sleep(_COMPILING_LOOK_S)
        draw = np.random.default_rng(seed)
        numbers = itertools.count()
        _run(loop, config, draw, [(0, 64, 8)] * 4, numbers)  # first calls of everything
        executor.works.clear()
        executor.seconds.clear()
        for _ in range(rounds):
            for shapes in _batches(config, draw):
                _run(loop, config, draw, shapes, numbers)
        budget = config.scheduler.max_num_batched_tokens
        return fit(
            executor.works,
            executor.seconds,
            source=source,
            of=Measured.of(config),
            budget=budget,
            report=executor.report,
            swap_block_s=executor.swap_block_s,
        )
    finally:
        executor.close()


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
