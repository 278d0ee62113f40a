"""Code for a bounded number of tokens is right for all of them, or is not used."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from toy_llama import OP, ToyLlama, batch, compiled, eager

from compilation.bounded import Bounded
from compilation.interface import CompiledModel
from compilation.split import Piece, split
from compilation.trace import trace, value_of

LARGEST = 300


@pytest.fixture(scope="module")
def model() -> ToyLlama:
    return ToyLlama(layers=2)


@pytest.fixture(scope="module")
def program(model: ToyLlama, cache_dir: Path) -> CompiledModel:
    return compiled(model, cache_dir, debug_asserts=True, largest_size=LARGEST)


def middle_piece(model: ToyLlama) -> Piece:
    steps = split(trace(model, batch(8)), frozenset({OP}))
    return [step for step in steps if isinstance(step, Piece)][1]


def test_every_size_in_the_range_gives_what_eager_gives(model: ToyLlama, program: CompiledModel) -> None:
    for tokens in (1, 2, 3, 8, 17, 64, LARGEST):
        torch.testing.assert_close(program.run(*batch(tokens)), eager(model, tokens), rtol=1e-5, atol=1e-5)


def test_bounds_are_artifacts_of_their_own_and_near_ones_share_them(
    model: ToyLlama, program: CompiledModel, cache_dir: Path
) -> None:
    near = compiled(model, cache_dir, debug_asserts=True, largest_size=LARGEST + 50)
    assert (near.report.compiled, near.report.loaded) == (0, 3)
    unbounded = compiled(ToyLlama(layers=1), cache_dir, debug_asserts=True)  # two of the three
    assert (unbounded.report.compiled, unbounded.report.loaded) == (2, 0)


def test_only_what_holds_for_every_size_may_be_taken_for_granted(model: ToyLlama) -> None:
    piece = middle_piece(model)

    def after(*decisions: str) -> bool:
        bounded = Bounded(piece.module, LARGEST)
        size = value_of(next(iter(bounded.module.graph.nodes)))
        assert isinstance(size, torch.SymInt) and all(eval(decision, {"n": size}) for decision in decisions)
        return bounded.holds()

    assert after()
    assert after("n * 1024 <= 2**31 - 1", "n + 1 > 0")
    assert not after("n * 1024 <= 2**31 - 1", "n > 256"), "300 tokens are, 8 are not"
    assert not after("n % 2 == 1")
    assert not after("n != 64")
    assert not after("n == n.node.hint")


def test_a_piece_that_took_too_much_for_granted_is_compiled_without_a_bound(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = ToyLlama(layers=1, eps=1e-4)
    monkeypatch.setattr(Bounded, "holds", lambda self: False)
    with caplog.at_level(logging.WARNING):
        program = compiled(other, cache_dir, largest_size=LARGEST)
    assert "would not serve all up to 8192" in caplog.text
    for tokens in (1, 5):
        torch.testing.assert_close(program.run(*batch(tokens)), eager(other, tokens), rtol=1e-5, atol=1e-5)


def test_the_bounded_copy_leaves_the_piece_as_it_was(model: ToyLlama) -> None:
    piece = middle_piece(model)
    before = [value_of(node) for node in piece.module.graph.nodes]
    bounded = Bounded(piece.module, LARGEST)
    assert all(a is b for a, b in zip(before, map(value_of, piece.module.graph.nodes), strict=True))
    assert str(bounded.module.graph) == str(piece.module.graph)
    for node, value in zip(bounded.module.graph.nodes, before, strict=True):
        if isinstance(value, torch.Tensor):
            copied = value_of(node)
            assert isinstance(copied, torch.Tensor)
            assert (copied.dtype, copied.device, copied.dim()) == (value.dtype, value.device, value.dim())
