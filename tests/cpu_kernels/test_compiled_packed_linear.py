"""Packed layers inside compiled pieces: one artifact for equal layers, any number of tokens, weights as inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from compilation.interface import CompileSettings
from compilation.model import compile_model
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps, interleave_gate_up, pack_bf16

BF16 = int(Format.BFLOAT16)
HIDDEN, INNER, WORDS = 64, 96, 50


@pytest.fixture(scope="session")
def ops(linear_ops: LinearOps) -> LinearOps:
    return linear_ops


@torch.library.custom_op("packed_linear_test::mark", mutates_args=("out",))
def mark(x: Tensor, out: Tensor) -> None:
    out.copy_(x)


@mark.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


class Layer(nn.Module):
    def __init__(self, ops: LinearOps, seed: int) -> None:
        super().__init__()
        self.ops = ops
        generator = torch.Generator().manual_seed(seed)

        def weight(n: int, k: int) -> Tensor:
            return (torch.randn(n, k, generator=generator) * k**-0.5).bfloat16()

        self.register_buffer("norm", torch.ones(HIDDEN, dtype=torch.bfloat16))
        self.register_buffer("gate_up", pack_bf16(interleave_gate_up(weight(2 * INNER, HIDDEN))))
        self.register_buffer("down", pack_bf16(weight(HIDDEN, INNER)))

    def forward(self, x: Tensor) -> Tensor:
        linear = self.ops.packed_linear
        inner = linear(x, self.gate_up, 2 * INNER, BF16, None, self.norm, 1e-5, None, True, False, 0)
        down: Tensor = linear(inner, self.down, HIDDEN, BF16, None, None, 0.0, x, False, False, 0)
        return down


class Model(nn.Module):
    def __init__(self, ops: LinearOps) -> None:
        super().__init__()
        self.ops = ops
        self.register_buffer("table", pack_bf16(torch.randn(WORDS, HIDDEN)))
        self.layers = nn.ModuleList(Layer(ops, seed) for seed in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.ops.packed_embedding(ids, self.table, WORDS, HIDDEN, BF16)
        for layer in self.layers:
            out = torch.empty_like(hidden)
            torch.ops.packed_linear_test.mark(hidden, out)
            hidden = layer(out)
        return self.ops.packed_linear(hidden, self.table, WORDS, BF16, None, None, 0.0, None, False, True, 0)


@pytest.mark.timeout(300)
def test_compiled_pieces_equal_eager_for_any_number_of_tokens_and_are_shared(ops: LinearOps, tmp_path: Path) -> None:
    model = Model(ops)
    name = "packed_linear_test::mark"
    program = compile_model(
        model,
        (torch.arange(4),),
        frozenset({name}),
        {name: torch.ops.packed_linear_test.mark.default},
        CompileSettings("pieces", tmp_path),
    )
    assert program.report.num_pieces == 4
    assert program.report.distinct_pieces == 3  # the embedding, a layer, the last layer with the unembedding
    for tokens in (1, 2, 7, 64):
        ids = torch.arange(tokens) % WORDS
        assert torch.equal(program.run(ids), model(ids))


def test_fakes_tell_shapes_and_dtypes_of_the_kernels(ops: LinearOps) -> None:
    packed, x = pack_bf16(torch.randn(64, 32)), torch.randn(5, 32).bfloat16()
    flags = torch.library.opcheck
    for gated in (False, True):
        for wide in (False, True):
            arguments = (x, packed, 64, BF16, None, None, 0.0, None, int(gated), wide, 0)
            flags(ops.packed_linear, arguments, test_utils=("test_schema", "test_faketensor"))
    ids = torch.arange(5)
    flags(ops.packed_embedding, (ids, packed, 64, 32, BF16), test_utils=("test_schema", "test_faketensor"))
