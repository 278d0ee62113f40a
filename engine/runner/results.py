"""How a step's results reach the host without the device waiting: a copy on a stream of its own, read when it has
arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.runner.streams import Event, ImmediateEvent, Streams
from engine.sampling import LogprobTensors, SampleOutput
from engine.step import NO_LOGPROBS, NO_ROUND, RoundEnd, RowVectors, StepResult, TokenLogprobs


@dataclass(frozen=True)
class SampledStep:
    """What a step leaves on the device. Nothing writes to these tensors later."""

    step_id: int
    rows: Sequence[int]
    """of every sampled position its row, in the plan's order"""
    sampled: SampleOutput | None
    prompt: Sequence[tuple[int, LogprobTensors]] = ()
    """(row, scores of consecutive prompt tokens); a row may come several times, in order"""
    failures: Mapping[int, str] = field(default_factory=dict)
    """rows for which something raised, and what"""
    positions_each: np.ndarray | None = None
    """of each row that sampled, at how many positions; None: at one"""
    counts: torch.Tensor | None = None
    """int64 [rows that sampled]: where that is not one, how many of its tokens count"""
    pooled: Sequence[tuple[int, torch.Tensor]] = ()
    """(row, float32 [vectors, size])"""
    round: RoundEnd = NO_ROUND


class PendingResult:
    """A step that was started. `wait` may be called again, from the thread that called it first."""

    def __init__(self, arrived: Event, finish: Callable[[], StepResult], at_hand: bool = False) -> None:
        self.at_hand = at_hand
        """`wait` returns at once"""
        self._arrived = arrived
        self._finish: Callable[[], StepResult] | None = finish
        self._result: StepResult | None = None

    def wait(self) -> StepResult:
        """Block until the step's results are on the host."""
        if self._finish is not None:
            self._arrived.synchronize()
            self._result = self._finish()
            self._finish = None  # and with it the tensors
            self.at_hand = True
        assert self._result is not None
        return self._result


class ResultCopier:
    """Starts the copy of a step's results to the host."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def start(self, step: SampledStep, sampled: Event) -> PendingResult:
        """`sampled`: recorded behind the last write to the step's tensors."""
        if not self._streams.queued:
            result = _to_result(step)  # now: these tensors may be views of what the next step overwrites
            return PendingResult(ImmediateEvent(), lambda: result, at_hand=True)
        event = self._streams.event()
        with self._streams.results:
            sampled.wait()
            on_host = SampledStep(
                step_id=step.step_id,
                rows=step.rows,
                sampled=None if step.sampled is None else _sample_to_host(step.sampled),
                prompt=[(row, scores.start_copy()) for row, scores in step.prompt],
                failures=step.failures,
                positions_each=step.positions_each,
                counts=None if step.counts is None else _pinned(step.counts),
                pooled=[(row, _pinned(vectors)) for row, vectors in step.pooled],
                round=step.round,
            )
            event.record()

        def finish(sources: SampledStep = step) -> StepResult:
            # `sources` stays alive until here: the allocator knows only the main stream's use of it, and would give its
            # memory away while the result stream still reads.
            return _to_result(on_host)

        return PendingResult(event, finish)


def _sample_to_host(output: SampleOutput) -> SampleOutput:
    return SampleOutput(
        token_ids=_pinned(output.token_ids),
        faults=_pinned(output.faults),
        logprobs=None if output.logprobs is None else output.logprobs.start_copy(),
    )


def _pinned(source: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(source, device="cpu", pin_memory=source.is_cuda).copy_(source, non_blocking=True)


def _to_result(step: SampledStep) -> StepResult:
    prompt: dict[int, list[TokenLogprobs]] = {}
    for row, scores in step.prompt:
        prompt.setdefault(row, []).extend(scores.to_list())
    pooled = RowVectors.of([(row, vectors.numpy()) for row, vectors in step.pooled])
    if step.sampled is None:
        return StepResult(
            step_id=step.step_id,
            token_ids=[],
            prompt_logprobs=prompt,
            pooled=pooled,
            faults=list(step.failures),
            reasons=dict(step.failures),
            round=step.round,
        )
    faults, tokens = step.sampled.faults.tolist(), step.sampled.token_ids.tolist()
    rows, counts, drafted = step.rows, [], []
    if step.counts is not None and step.positions_each is not None:
        counts, drafted = step.counts.tolist(), (step.positions_each - 1).tolist()
        kept = _kept(step.positions_each.tolist(), counts)
        rows, faults, tokens = ([column[at] for at in kept] for column in (rows, faults, tokens))
    faulty = (
        list(dict.fromkeys(row for row, fault in zip(rows, faults, strict=True) if fault)) if True in faults else []
    )
    return StepResult(
        step_id=step.step_id,
        token_ids=tokens,
        counts=counts,
        drafted=drafted,
        logprobs=NO_LOGPROBS if step.sampled.logprobs is None else step.sampled.logprobs.to_host(),
        prompt_logprobs=prompt,
        pooled=pooled,
        faults=list(dict.fromkeys([*faulty, *step.failures])) if step.failures else faulty,
        reasons=dict(step.failures),
        round=step.round,
    )


def _kept(positions_each: list[int], counts: list[int]) -> list[int]:
    """Of each row's sampled positions, those that count: the first ones."""
    kept: list[int] = []
    first = 0
    for positions, count in zip(positions_each, counts, strict=True):
        kept += range(first, first + count)
        first += positions
    return kept
