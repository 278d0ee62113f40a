"""What a tape must not do to graphs that no decoder of ours has yet: overwrite what is read later, or leave out an
operator that writes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from native_stages import PretendAttention
from tape_builder import STEP, rows_at
from torch import Tensor, nn

from attention_backends.interface import NativeLayer
from attention_backends.op import ATTENTION_OP
from attention_backends.toolchain import default_cache_dir
from compilation.split import Call, Fused, Piece, Step, split
from compilation.trace import Traced, trace
from engine.cpu_kernels.linear import LinearOps, load, pack_bf16
from engine.cpu_kernels.tape import fuse_native_steps

WIDTH = 32


@torch.library.custom_op("pageloom_tests::twice", mutates_args=("x",))
def twice(x: Tensor) -> None:
    x.mul_(2)


@twice.register_fake
def _(x: Tensor) -> None:
    return None


@pytest.fixture(scope="module")
def ops() -> LinearOps:
    return load(default_cache_dir())


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


class Layered(nn.Module):
    weight: Tensor

    def __init__(self, ops: LinearOps) -> None:
        super().__init__()
        self.ops = ops
        self.register_buffer("weight", pack_bf16(rand(WIDTH, WIDTH) / 6))

    def linear(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y: Tensor = self.ops.packed_linear(x, self.weight, WIDTH, 0, None, None, 0.0, residual, False, False, 0)
        return y

    def attend(self, x: Tensor, layer: int) -> Tensor:
        heads = x.unflatten(-1, (1, WIDTH))
        out = torch.empty_like(heads)
        torch.ops.pageloom.attention(heads, heads, heads, out, layer)
        return out.flatten(1)


class RotatedWhileNeeded(Layered):
    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        x = x + 1
        y = self.linear(self.attend(x, 0))
        attended = self.attend(y, 1)
        rotated = self.ops.rotate_heads(y, x, None, None, 0.0, 1, 0, WIDTH, None)
        return self.linear(self.attend(self.linear(rotated, attended), 2), y) + 1


class WrittenBetween(Layered):
    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        y = self.linear(self.attend(x + 1, 0))
        torch.ops.pageloom_tests.twice(y)
        return self.linear(self.attend(self.linear(self.attend(y, 1), y), 2)) + 1


def run(traced: Traced, steps: Sequence[Step], x: Tensor) -> Tensor:
    known = dict(traced.weights)
    inputs = (torch.arange(len(x)), x)
    known.update({node: value for node, value in zip(traced.inputs, inputs, strict=True) if node is not None})
    for step in steps:
        if isinstance(step, Call):
            q, _, _, out, _ = (known.get(argument, argument) for argument in step.args)  # type: ignore[call-overload]
            out.copy_(q * 0.5)
            continue
        arguments = [len(x), *(known[node] for node in step.inputs)]
        made = step.module(*arguments) if isinstance(step, Piece) else step.function(arguments)
        known.update(zip(step.outputs, made, strict=True))
    return known[traced.output]


@pytest.mark.parametrize("model", [RotatedWhileNeeded, WrittenBetween])
def test_fused_steps_compute_what_the_steps_do(ops: LinearOps, model: type[Layered]) -> None:
    torch.manual_seed(0)

    def attend(layer: object, step: object, rows: object) -> None:
        out = rows_at(rows.out, rows.out_stride, rows.rows, WIDTH)  # type: ignore[attr-defined]
        out.copy_(rows_at(rows.q, rows.q_stride, rows.rows, WIDTH) * 0.5)  # type: ignore[attr-defined]

    attention, descriptor = PretendAttention(attend), torch.zeros(1, dtype=torch.uint8)
    with torch.inference_mode():
        traced = trace(model(ops), (torch.arange(4), rand(4, WIDTH)))
        steps = split(traced, frozenset({ATTENTION_OP}))
        fuse = fuse_native_steps(lambda layer: NativeLayer(attention.address, descriptor), lambda: [STEP])
        fused = fuse(traced, steps)
        assert any(isinstance(step, Fused) for step in fused)
        x = rand(3, WIDTH)
        assert torch.equal(run(traced, fused, x), run(traced, steps, x))
