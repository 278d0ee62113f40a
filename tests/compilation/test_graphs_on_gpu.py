"""The properties that fakes prove on a CPU, on CUDA itself: replay equals eager, and sizes share one pool."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_step import Step, assert_replays_equal_eager
from toy_llama import OP, ToyLlama, batch, interpreted

from compilation.counter import CompileCounter
from compilation.graphs.cuda import CudaCapturer
from compilation.graphs.dispatcher import Dispatcher
from compilation.graphs.graph_set import GraphSet
from compilation.graphs.memory import estimate_graph_bytes
from compilation.interface import CompiledModel, CompileSettings
from compilation.model import compile_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LAYERS = 3
LARGEST = 24


@pytest.fixture
def exact_matmul() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def program_of(model: ToyLlama, attend: Callable[..., None], cache_dir: Path | None) -> CompiledModel:
    example = tuple(x.cuda() for x in batch(8))
    if cache_dir is None:
        return interpreted(model, attend, *example)
    return compile_model(model, example, frozenset({OP}), {OP: attend}, CompileSettings("pieces", cache_dir))


@pytest.mark.parametrize("compiled_pieces", [False, True])
def test_replays_on_the_device_equal_eager_steps_and_all_sizes_share_the_first_ones_memory(
    exact_matmul: None, tmp_path: Path, compiled_pieces: bool
) -> None:
    model = ToyLlama(layers=LAYERS)
    on_device = copy.deepcopy(model).cuda()
    step = Step(LARGEST, "cuda")
    capturer = CudaCapturer(torch.device("cuda", torch.cuda.current_device()))
    program = program_of(on_device, step.attend, tmp_path if compiled_pieces else None)
    whole = program_of(on_device, step.attend_on_device, tmp_path if compiled_pieces else None)
    graphs = GraphSet(step.inputs, capturer, step.before_capture, whole.run, program)
    dispatcher = Dispatcher("both", backend_capture_safe=True, max_num_seqs=8, max_num_tokens=LARGEST)
    allocated = []
    counter = CompileCounter()
    for route, size in dispatcher.pending():
        graphs.capture(route, size)
        dispatcher.mark(route, size)
        allocated.append(torch.cuda.memory_allocated())
    assert counter.since_mark() == 0
    assert allocated[-1] - allocated[0] <= 2 << 20, "captured sizes still own memory of the pool"
    for seed in range(2):
        assert_replays_equal_eager(graphs, step, model, "piecewise", seed, tolerance=1e-4)
        assert_replays_equal_eager(graphs, step, model, "full", seed, tolerance=1e-4)
    sizes = (len(dispatcher.piecewise_sizes), len(dispatcher.full_sizes))
    assert 0 < graphs.memory_bytes() <= estimate_graph_bytes(1 << 20, LAYERS + 1, *sizes)


def test_a_replay_waits_for_nothing_on_the_host() -> None:
    step = Step(8, "cuda")
    program = program_of(ToyLlama(layers=2).cuda(), step.attend, None)
    capturer = CudaCapturer(torch.device("cuda", torch.cuda.current_device()))
    graphs = GraphSet(step.inputs, capturer, step.before_capture, program.run, program)
    graphs.capture("piecewise", 8)
    step.tokens = 5
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graphs.replay("piecewise", 8)
    finally:
        torch.cuda.set_sync_debug_mode(before)
