"""Equal structure is equal code: names, layers and weights do not count; types, operators and constants do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from toy_llama import OP, ToyLlama, batch

from compilation.split import Call, Piece, split
from compilation.structure import describe, structural_hash
from compilation.trace import trace


def hashes(model: nn.Module, inputs: tuple[Tensor, ...], ops: frozenset[str] = frozenset({OP})) -> list[str]:
    steps = split(trace(model, inputs), ops)
    return [structural_hash(step.module.graph) for step in steps if isinstance(step, Piece)]


class Pointwise(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def pointwise(function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32, width: int = 4) -> str:
    (only,) = hashes(Pointwise(function), (torch.ones(3, width, dtype=dtype),), frozenset())
    return only


def test_thirty_layers_have_three_distinct_pieces() -> None:
    found = hashes(ToyLlama(layers=30, hidden=16, heads=2), batch(4))
    assert len(found) == 31
    assert len(set(found)) == 3
    assert len(set(found[1:-1])) == 1


def test_structure_does_not_depend_on_what_was_traced_before_nor_on_weights() -> None:
    first = hashes(ToyLlama(layers=2), batch(4))
    hashes(ToyLlama(layers=1, hidden=16, heads=2), batch(9))
    assert hashes(ToyLlama(layers=2, seed=5), batch(1)) == first


def test_structure_changes_with_dtype_operator_constant_and_shape() -> None:
    def add_one(x: Tensor) -> Tensor:
        return x + 1.0

    seen = {
        pointwise(add_one),
        pointwise(add_one, torch.bfloat16),
        pointwise(add_one, width=5),
        pointwise(lambda x: x - 1.0),
        pointwise(lambda x: x + 2.0),
        pointwise(lambda x: x + 1),
        pointwise(lambda x: x.sum(0, keepdim=True)),
        pointwise(lambda x: x.sum(1, keepdim=True)),
    }
    assert len(seen) == 8
    assert pointwise(lambda x: x + 1.0) == pointwise(add_one)


def test_constant_of_a_layer_changes_its_piece() -> None:
    assert hashes(ToyLlama(layers=2, eps=1e-5), batch(4)) != hashes(ToyLlama(layers=2, eps=1e-6), batch(4))


def test_description_holds_no_address_and_no_name_of_the_model() -> None:
    (piece, *_) = [s for s in split(trace(ToyLlama(layers=1), batch(4)), frozenset({OP})) if isinstance(s, Piece)]
    text = describe(piece.module.graph)
    assert "0x" not in text
    assert "layers" not in text and "weight" not in text


def test_split_ops_stand_alone_with_their_layer_index() -> None:
    steps = split(trace(ToyLlama(layers=3), batch(4)), frozenset({OP}))
    assert [type(step) for step in steps] == [Piece, Call, Piece, Call, Piece, Call, Piece]
    assert [step.args[4] for step in steps if isinstance(step, Call)] == [0, 1, 2]
