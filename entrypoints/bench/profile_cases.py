"""What `engine-bench profile` runs: decode at a batch and a context, prefill of a length, whole workloads; and from the
recorded steps the figures of each.

Watched and undisturbed steps alternate within one run, a few of each at a time, so that what the machine does meanwhile
falls on both alike. A case's figures are means over the middle half of its steps by wall time: robust like a median,
and yet the parts add up to the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from engine.observability.step_profile import PIECE, StepTimes, Timeline
from engine.observability.step_work import Ceilings, Work
from engine.request import SamplingParams
from entrypoints.bench.profile_engine import ProfiledEngine
from entrypoints.bench.workloads import FIRST_ID, BenchRequest, workload

ALTERNATE_STEPS = 4
SETTLE_STEPS = 2
"""after a case's batch is complete, before it is timed"""


class PartFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a step; milliseconds per step, of a prefill or workload per pass."""

    name: str
    ms: float
    calls: float
    floor_ms: float | None
    """None: nothing that must be read or computed"""
    read_bytes: float
    ops: float


class CaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """`parts` and `unaccounted_ms` add up to `wall_ms`."""

    case: str
    per: str
    """what one unit of the figures is: step, prompt, run"""
    units: int
    """watched; of them the middle half counts"""
    wall_ms: float
    undisturbed_ms: float | None
    """the same without a look inside the model"""
    fastest_ms: float | None
    """of all undisturbed units: what it takes while nobody else is at work"""
    floor_ms: float
    unaccounted_ms: float
    parts: list[PartFigures]
    beside_ms: dict[str, float]
    """parts of the core's thread, which run while the step computes"""
    steps_per_unit: float
    tokens_per_unit: float
    context: float
    """mean sequence length, of sequences in steps"""


@dataclass(frozen=True)
class Unit:
    """Steps that belong together, in order."""

    steps: Sequence[StepTimes]
    work: Sequence[dict[str, Work]]

    @property
    def wall_ns(self) -> int:
        return self.steps[-1].end_ns - self.steps[0].start_ns


@dataclass(frozen=True)
class Case:
    """`requests(repeat)` are submitted at once; `select` finds the units among the steps that came of it."""

    name: str
    per: str
    requests: Callable[[int], list[BenchRequest]]
    repeats: int
    alternate: int
    """steps of one kind in a row; 0: whole repeats"""
    select: Callable[[Sequence[Unit]], list[Unit]]
    """given one unit for each step"""


def decode_case(engine: ProfiledEngine, batch: int, context: int, steps: int) -> Case:
    """`steps` of each kind, with `batch` sequences around `context` tokens. Raises ValueError where the engine's
    settings do not allow that."""
    config = engine.llm.config
    length = max(1, context - steps)
    budget = config.scheduler.max_num_batched_tokens
    # the first prompts decode while the last are still being read
    lead = -(-batch * length // max(1, budget - batch)) + SETTLE_STEPS + 2
    count = 2 * steps + lead
    if batch > config.scheduler.max_num_seqs:
        raise ValueError(f"batch {batch} exceeds --max-num-seqs {config.scheduler.max_num_seqs}")
    if length + count > config.scheduler.max_model_len:
        raise ValueError(
            f"context {context} with {count} steps exceeds --max-model-len {config.scheduler.max_model_len}: "
            "raise it, or take fewer --steps"
        )
    blocks = batch * -(-(length + count + 1) // config.cache.block_size)
    if blocks > engine.llm.ready.num_blocks:
        raise ValueError(
            f"batch {batch} at context {context} needs {blocks} KV blocks, and there are "
            f"{engine.llm.ready.num_blocks}: raise --kv-cache-memory"
        )

    def select(units: Sequence[Unit]) -> list[Unit]:
        full = [unit for unit in units if _is_decode(unit.steps[0], batch) and not unit.steps[0].is_last]
        return full[SETTLE_STEPS : SETTLE_STEPS + 2 * steps]

    def requests(repeat: int) -> list[BenchRequest]:
        return _random(engine, batch, length, count, [batch, context, repeat])

    return Case(f"decode, batch {batch}, context {context}", "step", requests, 1, ALTERNATE_STEPS, select)


def prefill_case(engine: ProfiledEngine, length: int, repeats: int) -> Case:
    """One prompt alone, `repeats` times each way, from its first step to its first token."""
    limit = engine.llm.config.scheduler.max_model_len
    if length + 1 > limit:
        raise ValueError(f"a prompt of {length} tokens exceeds --max-model-len {limit}")

    def requests(repeat: int) -> list[BenchRequest]:
        return _random(engine, 1, length, 1, [length, repeat])

    return Case(f"prefill, {length} tokens", "prompt", requests, repeats, 0, _all_as_one)


def workload_case(engine: ProfiledEngine, name: str, repeats: int) -> Case:
    """A named workload as totals. Raises ValueError for one that has arrival times."""
    if any(request.beams for request in workload(name)):
        raise ValueError(f"{name} searches with beams, whose steps are not profiled")
    if any(request.arrival_s for request in workload(name)):
        raise ValueError(f"{name} has arrival times, and here all requests arrive at once")
    return Case(name, "run", lambda repeat: workload(name, repeat), repeats, 0, _all_as_one)


@dataclass(frozen=True)
class Recorded:
    """A case that was run."""

    case: Case
    units: Sequence[Unit]
    beside_ns: dict[str, int]


def run_case(engine: ProfiledEngine, case: Case, sampling: dict[str, object]) -> Recorded:
    """Serve the case's requests and pick its units. Raises ValueError where there are none."""
    engine.recorder.alternate = case.alternate
    units: list[Unit] = []
    beside: dict[str, int] = {}
    for repeat in range(case.repeats if case.alternate else 2 * case.repeats):
        engine.recorder.watch = repeat % 2 == 1
        timeline = record(engine, case.requests(repeat), sampling)
        found = case.select(_units(engine, timeline))
        if found:
            spent = timeline.beside(found[0].steps[0].start_ns, found[-1].steps[-1].end_ns)
            beside = {part: beside.get(part, 0) + spent.get(part, 0) for part in {*beside, *spent}}
        units += found
    if not any(unit.steps[0].watched for unit in units):
        raise ValueError(f"{case.name}: no such step was scheduled; --steps or --kv-cache-memory is too small")
    return Recorded(case, units, beside)


def record(engine: ProfiledEngine, requests: list[BenchRequest], sampling: dict[str, object]) -> Timeline:
    """Serve the requests to their full lengths and take what was recorded meanwhile."""
    params = [sampling_params(sampling, request.max_tokens) for request in requests]
    engine.recorder.active = True
    try:
        engine.llm.generate([{"prompt_token_ids": r.prompt_token_ids} for r in requests], params, use_tqdm=False)
    finally:
        engine.recorder.active = False
    return engine.recorder.take()


def sampling_params(given: dict[str, object], max_tokens: int) -> SamplingParams:
    """Greedy unless `given` says otherwise. Raises ValueError for what SamplingParams does not know or allow."""
    if unknown := set(given) - {field.name for field in msgspec.structs.fields(SamplingParams)}:
        raise ValueError(f"--sampling: there is no {', '.join(sorted(unknown))}")
    fixed = {"max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
    try:
        return msgspec.convert({"temperature": 0.0, **given, **fixed}, SamplingParams)
    except msgspec.ValidationError as error:
        raise ValueError(f"--sampling: {error}") from error


def figures(recorded: Recorded, engine: ProfiledEngine, ceilings: Ceilings) -> CaseFigures:
    """Means over the middle half of the watched units."""
    case, units = recorded.case, recorded.units
    watched = [unit for unit in units if unit.steps[0].watched]
    plain = [unit for unit in units if not unit.steps[0].watched]
    middle = middle_half(watched)
    scale = 1e-6 / len(middle)
    wall = sum(unit.wall_ns for unit in middle) * scale
    spent: dict[str, list[float]] = {}
    work: dict[str, Work] = {}
    for unit in middle:
        for step, needs in zip(unit.steps, unit.work, strict=True):
            for part, time in step.parts.items():
                known = spent.setdefault(part, [0.0, 0.0])
                known[0] += time.ns * scale
                known[1] += time.calls / len(middle)
            for part, need in needs.items():
                work.setdefault(part, Work()).add(need, 1 / len(middle))
    parts = [_part(engine, part, time, work.get(part), ceilings) for part, time in spent.items()]
    undisturbed = [unit.wall_ns * 1e-6 for unit in middle_half(plain)]
    plans = [step.plan.rows for unit in middle for step in unit.steps]
    rows = [length for rows in plans for length in (rows.computed + rows.query_lens).tolist()]
    return CaseFigures(
        case=case.name,
        per=case.per,
        units=len(watched),
        wall_ms=wall,
        undisturbed_ms=float(np.mean(undisturbed)) if plain else None,
        fastest_ms=min(unit.wall_ns * 1e-6 for unit in plain) if plain else None,
        floor_ms=sum(part.floor_ms or 0.0 for part in parts),
        unaccounted_ms=wall - sum(part.ms for part in parts),
        parts=parts,
        beside_ms={part: ns * 1e-6 / len(units) for part, ns in recorded.beside_ns.items()},
        steps_per_unit=sum(len(unit.steps) for unit in middle) / len(middle),
        tokens_per_unit=sum(step.plan.num_tokens for unit in middle for step in unit.steps) / len(middle),
        context=sum(rows) / max(1, len(rows)),
    )


def middle_half(units: Sequence[Unit]) -> Sequence[Unit]:
    """Those between the quartiles by wall time; of fewer than four all but, of three, the outer two."""
    ordered = sorted(units, key=lambda unit: unit.wall_ns)
    cut = (len(ordered) + 1) // 4
    return ordered[cut : len(ordered) - cut]


def _part(
    engine: ProfiledEngine, part: str, time: Sequence[float], work: Work | None, ceilings: Ceilings
) -> PartFigures:
    return PartFigures(
        name=engine.piece_name(part) if part.startswith(PIECE) else part,
        ms=time[0],
        calls=time[1],
        floor_ms=None if work is None else work.floor_s(ceilings) * 1e3,
        read_bytes=0.0 if work is None else work.bytes,
        ops=0.0 if work is None else work.total_ops,
    )


def _units(engine: ProfiledEngine, timeline: Timeline) -> list[Unit]:
    """One for each step. Work follows the plans from an idle engine on, so all steps pass through."""
    step_work = engine.step_work()
    units = []
    for step in timeline.steps():
        work = step_work.of(step.plan, {part: time.calls for part, time in step.parts.items()})
        units.append(Unit([step], [work if step.watched else {}]))
    return units


def _all_as_one(units: Sequence[Unit]) -> list[Unit]:
    """From the first step that computes to the end of the last: what only releases rows afterwards is nobody's wait."""
    computing = [index for index, unit in enumerate(units) if len(unit.steps[0].plan.rows)]
    if not computing:
        return []
    kept = units[computing[0] : computing[-1] + 1]
    steps = [step for unit in kept for step in unit.steps]
    return [Unit([*steps[:-1], steps[-1].to_its_own_end()], [work for unit in kept for work in unit.work])]


def _is_decode(step: StepTimes, batch: int) -> bool:
    rows = step.plan.rows
    return len(rows) == batch and bool(((rows.query_lens == 1) & (rows.samples > 0) & (rows.computed > 0)).all())


def _random(engine: ProfiledEngine, count: int, length: int, max_tokens: int, seed: list[int]) -> list[BenchRequest]:
    vocab = engine.llm.model_config.vocab_size
    draw = np.random.default_rng(seed)
    ids = draw.integers(min(FIRST_ID, vocab - 1), vocab, size=(count, length)).tolist()
    return [BenchRequest(prompt, max_tokens, 0.0) for prompt in ids]
