"""Every step finds the smallest graph that holds it among those that exist, and capturing has a sensible order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compilation.errors import CompileError
from compilation.graphs.dispatcher import CHEAP_PADDING, TOLERATED_PADDING, Dispatch, Dispatcher, GraphMode, Route
from compilation.graphs.memory import GRAPH_BYTES, estimate_graph_bytes
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


def dispatcher(mode: GraphMode, capture_safe: bool = True, captured: bool = True) -> Dispatcher:
    made = Dispatcher(mode, backend_capture_safe=capture_safe, max_num_seqs=20, max_num_tokens=2048)
    if captured:
        for graph in made.pending():
            made.mark(*graph)
    return made


@pytest.mark.parametrize(
    ("mode", "tokens", "uniform", "expected"),
    [
        ("none", 3, True, Dispatch("eager", 3)),
        ("piecewise", 0, True, Dispatch("eager", 0)),
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


def test_sizes_end_where_a_step_can_end() -> None:
    small = Dispatcher("both", backend_capture_safe=True, max_num_seqs=5, max_num_tokens=7)
    assert (small.full_sizes, small.piecewise_sizes) == ((1, 2, 4, 5), (1, 2, 4, 7))
    assert dispatcher("both").full_sizes == (1, 2, 4, 8, 16, 20)


def test_before_anything_is_captured_every_step_is_eager() -> None:
    empty = dispatcher("both", captured=False)
    for tokens in range(1, 520):
        for uniform in (True, False):
            assert empty.dispatch(tokens, uniform) == Dispatch("eager", tokens)


@given(st.integers(0, 2**32), st.integers(0, 90), st.integers(1, 520), st.booleans())
def test_while_capture_goes_on_only_captured_graphs_with_tolerable_padding_serve(
    seed: int, count: int, tokens: int, uniform: bool
) -> None:
    dispatch = Dispatcher("both", backend_capture_safe=True, max_num_seqs=256, max_num_tokens=8192)
    everything = dispatch.pending()
    known = random.Random(seed).sample(everything, count)
    for graph in known:
        dispatch.mark(*graph)
    assert dispatch.pending() == [graph for graph in everything if graph not in known]

    def serving(route: Route, wanted: tuple[int, ...]) -> int | None:
        size = min((size for name, size in known if name == route and size >= tokens), default=None)
        exact = min((size for size in wanted if size >= tokens), default=None)
        return size if size == exact or (size or 0) <= max(CHEAP_PADDING, TOLERATED_PADDING * tokens) else None

    full, piecewise = serving("full", dispatch.full_sizes), serving("piecewise", dispatch.piecewise_sizes)
    expected = Dispatch("eager", tokens)
    if piecewise is not None:
        expected = Dispatch("piecewise", piecewise)
    if uniform and full is not None:
        expected = Dispatch("full", full)
    assert dispatch.dispatch(tokens, uniform) == expected


def test_sparse_sizes_serve_every_step_once_all_are_captured() -> None:
    sparse = Dispatcher("piecewise", backend_capture_safe=False, max_num_seqs=8, max_num_tokens=512, wanted=[4, 512])
    sparse.mark("piecewise", 512)
    assert sparse.dispatch(3, False) == Dispatch("eager", 3)
    assert sparse.dispatch(5, False) == Dispatch("piecewise", 512)


@pytest.mark.parametrize("mode", ["piecewise", "full_decode", "both"])
def test_capture_begins_with_the_largest_and_a_handful_gives_every_step_a_graph(mode: GraphMode) -> None:
    dispatch = Dispatcher(mode, backend_capture_safe=True, max_num_seqs=256, max_num_tokens=8192)
    order = dispatch.pending()
    assert len(order) == len(set(order)) == len(dispatch.piecewise_sizes) + len(dispatch.full_sizes)
    for route in ("piecewise", "full"):
        of_route = [size for name, size in order if name == route]
        assert of_route[:1] == sorted(of_route, reverse=True)[:1]
    for graph in order[: 7 if mode == "both" else 4]:
        dispatch.mark(*graph)
    largest = 256 if mode == "full_decode" else 512
    for tokens in range(1, largest + 1):
        assert dispatch.dispatch(tokens, uniform_decode=True).route != "eager"
    for tokens in range(1, 257):
        assert dispatch.dispatch(tokens, True).route == ("piecewise" if mode == "piecewise" else "full")


@given(st.sets(st.integers(1, 600), max_size=20), st.integers(1, 300), st.integers(1, 600))
def test_every_wanted_graph_is_pending_once_and_then_none(wanted: set[int], seqs: int, tokens: int) -> None:
    dispatch = Dispatcher(
        "both", backend_capture_safe=True, max_num_seqs=seqs, max_num_tokens=tokens, wanted=tuple(wanted)
    )
    expected = {("piecewise", size) for size in dispatch.piecewise_sizes}
    expected |= {("full", size) for size in dispatch.full_sizes}
    order = dispatch.pending()
    assert set(order) == expected and len(order) == len(expected)
    for graph in order:
        dispatch.mark(*graph)
    assert dispatch.pending() == []
    for step in range(1, max(wanted, default=0) + 1):
        exact = min((size for size in dispatch.piecewise_sizes if size >= step), default=None)
        assert dispatch.dispatch(step, False) == Dispatch("piecewise" if exact else "eager", exact or step)


def test_marking_what_is_not_wanted_is_refused() -> None:
    with pytest.raises(CompileError, match="full graph of size 3 is not wanted under graphs=both"):
        dispatcher("both").mark("full", 3)
    with pytest.raises(CompileError, match="not wanted"):
        dispatcher("piecewise").mark("full", 4)


def test_all_graphs_of_an_8b_model_are_estimated_below_a_gibibyte() -> None:
    hidden, intermediate, layers = 4096, 12288, 36
    activations = 512 * (2 * (3 * hidden + 3 * intermediate) + 8 * hidden)
    pieces, wanted = layers + 1, len(sizes())
    both = estimate_graph_bytes(activations, pieces, wanted, wanted)
    assert 512 << 20 < both < 1 << 30
    assert both - estimate_graph_bytes(activations, pieces, wanted, 0) == wanted * (2 * pieces - 1) * GRAPH_BYTES
    assert estimate_graph_bytes(activations, pieces, 0, 0) == 0
