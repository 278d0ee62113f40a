"""A pretend GPU refuses what a real one refuses; else a run on it would prove nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from pretend_gpu import Machine, pretend_torch
from pretend_tensors import require_on_device

GPU = torch.device("cuda", 0)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with pretend_torch() as machine, torch.inference_mode():
        yield machine


def test_tensors_say_where_they_are_and_views_follow(machine: Machine) -> None:
    for tensor in (
        torch.zeros(4, device="cuda"),
        torch.zeros(4).to(GPU),
        torch.zeros(4).cuda(),
        torch.zeros(4, device=GPU)[1:].view(-1) + 1,
        torch.empty_like(torch.zeros(2, device=GPU)),
        torch.zeros(2, device=GPU).new_ones(3),
        torch.nn.Parameter(torch.zeros(2, device=GPU)),
    ):
        assert tensor.device == GPU and tensor.is_cuda and tensor.get_device() == 0
        assert not tensor.cpu().is_cuda
    pinned = torch.empty(4, pin_memory=True)
    assert pinned.is_pinned() and pinned[1:].is_pinned() and torch.ones(2).pin_memory().is_pinned()
    assert not torch.empty(4).is_pinned()


def test_sides_do_not_mix(machine: Machine) -> None:
    gpu, host = torch.ones(3, device=GPU), torch.ones(3)
    for mixed in (lambda: gpu + host, lambda: torch.cat((gpu, host)), lambda: gpu.index_select(0, torch.arange(2))):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    assert (gpu + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert host.view_as(gpu).device.type == "cpu"
    with pytest.raises(TypeError, match="numpy"):
        gpu.numpy()
    with pytest.raises(RuntimeError, match="pin"):
        gpu.pin_memory()
    with pytest.raises(ValueError, match="pageable"):
        require_on_device("kernel", [gpu, host])


def pinned(count: int) -> torch.Tensor:
    return torch.zeros(count, pin_memory=True)


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0]),
    "int": lambda x: int(x[0]),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "a list as index": lambda x: x[[0, 1]],
    "an index of the host": lambda x: x[torch.tensor([0])],
    "one element set": lambda x: x.__setitem__(0, 1.0),
    "elements set by index": lambda x: x.__setitem__(torch.zeros(1, dtype=torch.int64, device=GPU), 1.0),
    "upload of pageable memory": lambda x: torch.zeros(4).to(GPU, non_blocking=True),
    "upload that waits": lambda x: pinned(4).to(GPU),
    "a tensor of a list": lambda x: torch.tensor([1.0], device=GPU),
    "copy that waits": lambda x: pinned(4).copy_(x),
    "copy to pageable memory": lambda x: torch.zeros(4).copy_(x, non_blocking=True),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
}
QUEUED: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda x: (x * 2 + 1).sum(),
    "slices set": lambda x: x.__setitem__(slice(0, 2), 1.0),
    "masks set": lambda x: x.__setitem__(x > 0, 1.0),
    "gather": lambda x: x[torch.zeros(1, dtype=torch.int64, device=GPU)],
    "upload": lambda x: pinned(4).to(GPU, non_blocking=True),
    "copy up": lambda x: x.copy_(pinned(4), non_blocking=True),
    "copy down": lambda x: pinned(4).copy_(x, non_blocking=True),
    "shapes": lambda x: (x.shape, len(x), x.numel(), x.dtype, x.device),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_errors_where_asked(machine: Machine, name: str) -> None:
    x = torch.ones(4, device=GPU)
    WAITS[name](x)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        WAITS[name](x)
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", QUEUED)
def test_queued_work_is_none(machine: Machine, name: str) -> None:
    x = torch.ones(4, device=GPU)
    torch.cuda.set_sync_debug_mode("error")
    QUEUED[name](x)
    assert machine.waits == []


def test_a_copy_to_the_host_arrives_with_its_event(machine: Machine) -> None:
    host, early, late = torch.zeros(3, dtype=torch.int64, pin_memory=True), torch.cuda.Event(), torch.cuda.Event()
    early.record()
    host.copy_(torch.arange(3, device=GPU), non_blocking=True)
    late.record()
    early.synchronize()
    assert host.tolist() == [-7777] * 3
    late.synchronize()
    assert host.tolist() == [0, 1, 2]


def test_a_capture_computes_nothing_and_a_replay_reads_what_its_addresses_hold(machine: Machine) -> None:
    x, side, graph = torch.ones(3, device=GPU), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="non-default stream"):
        graph.capture_begin()
    with torch.cuda.stream(side):
        graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        y = (x * 2).add_(1)
        for forbidden in (lambda: x.tolist(), torch.cuda.synchronize, lambda: pinned(3).copy_(x, non_blocking=True)):
            with pytest.raises(RuntimeError, match="captur"):
                forbidden()
        graph.capture_end()
    assert y.isnan().all()
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [11, 11, 11]
    with pytest.raises(RuntimeError, match="without a preceding"):
        torch.cuda.CUDAGraph().replay()


def test_threads_see_the_device_where_their_starter_does_and_all_ends_with_it() -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(torch.cuda.is_available())

    with pretend_torch():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert torch.cuda.get_device_capability() == (9, 0)
    look()
    assert seen == [True, torch.cuda.is_available()]
