"""Pieces that fail on a device do not end the start: the model itself serves, with the graphs that it can have."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graphs import FakeCapturer
from plan_driver import PlanDriver
from test_runner_equals_dense import dense_greedy, sequences
from test_runner_graphs import ROUTES, graph_runner, watch_routes

import compilation.model
from compilation.errors import CompileError
from compilation.interface import CompiledModel
from compilation.split import Piece
from engine.runner import model_runner as room


@pytest.fixture(autouse=True)
def pieces_as_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Inductor makes of them is not the subject."""

    def as_traced(piece: Piece, options: object, artifact: Path, *bounds: object) -> Callable[[list[Any]], Any]:
        artifact.write_text("no code")
        return lambda arguments: piece.module(*arguments)

    monkeypatch.setattr(compilation.model, "compile_piece", as_traced)
    monkeypatch.setattr(compilation.model, "load_piece", lambda *artifact: None)
    monkeypatch.setattr(compilation.model, "without_wrappers", lambda piece, function, sample: function)


@pytest.mark.parametrize("fails", ["to compile", "to run", "to be captured"])
def test_pieces_that_fail_cost_speed_and_neither_the_start_nor_a_token(
    tmp_path: Path, fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_model, capturer = room.compile_model, FakeCapturer()

    def fail(*_: object) -> torch.Tensor:
        capturer.before_capture = lambda: None  # only pieces fail
        raise RuntimeError("Triton: no such instruction")

    def compiled(*arguments: object) -> CompiledModel:
        if fails == "to compile":
            raise CompileError("Inductor cannot compile a piece")
        made = compile_model(*arguments)  # type: ignore[arg-type]
        if fails == "to be captured":
            capturer.before_capture = fail  # type: ignore[assignment]
            return made
        return dataclasses.replace(made, run=fail)

    monkeypatch.setattr(room, "compile_model", compiled)
    runner = graph_runner(tmp_path, "pieces", "both", capturer=capturer)
    if fails == "to run":  # the model itself would have other bits
        runner._is_invariant = True
        with pytest.raises(RuntimeError, match="no such instruction"):
            runner.warm_up()
        runner._is_invariant = False
    with caplog.at_level(logging.WARNING):
        report = runner.warm_up()
    assert report.compile_failed and report.distinct_pieces == 0 and report.graphs_captured > 0
    assert [r.getMessage() for r in caplog.records if "compile='none', graphs='full_decode'" in r.getMessage()]
    routes: Counter[str] = Counter()
    watch_routes(runner, routes)
    rng = random.Random(5)
    work = sequences(rng, 4)
    PlanDriver(runner, rng, 0.0, lag=True).run(work)
    assert set(routes) == ROUTES["full_decode"]
    for s in work:
        assert s.generated == dense_greedy(s.prompt, s.num_tokens)
