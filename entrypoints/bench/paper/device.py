"""The engine's own executor as the one that computes a run's steps, and the cost model fitted to what it took."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from msgspec import structs

from engine.config import EngineArgs
from engine.core.start import DEFAULT_EXECUTOR, load_executor
from engine.frontend.tokenizer import Tokenizer
from engine.resolve import resolve_here
from engine.step import StepPlan, StepResult
from entrypoints.bench.paper.cost import Server, StepCost
from entrypoints.bench.paper.lengths import LONGEST, SHAREGPT, Lengths

BLOCK_SIZE = 16
SCALE = 4
"""lengths, the longest sequence and the memory are the paper's, divided by this: a run takes minutes on a CPU"""
MAX_MODEL_LEN = 2048 // SCALE
NUM_BLOCKS = 15_700 // SCALE // BLOCK_SIZE
_TEXT_CHARS = 200_000
MAX_NUM_SEQS, TOKEN_BUDGET = 64, 512
LENGTHS = Lengths(
    f"ShareGPT / {SCALE}",
    replace(SHAREGPT.prompt, mean=SHAREGPT.prompt.mean / SCALE, longest=LONGEST // SCALE),
    replace(SHAREGPT.output, mean=SHAREGPT.output.mean / SCALE, longest=LONGEST // SCALE),
)


@dataclass(frozen=True)
class Step:
    rows: int
    tokens: int
    context: int
    seconds: float


class Device:
    """A loaded model with a KV cache of `NUM_BLOCKS` blocks. Call it with plans, strictly in their order;
    `begin` before those of another scheduler."""

    def __init__(self, args: EngineArgs) -> None:
        """`args` without the sizes, which are this file's."""
        args = structs.replace(
            args,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=TOKEN_BUDGET,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=False,
            async_scheduling=False,
        )
        description, self.config = resolve_here(args)
        self.layers = description.facts.num_layers
        self.steps: list[Step] = []
        self._rows: set[int] = set()
        """known to the device"""
        self._left: list[int] = []
        """of them, those to be released with the next plan"""
        self._executor = load_executor(DEFAULT_EXECUTOR, self.config)
        load = self._executor.load()
        self.block_bytes = load.block_bytes
        self._executor.allocate(NUM_BLOCKS)
        self._executor.warm_up()
        while self._executor.compile_state() == "running":
            time.sleep(0.1)

    def begin(self) -> None:
        """The next plan is another scheduler's, which knows nothing of the rows that the one before it left."""
        self._left, self._rows = sorted(self._rows), set()

    def __call__(self, plan: StepPlan) -> tuple[float, StepResult]:
        self._rows -= set(plan.released)
        self._rows |= {new.row for new in plan.added}
        if self._left:
            plan, self._left = structs.replace(plan, released=[*self._left, *plan.released]), []
        start = time.perf_counter()
        self._executor.submit(plan, lambda: None)
        result = self._executor.collect()
        seconds = time.perf_counter() - start
        context = plan.num_tokens + int(plan.rows.computed.sum())
        self.steps.append(Step(len(plan.rows), plan.num_tokens, context, seconds))
        return seconds, result

    def close(self) -> None:
        self._executor.close()

    @property
    def server(self) -> Server:
        """Its memory; times are not this struct's."""
        return Server(
            name=self.config.model.served_name,
            gpus=self.config.device.kind,
            num_gpus=1,
            parameters=0.0,
            layers=1,
            hidden=1,
            bandwidth=1.0,
            flops=1.0,
            kv_memory=NUM_BLOCKS * BLOCK_SIZE * 4,
            max_model_len=MAX_MODEL_LEN,
        )


@dataclass(frozen=True)
class MeasuredCost(StepCost):
    """Seconds of a step as a fit to measured ones: fixed + rows + tokens beyond one a row + context."""

    weights: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def of(self, rows: int, tokens: int, context: float) -> float:
        fixed, a_row, a_token, a_context = self.weights
        return fixed + rows * a_row + max(0, tokens - rows) * a_token + context * a_context


def calibrate(server: Server, steps: list[Step]) -> MeasuredCost:
    """Least squares, no weight below 0; the slowest hundredth is left out (what else ran on the machine)."""
    kept = sorted(steps, key=lambda step: step.seconds)[: max(4, len(steps) * 99 // 100)]
    columns = np.array([[1.0, one.rows, max(0, one.tokens - one.rows), one.context] for one in kept])
    seconds = np.array([one.seconds for one in kept])
    free = list(range(4))
    while True:
        found = np.linalg.lstsq(columns[:, free], seconds, rcond=None)[0]
        if (found >= 0).all() or len(free) == 1:
            break
        free.remove(free[int(found.argmin())])
    weights = [0.0] * 4
    for index, weight in zip(free, found):
        weights[index] = max(0.0, float(weight))
    fixed, a_row, a_token, a_context = weights
    return MeasuredCost(server, BLOCK_SIZE, weights=(fixed, a_row, a_token, a_context))


def english(device: Device) -> list[int]:
    """Text to cut prompts from, in the model's tokens: the topics of Python's own help."""
    from pydoc_data.topics import topics

    tokenizer = Tokenizer.load(device.config.model.tokenizer, Path(device.config.compile.cache_dir))
    return tokenizer.encode(" ".join(" ".join(topics[name].split()) for name in sorted(topics))[:_TEXT_CHARS])


def as_json(cost: MeasuredCost) -> dict[str, float]:
    return dict(zip(("fixed_s", "a_row_s", "a_token_s", "a_context_token_s"), cost.weights))
