"""What a step takes, as a function of its plan, fitted to steps that were measured.

Linear layers take what their tokens take: nearly the same from one to a few, where weights are read, and in proportion
where there are many. So seconds are piecewise linear in tokens, between knots; and there is an amount for each token
that is sampled (the unembedding), for each token of context that a decoding row reads, and for each pair of tokens of a
prompt's part and of what it attends to.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.reports import LoadReport
from engine.step import Rows

KNOTS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
"""tokens; of those only what was measured counts. Close where kernels are others for few rows than for many"""
LINEAR = ("sampled", "decode_context", "prompt_pairs")
FEWEST_STEPS = 50
_HELD_OUT = 5
"""every so many-th step is not fitted to, but compared"""


class StepWork(msgspec.Struct, frozen=True):
    """What of a plan decides how long it takes."""

    tokens: int
    sampled: int
    decode_context: int
    prompt_pairs: int

    @classmethod
    def of(cls, rows: Rows) -> StepWork:
        lens, computed = rows.query_lens.astype(np.int64), rows.computed.astype(np.int64)
        decodes = lens <= 1
        pairs = lens * computed + lens * (lens + 1) // 2
        return cls(
            int(lens.sum()),
            int(rows.samples.sum()),
            int((computed + lens)[decodes].sum()),
            int(pairs[~decodes].sum()),
        )


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Whose steps a table is of, by the names of their settings."""

    model: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    tensor_parallel_size: int
    decode_context_parallel_size: int
    enable_expert_parallel: bool
    threads: int

    @classmethod
    def of(cls, config: EngineConfig) -> Measured:
        model, parallel = config.model, config.parallel
        return cls(
            model=model.served_name,
            dtype=model.dtype,
            quantization=model.quantization,
            kv_cache_dtype=config.cache.dtype,
            tensor_parallel_size=parallel.tensor,
            decode_context_parallel_size=parallel.context,
            enable_expert_parallel=parallel.experts is not None,
            threads=config.device.threads,
        )


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Of one engine under its settings, on one machine. Written and read as JSON."""

    source: str
    """the machine, in words"""
    of: Measured
    max_num_batched_tokens: int
    """what they were measured for, at most"""
    knots: list[int]
    at_knots_s: list[float]
    each_s: dict[str, float]
    """of `LINEAR`"""
    error: float
    """mean of |predicted / measured - 1|, of steps that were not fitted to"""
    steps: int
    """that were measured"""
    report: LoadReport
    """of the executor: what memory it leaves for keys and values"""
    swap_block_s: float = 0.0
    """a block to the host tier and back; 0: there was none"""
    beside: float = 1.0
    """what steps take while another such engine computes on the same machine, over what they take alone; 1: nothing
    more, or it was not measured"""

    def at_pace(self, pace: float) -> StepCosts:
        """All steps take so many times as long."""
        return msgspec.structs.replace(
            self,
            at_knots_s=[pace * each for each in self.at_knots_s],
            each_s={name: pace * each for name, each in self.each_s.items()},
        )

    def seconds(self, work: StepWork) -> float:
        return self.seconds_of_layers(work) + self.seconds_of_sampled(work)

    def seconds_of_layers(self, work: StepWork) -> float:
        base = float(np.interp(work.tokens, self.knots, self.at_knots_s))
        if work.tokens > self.knots[-1]:
            base *= work.tokens / self.knots[-1]
        amounts = {name: float(getattr(work, name)) for name in LINEAR if name != "sampled"}
        return base + sum(self.each_s[name] * amount for name, amount in amounts.items())

    def seconds_of_sampled(self, work: StepWork) -> float:
        return self.each_s["sampled"] * work.sampled


def read_costs(text: bytes, name: str) -> StepCosts:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(text, type=StepCosts)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} holds no step costs (engine-bench step-costs writes them): {error}") from error


def check_costs(costs: StepCosts, config: EngineConfig, beside: Container[str] = ()) -> None:
    """Raises ConfigError where the steps of `config` are others than were measured. `beside`: names of `Measured` that
    may differ."""
    asked = Measured.of(config)
    differ = [
        name
        for name in Measured.__struct_fields__
        if name not in beside and getattr(costs.of, name) != getattr(asked, name)
    ]
    if differ:
        were, are = (", ".join(f"{name} {getattr(each, name)}" for name in differ) for each in (costs.of, asked))
        raise ConfigError(
            f"the step costs were measured of {were}, and asked for is {are}: name the same, or measure a table of that"
        )
    measured, wanted = costs.max_num_batched_tokens, config.scheduler.max_num_batched_tokens
    if measured < wanted:
        raise ConfigError(
            f"max_num_batched_tokens ({wanted}) exceeds the {measured} that the step costs were measured for"
        )


def fit(
    works: Sequence[StepWork],
    seconds: Sequence[float],
    *,
    source: str,
    of: Measured,
    budget: int,
    report: LoadReport,
    swap_block_s: float = 0.0,
) -> StepCosts:
    """Least squares of relative errors, with no amount below 0. Raises ConfigError for too few steps."""
    if len(works) < FEWEST_STEPS:
        raise ConfigError(f"step costs need at least {FEWEST_STEPS} steps, got {len(works)}")
    measured = np.array(seconds)
    largest = max(work.tokens for work in works)
    knots = [knot for knot in KNOTS if knot < largest] + [largest]
    columns = _columns(works, knots)
    fitted = np.arange(len(works)) % _HELD_OUT != 0
    found = _not_negative(columns[fitted] / measured[fitted, None])
    error = np.abs(columns[~fitted] @ found / measured[~fitted] - 1).mean()
    count = len(knots)
    return StepCosts(
        source=source,
        of=of,
        max_num_batched_tokens=budget,
        knots=knots,
        at_knots_s=found[:count].tolist(),
        each_s=dict(zip(LINEAR, found[count:].tolist(), strict=True)),
        error=float(error),
        steps=len(works),
        report=report,
        swap_block_s=swap_block_s,
    )


def _columns(works: Sequence[StepWork], knots: list[int]) -> NDArray[np.float64]:
    """Of each step a row: its share of each knot, and the linear amounts."""
    tokens = np.array([work.tokens for work in works], dtype=float)
    shares = [np.interp(tokens, knots, np.eye(len(knots))[index]) for index in range(len(knots))]
    amounts = [np.array([getattr(work, name) for work in works], dtype=float) for name in LINEAR]
    return np.stack([*shares, *amounts], axis=1)


def _not_negative(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 with columns @ x as near to 1 as can be (Lawson and Hanson's active sets)."""
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-30)
    matrix, goal = columns / scale, np.ones(len(columns))
    found, used = np.zeros(matrix.shape[1]), np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(3 * matrix.shape[1]):
        gain = matrix.T @ (goal - matrix @ found)
        gain[used] = 0.0
        if gain.max() <= 1e-9:
            break
        used[int(gain.argmax())] = True
        while True:
            tried = np.zeros_like(found)
            tried[used] = np.linalg.lstsq(matrix[:, used], goal, rcond=None)[0]
            below = used & (tried <= 0)
            if not below.any():
                break
            step = (found[below] / np.maximum(found[below] - tried[below], 1e-30)).min()
            found = found + step * (tried - found)
            used &= found > 1e-12
            found[~used] = 0.0
        found = tried
    solution: NDArray[np.float64] = found / scale
    return solution
