"""Replays equal eager steps, whatever ran before, although graphs share all memory and padded rows hold NaN."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_device import FakeCapturer
from graph_step import Step, assert_replays_equal_eager
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from toy_llama import OP, ToyLlama, batch, causal, compiled, eager, interpreted

from compilation.errors import CompileError
from compilation.graphs.capture import Capturer
from compilation.graphs.dispatcher import Dispatcher
from compilation.graphs.graph_set import GraphSet
from compilation.graphs.piecewise import capture_pieces
from compilation.graphs.sizes import sizes
from compilation.graphs.weak import weak_alias
from compilation.interface import CompileSettings, PieceFunction, WrapCall, WrapPiece
from compilation.model import compile_model

LAYERS = 3
LARGEST = 24


@pytest.fixture(scope="module")
def model() -> ToyLlama:
    return ToyLlama(layers=LAYERS)


def graphs_of(model: nn.Module, step: Step, capturer: Capturer, cache_dir: Path | None = None) -> GraphSet:
    """Over compiled pieces, or over interpreted ones where no directory is given."""
    attend: Callable[..., None] = step.attend
    program = interpreted(model, attend, *batch(8)) if cache_dir is None else compiled(model, cache_dir, attend)
    return GraphSet(step.inputs, capturer, step.before_capture, program.run, program)


def test_piecewise_replay_of_compiled_pieces_equals_eager(model: ToyLlama, cache_dir: Path) -> None:
    step, capturer = Step(), FakeCapturer(operations=False)
    graphs = graphs_of(model, step, capturer, cache_dir)
    for size in sorted(sizes(LARGEST), reverse=True):
        graphs.capture("piecewise", size)
    assert graphs.captured("piecewise") == sizes(LARGEST) and graphs.captured("full") == ()
    assert step.prepared == [("piecewise", size) for size in (24, 16, 8, 4, 2, 1)]
    assert (capturer.sessions, capturer.warm_ups, capturer.captures) == (6, 6, 6 * (LAYERS + 1))
    assert_replays_equal_eager(graphs, step, model, "piecewise")


@settings(max_examples=settings.default.max_examples // 12)
@given(st.lists(st.sampled_from([1, 2, 3, 5, 8]), min_size=1, max_size=4, unique=True), st.integers(0, 1000))
def test_piecewise_replay_equals_eager_operation_by_operation_in_any_order_of_capture(
    captured: list[int], seed: int
) -> None:
    model, step = ToyLlama(layers=2), Step()
    graphs = graphs_of(model, step, FakeCapturer(operations=True))
    for size in captured:
        graphs.capture("piecewise", size)
    assert_replays_equal_eager(graphs, step, model, "piecewise", seed)


@pytest.mark.parametrize("compiled_pieces", [True, False])
def test_full_replay_equals_eager_with_piecewise_graphs_in_the_same_pool(
    model: ToyLlama, cache_dir: Path, compiled_pieces: bool
) -> None:
    step = Step(8)
    capturer = FakeCapturer(operations=not compiled_pieces)
    if compiled_pieces:
        program = compiled(model, cache_dir, step.attend_on_device)
    else:
        program = interpreted(model, step.attend_on_device, *batch(8))
    graphs = GraphSet(step.inputs, capturer, step.before_capture, program.run, program)
    dispatcher = Dispatcher("both", backend_capture_safe=True, max_num_seqs=5, max_num_tokens=8)
    for route, size in dispatcher.pending():
        graphs.capture(route, size)
        dispatcher.mark(route, size)
    assert (graphs.captured("full"), graphs.captured("piecewise")) == ((1, 2, 4, 5), (1, 2, 4, 8))
    for seed in range(2):
        assert_replays_equal_eager(graphs, step, model, "full", seed)
        assert_replays_equal_eager(graphs, step, model, "piecewise", seed)
    for tokens in range(1, 9):
        chosen = dispatcher.dispatch(tokens, uniform_decode=tokens % 2 == 0)
        step.build(tokens, chosen.size)
        output = graphs.replay(chosen.route, chosen.size)
        torch.testing.assert_close(output[:tokens], eager(model, tokens), rtol=1e-5, atol=1e-5)


def test_capturing_calls_no_attention_and_a_replay_calls_each_layers_once_in_order(model: ToyLlama) -> None:
    step = Step()
    graphs = graphs_of(model, step, FakeCapturer(operations=True))
    graphs.capture("piecewise", 4)
    assert step.layers == []
    step.build(3, 4)
    graphs.replay("piecewise", 4)
    graphs.replay("piecewise", 4)
    assert step.layers == [*range(LAYERS)] * 2


def test_replays_hand_out_the_same_addresses_each_time(model: ToyLlama) -> None:
    step, seen = Step(), []

    def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        seen.append([x.data_ptr() for x in (q, k, v, out)])
        step.attend(q, k, v, out, layer)

    program = interpreted(model, attend, *batch(8))
    graphs = GraphSet(step.inputs, FakeCapturer(operations=True), step.before_capture, program.run, program)
    graphs.capture("piecewise", 8)
    graphs.capture("piecewise", 4)
    outputs = []
    for size in (8, 4, 8):
        step.build(2, size)
        outputs.append(graphs.replay("piecewise", size).data_ptr())
    assert seen[:LAYERS] == seen[2 * LAYERS :]
    assert outputs[0] == outputs[2]


def test_after_a_capture_nothing_of_the_pool_is_owned_and_more_sizes_or_layers_take_no_more_of_it() -> None:
    peaks = {}
    for layers in (2, 6):
        step, capturer = Step(), FakeCapturer(operations=True)
        graphs = graphs_of(ToyLlama(layers=layers), step, capturer)
        for size in sorted(sizes(LARGEST), reverse=True):
            graphs.capture("piecewise", size)
            assert capturer.pool.live == 0
            peaks.setdefault(layers, graphs.memory_bytes())
            assert graphs.memory_bytes() == peaks[layers]
        graphs.capture("full", LARGEST)
        assert capturer.pool.live == 0
    assert peaks[2] == peaks[6] > 0


def test_an_output_lasts_until_another_replay(model: ToyLlama) -> None:
    step = Step()
    graphs = graphs_of(model, step, FakeCapturer(operations=True))
    for size in (8, 4):
        graphs.capture("piecewise", size)
    step.build(4, 4)
    output = graphs.replay("piecewise", 4)
    graphs.capture("piecewise", 2)
    torch.testing.assert_close(output, eager(model, 4), rtol=1e-5, atol=1e-5)
    step.build(8, 8)
    graphs.replay("piecewise", 8)
    assert not torch.equal(output, eager(model, 4))


@pytest.mark.parametrize("operations", [True, False])
def test_the_fake_device_betrays_a_value_that_is_given_away_too_early(
    model: ToyLlama, cache_dir: Path, operations: bool
) -> None:
    """The control of all tests above: pieces whose outputs own nothing, so that the pool reuses them while needed."""
    step, capturer = Step(), FakeCapturer(operations)
    program = interpreted(model, step.attend, *batch(8)) if operations else compiled(model, cache_dir, step.attend)

    def careless(wrap_piece: WrapPiece, wrap_call: WrapCall) -> Callable[..., Tensor]:
        def wrapped(function: PieceFunction) -> PieceFunction:
            captured = wrap_piece(function)

            def call(arguments: list[Any]) -> Sequence[Any]:
                return tuple(weak_alias(output) for output in captured(arguments))

            return call

        return program.rewire(wrapped, wrap_call)

    with capturer.session():
        graph = capture_pieces(careless, [x[:4] for x in step.inputs], capturer)
    step.build(4, 4)
    assert not torch.allclose(graph.replay(), eager(model, 4), atol=1e-2)


class Gate(nn.Module):
    """Reads floats, so that the tail of a static buffer itself can be NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.mix(x).view(x.shape[0], 2, 4)
        out = torch.empty_like(heads)
        torch.ops.toy.attention(heads, heads, heads, out, 0)
        return F.silu(out.view(x.shape[0], 8)) * x


def test_nan_in_the_tail_of_a_static_buffer_reaches_no_real_row() -> None:
    def double(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        out.copy_(2 * q)

    gate, buffer = Gate(), torch.full((8, 8), float("nan"))
    program = interpreted(gate, double, torch.randn(8, 8))
    graphs = GraphSet([buffer], FakeCapturer(operations=True), lambda route, size: None, program.run, program)
    for size in (8, 4):
        graphs.capture("piecewise", size)
    for tokens, size in [(8, 8), (3, 4), (5, 8), (1, 4)]:
        real = torch.randn(tokens, 8)
        buffer.fill_(float("nan"))
        buffer[:tokens] = real
        output = graphs.replay("piecewise", size)
        torch.testing.assert_close(output[:tokens], F.silu(2 * gate.mix(real)) * real)
        assert output[tokens:].isnan().all()


def test_warm_up_runs_each_piece_with_the_stand_in_and_never_with_the_bound_function(model: ToyLlama) -> None:
    calls: list[str] = []
    program = interpreted(model, lambda *_: calls.append("bound"), *batch(8))
    graphs = GraphSet(
        Step().inputs,
        FakeCapturer(operations=True),
        lambda route, size: None,
        program.run,
        program,
        stand_in=lambda *_: calls.append("stand-in"),
    )
    graphs.capture("piecewise", 2)
    assert calls == ["stand-in"] * LAYERS
    graphs.capture("full", 2)
    assert calls == ["stand-in"] * LAYERS + ["bound"] * 2 * LAYERS


def test_what_cannot_be_captured_or_was_not_is_refused(model: ToyLlama, tmp_path: Path) -> None:
    step = Step(8)
    graphs = graphs_of(model, step, FakeCapturer(operations=True))
    graphs.capture("full", 4)
    with pytest.raises(CompileError, match="no piecewise graph of size 4"):
        graphs.replay("piecewise", 4)
    with pytest.raises(CompileError, match="between 1 and the static buffers' 8 rows"):
        graphs.capture("full", 9)
    with pytest.raises(CompileError, match="route eager has no graphs"):
        graphs.capture("eager", 4)
    uncompiled = compile_model(model, batch(2), frozenset({OP}), {OP: causal}, CompileSettings("none", tmp_path))
    with pytest.raises(CompileError, match="at least one static input"):
        GraphSet([], FakeCapturer(operations=True), step.before_capture, model, uncompiled)
    bare = GraphSet(step.inputs, FakeCapturer(operations=True), step.before_capture, model, uncompiled)
    with pytest.raises(CompileError, match="compile it in pieces"):
        bare.capture("piecewise", 4)


class Returning(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.toy.scores(x + 1) * 2


@torch.library.custom_op("toy::scores", mutates_args=())
def scores(x: Tensor) -> Tensor:
    raise RuntimeError("a marker never runs")


@scores.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_split_op_that_returns_its_result_has_no_piecewise_graph(cache_dir: Path) -> None:
    x = torch.randn(4, 8)
    ops = frozenset({"toy::scores"})
    bind = {"toy::scores": lambda x: x * 3}
    program = compile_model(Returning(), (x,), ops, bind, CompileSettings("pieces", cache_dir))
    torch.testing.assert_close(program.run(x), (x + 1) * 6)
    capturer = FakeCapturer(operations=False)
    graphs = GraphSet([x], capturer, lambda route, size: None, program.run, program, stand_in=torch.zeros_like)
    with pytest.raises(CompileError, match="write into an argument"):
        graphs.capture("piecewise", 4)
    assert graphs.captured("piecewise") == ()
    graphs.capture("full", 4)
    torch.testing.assert_close(graphs.replay("full", 4), (x + 1) * 6)


def test_a_piece_is_the_last_owner_of_its_inputs_while_it_is_captured() -> None:
    """Or else the pool could not give a dead input's memory to the piece's own results."""
    alive: list[bool] = []

    def piece(arguments: list[Any]) -> tuple[Tensor]:
        result, last = arguments[1] * 2, weakref.ref(arguments[1])
        arguments.clear()
        alive.append(last() is not None)
        return (result,)

    def rewire(wrap_piece: WrapPiece, wrap_call: WrapCall) -> Callable[..., Tensor]:
        captured = wrap_piece(piece)

        def run(x: Tensor) -> Tensor:
            arguments = [x.shape[0], x + 1]
            (y,) = captured(arguments)
            return y

        return run

    capturer = FakeCapturer(operations=True)
    with capturer.session():
        capture_pieces(rewire, [torch.ones(4)], capturer)
    assert alive == [False]
    assert capturer.pool.live == 0


@pytest.mark.parametrize("inference", [True, False])
def test_a_weak_alias_is_the_same_memory_and_keeps_nothing_alive(inference: bool) -> None:
    pool = FakeCapturer(operations=True).pool
    with torch.inference_mode(inference):
        owner = pool.allocate(96).view(torch.bfloat16).view(6, 8)
        part = owner[1:, ::2]
        alias = weak_alias(part)
        assert (alias.data_ptr(), alias.shape, alias.stride()) == (part.data_ptr(), part.shape, part.stride())
        alias.fill_(3)
        assert torch.equal(part, torch.full_like(part, 3))
    assert pool.live == 128
    del owner, part
    assert pool.live == 0
    alias.fill_(4)  # writable outside of inference mode too; the arena itself still stands
    assert weak_alias(torch.empty(0, 3)).shape == (0, 3)


def test_rewiring_wraps_every_function_once_in_order_and_leaves_run_alone(model: ToyLlama, cache_dir: Path) -> None:
    program = compiled(model, cache_dir)
    wrapped: list[str] = []
    seen: list[str] = []

    def noting(kind: str) -> Callable[[Any], Any]:
        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            wrapped.append(kind)

            def call(*args: Any) -> Any:
                seen.append(kind)
                return function(*args)

            return call

        return wrap

    noted = program.rewire(noting("piece"), noting("call"))
    assert sorted(wrapped) == ["call"] + ["piece"] * program.report.distinct_pieces
    torch.testing.assert_close(noted(*batch(5)), program.run(*batch(5)), rtol=0.0, atol=0.0)
    assert seen == ["piece", "call"] * LAYERS + ["piece"]
