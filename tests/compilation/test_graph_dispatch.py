"""Every step finds the smallest graph that holds it, tails are harmless, and only what was captured is replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compilation.errors import CompileError
from compilation.graphs.dispatcher import Dispatch, Dispatcher, GraphMode
from compilation.graphs.runner import GraphRunner
from compilation.graphs.sizes import SizeTable, sizes


def test_sizes_are_one_two_four_then_eights() -> None:
    assert sizes()[:7] == (1, 2, 4, 8, 16, 24, 32)
    assert sizes()[-1] == 512
    assert len(sizes()) == 3 + 64
    assert sizes(20) == (1, 2, 4, 8, 16, 20)
    assert sizes(3) == (1, 2, 3)
    with pytest.raises(CompileError, match="at least 1"):
        sizes(0)


@given(st.sets(st.integers(1, 70), max_size=12), st.integers(0, 80))
def test_the_table_gives_the_smallest_size_that_is_large_enough(captured: set[int], tokens: int) -> None:
    fitting = [size for size in captured if size >= tokens]
    expected = min(fitting) if fitting and tokens else None
    assert SizeTable(tuple(captured)).padded(tokens) == expected


def dispatcher(mode: GraphMode, capture_safe: bool = True) -> Dispatcher:
    return Dispatcher(mode, backend_capture_safe=capture_safe, max_num_seqs=20, max_num_tokens=2048)


@pytest.mark.parametrize(
    ("mode", "tokens", "uniform", "expected"),
    [
        ("none", 3, True, Dispatch("eager", 3)),
        ("piecewise", 3, True, Dispatch("piecewise", 4)),
        ("piecewise", 100, False, Dispatch("piecewise", 104)),
        ("piecewise", 513, False, Dispatch("eager", 513)),
        ("full_decode", 3, True, Dispatch("full", 4)),
        ("full_decode", 17, True, Dispatch("full", 20)),
        ("full_decode", 3, False, Dispatch("eager", 3)),
        ("both", 20, True, Dispatch("full", 20)),
        ("both", 3, False, Dispatch("piecewise", 4)),
        ("both", 21, True, Dispatch("piecewise", 24)),
    ],
)
def test_mode_and_phase_choose_the_route(mode: GraphMode, tokens: int, uniform: bool, expected: Dispatch) -> None:
    assert dispatcher(mode).dispatch(tokens, uniform) == expected


@pytest.mark.parametrize("mode", ["full_decode", "both"])
def test_a_full_graph_needs_a_capture_safe_backend(mode: GraphMode) -> None:
    with pytest.raises(CompileError, match="capture-safe"):
        dispatcher(mode, capture_safe=False)
    assert dispatcher("piecewise", capture_safe=False).piecewise_sizes == sizes()


class RecordingGraph:
    def __init__(self, function: Callable[[], Tensor], output: Tensor) -> None:
        self.function, self.output, self.replays = function, output, 0

    def replay(self) -> None:
        self.replays += 1
        self.output.copy_(self.function())


class RecordingCapturer:
    """Replays by calling the function again into the output of the capture: fixed addresses, like a device's graph."""

    def __init__(self) -> None:
        self.graphs: list[RecordingGraph] = []

    def capture(self, function: Callable[[], Tensor]) -> tuple[RecordingGraph, Tensor]:
        output = function().clone()
        self.graphs.append(RecordingGraph(function, output))
        return self.graphs[-1], output


def lookup(ids: Tensor, slots: Tensor) -> Tensor:
    """Fails on a row that does not exist, as an embedding would; the sum betrays stale tails."""
    assert int(ids.max()) < 10 and int(slots[slots >= 0].numel()) <= 8
    return torch.stack([ids * 2, slots], 1)


def runner(capturer: RecordingCapturer) -> GraphRunner:
    buffers = [torch.full((8,), 999, dtype=torch.int64), torch.full((8,), 999, dtype=torch.int64)]
    return GraphRunner(lookup, buffers, [0, -1], capturer)


def test_replay_equals_eager_and_the_tail_holds_padding_whatever_ran_before() -> None:
    capturer = RecordingCapturer()
    graphs = runner(capturer)
    graphs.capture("piecewise", [2, 8, 4])
    assert graphs.captured("piecewise") == (2, 4, 8)
    assert [graph.output.shape[0] for graph in capturer.graphs] == [8, 4, 2]
    for tokens, size in [(8, 8), (3, 4), (1, 2), (5, 8), (2, 2)]:
        ids, slots = torch.arange(tokens) + 1, torch.arange(tokens) + 50
        result = graphs(Dispatch("piecewise", size), ids, slots)
        assert torch.equal(result, lookup(ids, slots))
        graph = next(graph for graph in capturer.graphs if graph.output.shape[0] == size)
        tail = torch.tensor([[0, -1]]).expand(size - tokens, 2)
        assert torch.equal(graph.output[tokens:], tail)
    assert sum(graph.replays for graph in capturer.graphs) == 5


def test_eager_steps_touch_no_graph() -> None:
    capturer = RecordingCapturer()
    graphs = runner(capturer)
    graphs.capture("full", [4])
    ids, slots = torch.tensor([1, 2, 3]), torch.tensor([5, 6, 7])
    assert torch.equal(graphs(Dispatch("eager", 3), ids, slots), lookup(ids, slots))
    assert capturer.graphs[0].replays == 0


def test_nothing_is_captured_late_and_nothing_overflows() -> None:
    graphs = runner(RecordingCapturer())
    graphs.capture("full", [4])
    with pytest.raises(CompileError, match="no piecewise graph of size 4"):
        graphs(Dispatch("piecewise", 4), torch.zeros(3), torch.zeros(3))
    with pytest.raises(CompileError, match="5 tokens do not fit"):
        graphs(Dispatch("full", 4), torch.zeros(5), torch.zeros(5))
    with pytest.raises(CompileError, match="between 1 and"):
        graphs.capture("full", [9])


def test_every_dispatch_of_a_dispatcher_is_captured_from_its_own_sizes() -> None:
    dispatch = Dispatcher("both", backend_capture_safe=True, max_num_seqs=5, max_num_tokens=7)
    graphs = runner(RecordingCapturer())
    graphs.capture("full", dispatch.full_sizes)
    graphs.capture("piecewise", dispatch.piecewise_sizes)
    for tokens in range(1, 8):
        for uniform in (True, False):
            chosen = dispatch.dispatch(tokens, uniform)
            assert chosen.route != "eager"
            ids = torch.arange(tokens)
            assert torch.equal(graphs(chosen, ids, ids), lookup(ids, ids))
