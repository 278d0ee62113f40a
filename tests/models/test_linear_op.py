"""`pageloom::linear`: traced as one opaque call inside a piece, the same in every layer, and nowhere unless chosen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dense_attention import DenseAttention
from torch.nn import functional as F

import attention_backends.op  # noqa: F401 - registers pageloom::attention
from compilation.interface import CompileSettings
from compilation.model import compile_model
from compilation.split import Piece, split
from compilation.structure import describe
from compilation.trace import trace
from engine.models import linear_op
from engine.models.decoder import Decoder
from engine.models.kernels import BUCKETS, MAX_ROWS, TILES, LinearKernels, Plan, encode
from engine.models.layers import Linear
from engine.models.mixers import MixerSpec
from engine.models.spec import DecoderSpec, LayerSpec, MlpSpec, RopeSpec

ATTENTION = "pageloom::attention"
MIXER = MixerSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, qkv_bias=True, rope=0)
SPEC = DecoderSpec(
    family="test",
    vocab_size=96,
    hidden_size=32,
    layers=(LayerSpec(mixer=MIXER, mlp=MlpSpec(intermediate_size=48)),) * 5,
    ropes=(RopeSpec(rotary_dim=8),),
    norm_eps=1e-5,
    max_position=64,
)
MATVEC = Plan(TILES[0])
MATMUL = Plan(next(tile for tile in TILES if tile.kind == "matmul"), 2)
CHOICE = encode({1: MATVEC, 8: MATMUL})


def model_with(choice: int) -> Decoder:
    model = Decoder(SPEC, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.3, generator=generator)
    for module in model.modules():
        if isinstance(module, Linear):
            module.choice = choice
    return model


def pieces_of(model: Decoder) -> list[str]:
    model.set_attention(torch.ops.pageloom.attention)
    example = torch.arange(8)
    steps = split(trace(model, (example, example.clone())), frozenset({ATTENTION}))
    return [describe(step.module.graph) for step in steps if isinstance(step, Piece)]


def test_the_operator_says_the_truth_about_itself() -> None:
    """Schema, aliasing, and the shapes that tracing works with."""
    x, weight, bias = torch.randn(3, 16), torch.randn(24, 16), torch.randn(24)
    for arguments in ((x, weight, bias, CHOICE), (x.T.contiguous().T, weight, None, CHOICE)):
        torch.library.opcheck(
            torch.ops.pageloom.linear.default, arguments, test_utils=("test_schema", "test_faketensor")
        )


def test_a_model_without_a_choice_is_traced_as_before() -> None:
    pieces = pieces_of(model_with(0))
    assert not any("pageloom::linear" in piece for piece in pieces)
    assert sum(piece.count("torch._C._nn.linear") for piece in pieces) == 4 * SPEC.num_layers


def test_a_choice_leaves_as_many_distinct_pieces_each_with_its_linears_inside() -> None:
    plain, chosen = pieces_of(model_with(0)), pieces_of(model_with(CHOICE))
    assert len(chosen) == len(plain) == SPEC.num_layers + 1
    assert len(set(chosen)) == len(set(plain)) == 3
    assert [piece.count("pageloom::linear(") for piece in chosen] == [1, 4, 4, 4, 4, 3]
    assert all(f"int:{CHOICE}" in piece for piece in chosen)


@pytest.mark.timeout(300)
def test_compiled_pieces_call_the_operator_and_equal_plain_linears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int, int]] = []

    def spy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        assert x.is_contiguous() and weight.data_ptr() in own  # no copies made for the call
        calls.append((x.shape[0], *weight.shape))
        return F.linear(x, weight, bias)

    model = model_with(CHOICE)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    attention = DenseAttention(SPEC)
    model.set_attention(torch.ops.pageloom.attention)
    example = torch.arange(8)
    with torch.inference_mode():
        compiled = compile_model(
            model,
            (example, example.clone()),
            frozenset({ATTENTION}),
            {ATTENTION: attention},
            CompileSettings(mode="pieces", cache_dir=tmp_path),
        )
        assert compiled.report.distinct_pieces == 3
        monkeypatch.setattr(linear_op, "_library_linear", spy)
        for rows in (1, 3, 16, 40):
            calls.clear()
            ids, positions = torch.arange(rows), torch.arange(rows)
            attention.__init__(SPEC)
            found = compiled.run(ids, positions)
            assert calls == SPEC.num_layers * [(rows, 64, 32), (rows, 32, 32), (rows, 96, 32), (rows, 32, 48)]
            plain = model_with(0)
            plain.set_attention(DenseAttention(SPEC))
            torch.testing.assert_close(found, plain(ids, positions), rtol=1e-4, atol=1e-4)


class FakeKernels:
    failures: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        self.plans.append(plan)
        return F.linear(x, weight, bias)


def test_on_cuda_few_rows_take_their_buckets_kernel_and_all_others_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: LinearKernels = FakeKernels()
    monkeypatch.setattr(linear_op, "device_kernels", lambda: kernels)
    weight = torch.randn(24, 16)
    for rows in (0, *range(1, MAX_ROWS + 4)):
        kernels.plans.clear()
        x = torch.randn(rows, 16)
        y = linear_op.on_cuda(x, weight, None, CHOICE)
        bucket = min((b for b in BUCKETS if b >= rows), default=None) if rows else None
        assert kernels.plans == {1: [MATVEC], 8: [MATMUL]}.get(bucket, [])
        torch.testing.assert_close(y, F.linear(x, weight))
