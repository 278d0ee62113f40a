"""Steps of every size, measured on this machine: an engine's own loop and executor, without a front end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np

from engine.config import EngineConfig
from engine.core.loop import CoreLoop
from engine.core.start import DEFAULT_EXECUTOR, build_core, load_executor
from engine.core.wire import AddRequest
from engine.step import RowParams
from entrypoints.bench.cluster.costs import StepCosts, fit
from entrypoints.bench.cluster.virtual import NotingExecutor

_COMPILING_LOOK_S = 0.2
_MOST_TOKENS = 8192
"""of prompts that run together"""


def measure(config: EngineConfig, *, rounds: int, seed: int, source: str) -> StepCosts:
    """Raises what starting an engine raises."""
    executor = NotingExecutor(load_executor(DEFAULT_EXECUTOR, config))
    try:
        loop, _ = build_core(config, executor)
        while executor.compile_state() == "running":
            time.sleep(_COMPILING_LOOK_S)
        draw = np.random.default_rng(seed)
        numbers = itertools.count()
        _run(loop, _requests(config, draw, [(64, 8)] * 4, numbers))  # first calls of everything
        executor.works.clear()
        executor.seconds.clear()
        for _ in range(rounds):
            for shapes in _batches(config, draw):
                _run(loop, _requests(config, draw, shapes, numbers))
        budget = config.scheduler.max_num_batched_tokens
        return fit(
            executor.works,
            executor.seconds,
            source=source,
            model=config.model.served_name,
            budget=budget,
            report=executor.report,
        )
    finally:
        executor.close()


def _batches(config: EngineConfig, draw: np.random.Generator) -> Iterator[list[tuple[int, int]]]:
    """Prompt and output lengths of requests that run together: few and many, short and long, alike and not."""
    longest, most = config.scheduler.max_model_len - 1, config.scheduler.max_num_seqs
    for count in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for prompt in (16, 256, 1024):
            if count <= most and prompt < longest and count * prompt <= _MOST_TOKENS:
                yield [(prompt, min(12, longest - prompt))] * count
    for prompt in (32, 128, 512, 2048):
        if prompt < longest:
            yield [(prompt, 1)] * 2
    for _ in range(4):
        prompts = draw.integers(1, max(min(1024, longest - 40), 2), size=min(most, 24))
        yield [(int(prompt), int(draw.integers(1, 32))) for prompt in prompts]


def _requests(
    config: EngineConfig, draw: np.random.Generator, shapes: list[tuple[int, int]], numbers: Iterator[int]
) -> list[AddRequest]:
    return [
        AddRequest(
            request_id=f"measured-{next(numbers)}",
            prompt_token_ids=draw.integers(0, config.model.vocab_size, size=prompt).tolist(),
            params=RowParams(seed=0, temperature=0.0),
            max_tokens=output,
        )
        for prompt, output in shapes
        if prompt + output <= config.scheduler.max_model_len
    ]


def _run(loop: CoreLoop, requests: list[AddRequest]) -> None:
    for request in requests:
        loop.inbox.put(request)
    while loop.has_work:
        loop.turn(wait=False)
