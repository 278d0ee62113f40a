"""A runner that is observed: the same results, and marks whose parts add up to each step."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch
from plan_driver import PlanDriver, Sequence, tiny_runner

from compilation.interface import CompiledModel, CompileReport, WrapCall, WrapPiece
from engine.observability.step_profile import (
    ATTENTION,
    ATTENTION_PLAN,
    HAND_OVER,
    INPUTS,
    LOGITS,
    MODEL,
    RESULTS,
    SAMPLING,
    Recorder,
    StepTimes,
)
from engine.runner.model_runner import ModelRunner
from engine.runner.observed import ObservedProgram
from engine.step import RowParams


def tokens_of(runner: ModelRunner) -> list[list[int]]:
    rng = random.Random(5)
    sequences = [
        Sequence(prompt=[rng.randrange(97) for _ in range(n)], num_tokens=8, params=RowParams(seed=n, temperature=t))
        for n, t in ((3, 0.0), (17, 0.0), (9, 0.8))
    ]
    PlanDriver(runner, rng, preempt=0.1, lag=True).run(sequences)
    return [sequence.generated for sequence in sequences]


def test_observing_changes_no_token_and_parts_add_up(tmp_path: Path) -> None:
    expected = tokens_of(tiny_runner(tmp_path))
    runner, recorder = tiny_runner(tmp_path), Recorder()
    recorder.active, recorder.alternate = True, 1
    runner.observe(recorder)
    assert tokens_of(runner) == expected
    steps = recorder.take().steps()
    assert [step.watched for step in steps] == [i % 2 == 1 for i in range(len(steps))]
    watched = [step for step in steps if step.watched]
    for step in watched:
        assert sum(part.ns for part in step.parts.values()) == step.wall_ns
    computing = [step for step in watched if step.plan.rows.samples.any() and not step.is_last]
    assert len(computing) > 3
    in_order = [INPUTS, ATTENTION_PLAN, MODEL, ATTENTION, LOGITS, SAMPLING, RESULTS, HAND_OVER]
    assert all(list(step.parts) == in_order for step in computing)
    assert all(step.parts[ATTENTION].calls == 2 for step in computing)  # one a layer
    assert all(step.parts[ATTENTION].ns > 0 and step.parts[MODEL].ns > 0 for step in computing)

    runner.observe(None)
    tokens_of(runner)
    assert recorder.take().steps() == []


def test_a_program_is_wired_anew_when_the_model_was_compiled_again() -> None:
    log: list[str] = []

    def compiled(name: str) -> CompiledModel:
        def rewire(wrap_piece: WrapPiece, wrap_call: WrapCall, wrap_fused: object) -> object:
            log.append(name)
            piece = wrap_piece(lambda arguments: [arguments[1] + 1])
            return lambda x, _: piece([x.size(0), x])[0]

        return CompiledModel(run=torch.nn.Identity(), report=CompileReport(0, 0, 0, 0, 0.0), rewire=rewire)

    class Model:
        def set_attention(self, attend: object) -> None:
            log.append("eager")

        def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return input_ids

        def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    recorder, x = Recorder(), torch.zeros(3)
    observed = ObservedProgram(recorder, Model(), lambda q, k, v, out, layer: None)
    assert torch.equal(observed.program(None)(x, x), x)
    first, second = compiled("first"), compiled("second")
    for model in (first, first, second):
        assert torch.equal(observed.program(model)(x, x), x + 1)
    assert log == ["eager", "eager", "first", "second"]


@pytest.mark.slow
def test_compiled_pieces_are_told_apart(tmp_path: Path) -> None:
    runner, recorder = tiny_runner(tmp_path, "pieces"), Recorder()
    runner.warm_up()
    job = runner.compile_job()
    assert job is not None
    job(threading.Event())()
    first_calls: dict[str, list[object]] = {}
    recorder.on_first_call = lambda part, arguments: first_calls.update({part: list(arguments)})
    recorder.active = True
    runner.observe(recorder)
    tokens_of(runner)
    steps: list[StepTimes] = [step for step in recorder.take().steps() if len(step.plan.rows) and not step.is_last]
    for step in steps:
        assert [step.parts[part].calls for part in first_calls] == [1, 1, 1]
        assert step.parts[ATTENTION].calls == 2
    assert steps and len(first_calls) == 3  # before the first attention, between, and after the second
