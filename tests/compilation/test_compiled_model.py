"""A compiled model is the module: same values for every n, weights not baked in, attention in order, compiled once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from toy_llama import OP, ToyLlama, batch, causal, compiled, eager

from compilation.counter import CompileCounter
from compilation.errors import CompileError
from compilation.interface import CompiledModel, CompileSettings
from compilation.model import compile_model

SIZES = [1, 2, 5, 64, 200]


@pytest.fixture(scope="module")
def model() -> ToyLlama:
    return ToyLlama(layers=4)


@pytest.fixture(scope="module")
def program(model: ToyLlama, cache_dir: Path) -> CompiledModel:
    return compiled(model, cache_dir)


def test_float32_output_equals_eager_for_every_number_of_tokens(model: ToyLlama, program: CompiledModel) -> None:
    for tokens in SIZES:
        torch.testing.assert_close(program.run(*batch(tokens)), eager(model, tokens), rtol=1e-5, atol=1e-5)


def test_bfloat16_output_is_as_near_to_float64_as_eager_is(cache_dir: Path) -> None:
    narrow = ToyLlama(layers=2).to(torch.bfloat16)
    exact = ToyLlama(layers=2).double()
    exact.load_state_dict({name: value.double() for name, value in narrow.state_dict().items()})
    program = compiled(narrow, cache_dir)
    for tokens in SIZES:
        truth = eager(exact, tokens)
        error = (program.run(*batch(tokens)).double() - truth).abs().mean()
        eager_error = (eager(narrow, tokens).double() - truth).abs().mean()
        assert error <= 1.5 * eager_error + 1e-6


def test_layers_share_pieces(program: CompiledModel) -> None:
    assert program.report.num_pieces == 5
    assert program.report.distinct_pieces == 3


def test_models_with_other_weights_and_depth_share_artifacts_and_differ_in_results(
    program: CompiledModel, cache_dir: Path
) -> None:
    other = ToyLlama(layers=2, seed=7)
    shared = compiled(other, cache_dir)
    assert (shared.report.compiled, shared.report.loaded) == (0, 3)
    result = shared.run(*batch(5))
    torch.testing.assert_close(result, eager(other, 5), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(result, program.run(*batch(5)), atol=1e-2)


def test_a_write_into_a_weight_is_seen(cache_dir: Path) -> None:
    changing = ToyLlama(layers=2)
    program = compiled(changing, cache_dir)
    before = program.run(*batch(5))
    with torch.no_grad():
        changing.layers[1].down.weight.mul_(3)
    torch.testing.assert_close(program.run(*batch(5)), eager(changing, 5), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(program.run(*batch(5)), before, atol=1e-2)


def test_the_bound_function_gets_each_layers_index_in_order_and_tensors_of_the_right_shape(cache_dir: Path) -> None:
    calls: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def recording(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        assert q.shape == out.shape and k.shape == v.shape and v.stride(-1) == 1
        calls.append((layer, tuple(q.shape), tuple(k.shape)))
        causal(q, k, v, out, layer)

    compiled(ToyLlama(layers=4), cache_dir, recording).run(*batch(3))
    assert calls == [(layer, (3, 4, 8), (3, 2, 8)) for layer in range(4)]


def test_nothing_compiles_after_compile_model_whatever_the_size(model: ToyLlama, program: CompiledModel) -> None:
    counter = CompileCounter()
    for tokens in [1, 3, 17, 33, 129, 500]:
        program.run(*batch(tokens))
    assert counter.since_mark() == 0


def test_the_counter_sees_a_compilation() -> None:
    counter = CompileCounter()

    @torch.compile(backend="eager")
    def double(x: Tensor) -> Tensor:
        return x * 2

    double(torch.ones(3))
    assert counter.since_mark() > 0
    counter.mark()
    double(torch.ones(3))
    assert counter.since_mark() == 0


def test_the_example_size_does_not_change_the_code(cache_dir: Path, program: CompiledModel) -> None:
    alone = compiled(ToyLlama(layers=4), cache_dir, tokens=1)
    assert alone.report.compiled == 0
    torch.testing.assert_close(alone.run(*batch(64)), program.run(*batch(64)))


def test_results_need_no_gradient_and_the_callers_grad_mode_is_kept(program: CompiledModel) -> None:
    assert torch.is_grad_enabled()
    assert not program.run(*batch(2)).requires_grad
    assert torch.is_grad_enabled()


def test_it_compiles_and_runs_under_inference_mode_with_weights_made_there(cache_dir: Path) -> None:
    with torch.inference_mode():
        frozen = ToyLlama(layers=2)
        program = compiled(frozen, cache_dir)
        torch.testing.assert_close(program.run(*batch(5)), eager(frozen, 5), rtol=1e-5, atol=1e-5)
    assert program.report.compiled == 0


def test_inputs_of_different_length_are_refused(program: CompiledModel) -> None:
    with pytest.raises(ValueError, match="share the size"):
        program.run(batch(4)[0], batch(5)[1])


def test_mode_none_runs_the_module_itself(model: ToyLlama, cache_dir: Path) -> None:
    settings = CompileSettings("none", cache_dir)
    program = compile_model(model, batch(2), frozenset({OP}), {OP: causal}, settings)
    assert program.run is model
    assert (program.report.num_pieces, program.report.distinct_pieces) == (0, 0)


class Bends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.shape[0] == 8 else x - 1


class Flattens(nn.Module):
    """Writes through a view, reads through the base: two names of one buffer across the border."""

    def forward(self, x: Tensor) -> Tensor:
        base = torch.empty_like(x)
        view = base.view(x.shape[0], 2, 4)
        heads = x.view(x.shape[0], 2, 4)
        torch.ops.toy.attention(heads, heads, heads, view, 0)
        return base + 1


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2


def refused(module: nn.Module, cache_dir: Path, ops: frozenset[str]) -> str:
    with pytest.raises(CompileError) as caught:
        compile_model(
            module, (torch.randn(8, 8),), ops, dict.fromkeys(ops, causal), CompileSettings("pieces", cache_dir)
        )
    return str(caught.value)


def test_what_cannot_be_one_graph_for_every_size_is_refused_with_the_reason(cache_dir: Path) -> None:
    assert "Bends" in refused(Bends(), cache_dir, frozenset())
    assert "exactly one tensor" in refused(Pair(), cache_dir, frozenset())
    assert "never calls" in refused(nn.Linear(8, 8), cache_dir, frozenset({OP}))
    assert "views used elsewhere" in refused(Flattens(), cache_dir, frozenset({OP}))
    with pytest.raises(CompileError, match="same names"):
        settings = CompileSettings("pieces", cache_dir)
        compile_model(nn.Linear(8, 8), (torch.randn(8, 8),), frozenset({OP}), {}, settings)


class InPlace(nn.Module):
    """A piece that writes its own input: the residual stream updated in place after attention."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        heads = x.view(x.shape[0], 2, 4)
        out = torch.empty_like(heads)
        torch.ops.toy.attention(heads, heads, heads, out, 0)
        x.add_(out.view(x.shape[0], 8))
        return x * 3


def test_a_piece_that_writes_its_input_keeps_torchs_wrappers_and_is_right(cache_dir: Path) -> None:
    def negate(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        out.copy_(-3 * q)

    settings = CompileSettings("pieces", cache_dir)
    x = torch.randn(6, 8)
    program = compile_model(InPlace(), (x,), frozenset({OP}), {OP: negate}, settings)
    torch.testing.assert_close(program.run(x), x * -12)
