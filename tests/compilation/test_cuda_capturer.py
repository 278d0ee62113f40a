"""What is asked of CUDA while capturing, and in which order: against a fake `torch.cuda` that writes a log."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from toy_llama import ToyLlama, batch, causal, interpreted

from compilation.graphs.cuda import CudaCapturer
from compilation.graphs.graph_set import GraphSet

FORBIDDEN = ("synchronize", "empty_cache", "memory_snapshot", "reset_peak_memory_stats")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class FakeCudaGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.name = f"g{cuda.graphs}"
        cuda.graphs += 1

    def capture_begin(self, pool: str, capture_error_mode: str) -> None:
        assert not self.cuda.capturing and self.cuda.stream_name != "main" and not gc.isenabled()
        self.cuda.capturing = True
        self.cuda.pools.append(pool)
        self.cuda.log.append(f"{self.name} begins on {self.cuda.stream_name} into {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        assert self.cuda.capturing
        self.cuda.capturing = False
        self.cuda.free_bytes -= 1000
        self.cuda.log.append(f"{self.name} ends")
        if self.cuda.invalidated:
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        assert not self.cuda.capturing
        self.cuda.log.append(f"replay {self.name} on {self.cuda.stream_name}")


class FakeCuda:
    """Installed over `torch.cuda`; `log` is what was asked of it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.pools: list[str] = []
        self.graphs = self.made_pools = 0
        self.stream_name = "main"
        self.capturing = self.invalidated = False
        self.free_bytes = 1_000_000
        patch.setattr(torch.cuda, "CUDAGraph", lambda: FakeCudaGraph(self))
        patch.setattr(torch.cuda, "Stream", lambda device: FakeStream(self, "side"))
        patch.setattr(torch.cuda, "stream", self.within)
        patch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(self, self.stream_name))
        patch.setattr(torch.cuda, "graph_pool_handle", self.pool)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free_bytes, 2_000_000))
        patch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: None, raising=False)
        for name in FORBIDDEN:
            patch.setattr(torch.cuda, name, partial(self.refuse, name))

    def pool(self) -> str:
        self.made_pools += 1
        return f"pool{self.made_pools}"

    def refuse(self, name: str, *args: object) -> None:
        raise AssertionError(f"torch.cuda.{name} was called")

    @contextmanager
    def within(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream_name = self.stream_name, stream.name
        try:
            yield
        finally:
            self.stream_name = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def capturer() -> CudaCapturer:
    return CudaCapturer(torch.device("cuda", 0))


def test_pieces_are_captured_one_by_one_on_one_side_stream_into_one_pool(cuda: FakeCuda) -> None:
    program = interpreted(ToyLlama(layers=2), causal, *batch(4))
    graphs = GraphSet(batch(8), capturer(), lambda route, size: cuda.log.append(f"{route} {size}"), causal, program)
    graphs.capture("piecewise", 4)
    graphs.capture("piecewise", 2)
    mode = "on side into pool1, thread_local"
    one = ["side waits for main", "main waits for side"]
    assert cuda.log == [
        "piecewise 4",
        *one,
        *[line for index in range(3) for line in (f"g{index} begins {mode}", f"g{index} ends")],
        "piecewise 2",
        *one,
        *[line for index in range(3, 6) for line in (f"g{index} begins {mode}", f"g{index} ends")],
    ]
    assert graphs.memory_bytes() == 6000


def test_a_replay_queues_graphs_and_attention_in_turn_on_the_callers_stream(cuda: FakeCuda) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        cuda.log.append(f"attention {layer} on {cuda.stream_name}")

    program = interpreted(ToyLlama(layers=2), attend, *batch(4))
    graphs = GraphSet(batch(8), capturer(), lambda route, size: None, program.run, program)
    graphs.capture("piecewise", 4)
    cuda.log.clear()
    graphs.replay("piecewise", 4)
    parts = ["replay g0", "attention 0", "replay g1", "attention 1", "replay g2"]
    assert cuda.log == [f"{part} on main" for part in parts]
    cuda.log.clear()
    graphs.capture("full", 4)
    turns = [f"attention {layer} on side" for layer in (0, 1)]
    begin, end = "g3 begins on side into pool1, thread_local", "g3 ends"
    assert cuda.log == ["side waits for main", *turns, "main waits for side", begin, *turns, end]
    cuda.log.clear()
    graphs.replay("full", 4)
    assert cuda.log == ["replay g3 on main"]


@pytest.mark.parametrize("collecting", [True, False])
def test_the_garbage_collector_is_off_for_a_whole_size_and_then_as_before(cuda: FakeCuda, collecting: bool) -> None:
    assert gc.isenabled()
    states = []
    try:
        if not collecting:
            gc.disable()
        made = capturer()
        with pytest.raises(ValueError, match="in between"), made.session():
            made.capture(lambda: states.append(gc.isenabled()))
            raise ValueError("in between")
        assert states == [False]
        assert gc.isenabled() == collecting
    finally:
        gc.enable()


def test_a_failing_function_ends_its_capture_and_the_reason_is_raised(cuda: FakeCuda) -> None:
    def fail() -> None:
        cuda.invalidated = True
        raise ValueError("this backend waits for the device")

    made = capturer()
    with made.session():
        with pytest.raises(ValueError, match="waits for the device"):
            made.capture(fail)
        assert not cuda.capturing and cuda.stream_name == "main"
        cuda.invalidated = False
        assert made.capture(lambda: 7)[1] == 7


def test_a_pool_that_torch_would_refuse_is_not_used_again(cuda: FakeCuda) -> None:
    """torch refuses the handle of a pool whose graphs have all died, and of one whose capture could not be ended."""
    made = capturer()

    def fail() -> None:
        raise ValueError

    def invalidate() -> None:
        cuda.invalidated = True
        raise ValueError

    with made.session():
        for function in (fail, int, fail, int, invalidate, fail, int, int):
            cuda.invalidated = False
            with suppress(ValueError):
                made.capture(function)
    assert cuda.pools == ["pool1", *["pool2"] * 4, "pool3", *["pool4"] * 2]


@pytest.mark.parametrize("torch_had_ended_it", [False, True])
def test_a_capture_that_torch_leaves_half_open_is_ended_for_the_allocator_and_kept(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, torch_had_ended_it: bool
) -> None:
    """Allocators ask an open capture which streams are its own, so it must not die either."""
    ended: list[tuple[int, str]] = []

    def end(device: int, pool: str) -> None:
        ended.append((device, pool))
        if torch_had_ended_it:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    def invalidate() -> None:
        cuda.invalidated = True
        raise ValueError("not permitted while capturing")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    made = capturer()
    with made.session(), pytest.raises(ValueError, match="not permitted"):
        made.capture(invalidate)
    assert ended == [(0, "pool1")] and len(made._broken) == 1
    cuda.invalidated = False
    with made.session():
        made.capture(int)
    assert ended == [(0, "pool1")] and cuda.pools == ["pool1", "pool2"]


def test_a_failed_size_leaves_the_others(cuda: FakeCuda) -> None:
    fails = False

    def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        if fails and cuda.capturing:
            raise ValueError("layer")

    model: nn.Module = ToyLlama(layers=1)
    program = interpreted(model, attend, *batch(4))
    graphs = GraphSet(batch(8), capturer(), lambda route, size: None, program.run, program)
    graphs.capture("full", 4)
    fails = True
    with pytest.raises(ValueError, match="layer"):
        graphs.capture("full", 2)
    assert graphs.captured("full") == (4,)
    graphs.replay("full", 4)


def test_nothing_of_cuda_is_initialised_by_importing_graphs() -> None:
    code = (
        "import torch, compilation.graphs.graph_set, compilation.graphs.cuda\nassert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
