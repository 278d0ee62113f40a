"""Streams, events and graphs of a pretend GPU, and what its machine remembers.

Work is done when it is queued, with two exceptions that a program must get right on a real device too: a copy to the
host that does not wait arrives when the host waits for an event (or stream) behind it, and until then the target holds
garbage; and what is queued while a graph is captured leaves garbage too, until the graph is replayed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

DEVICE = torch.device("cuda", 0)
_IGNORED, _WARN, _ERROR = 0, 1, 2


@dataclass
class Call:
    """One piece of recorded work."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]

    def again(self) -> None:
        # A piece empties the list of its arguments.
        args = [list(value) if isinstance(value, list) else value for value in self.args]
        results = _tensors(self.function(*args, **self.kwargs))
        for target, value in zip(self.outputs, results, strict=True):
            if target.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
                target.copy_(value)


class Machine:
    """One device. `total_bytes`: of its memory."""

    def __init__(self, total_bytes: int = 8 << 30) -> None:
        self.total_bytes = total_bytes
        self.allocated_bytes = 0
        """never falls: an upper bound of what is in use"""
        self.sync_debug_mode = _IGNORED
        self.waits: list[str] = []
        """what the host waited for while that was an error"""
        self.captures = self.replays = self.late_copies = 0
        self.properties = SimpleNamespace(
            name="Pretend", major=9, minor=0, multi_processor_count=2, total_memory=total_bytes, L2_cache_size=1 << 16
        )
        self.default_stream = Stream(self)
        self._thread = threading.local()
        self._lock = threading.Lock()
        self._on_their_way: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sent = self._delivered = 0

    # streams

    @property
    def current_stream(self) -> Stream:
        found: Stream = getattr(self._thread, "stream", self.default_stream)
        return found

    @current_stream.setter
    def current_stream(self, stream: Stream) -> None:
        self._thread.stream = stream

    # graphs

    @property
    def recording(self) -> list[Call] | None:
        found: list[Call] | None = getattr(self._thread, "recording", None)
        return found

    @recording.setter
    def recording(self, calls: list[Call] | None) -> None:
        self._thread.recording = calls

    def queue(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Work that was done just now, with its result; a capture remembers it."""
        if self.recording is not None:
            outputs = _tensors(result)
            if outputs or result is None:
                self.recording.append(Call(function, args, kwargs, outputs))

    # waiting

    def host_waits(self, what: str) -> None:
        """The host is about to wait for the device."""
        if self.recording is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        if self.sync_debug_mode == _ERROR:
            self.waits.append(what)
            raise RuntimeError(f"called a synchronizing CUDA operation ({what})")

    def send_to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """A copy that arrives at `deliver`."""
        if self.recording is not None:
            raise RuntimeError(f"a copy to the host inside a capture: {tuple(source.shape)}")
        with self._lock:
            self._on_their_way.append((source.detach().clone(), target))
            self._sent += 1
            self.late_copies += 1
        spoil(target)

    @property
    def sent(self) -> int:
        return self._sent

    def deliver(self, until: int | None = None) -> None:
        """Copies to the host that were sent before the `until`-th arrive; None: all."""
        with self._lock:
            count = (self._sent if until is None else until) - self._delivered
            arrived, self._on_their_way = self._on_their_way[: max(count, 0)], self._on_their_way[max(count, 0) :]
            self._delivered += len(arrived)
        for value, target in arrived:
            _plainly(torch.Tensor.copy_, target, value)


def spoil(tensor: torch.Tensor) -> None:
    """What memory holds that nobody wrote yet."""
    if tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).fill_(0x7F if tensor.is_floating_point() else 1)
    else:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -7777)


class Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.device = DEVICE
        self.cuda_stream = id(self)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        if not isinstance(stream, Stream):
            raise TypeError(f"a stream is wanted, not {stream!r}")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._machine)
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._machine.host_waits("Stream.synchronize")
        self._machine.deliver()


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, machine: Machine, enable_timing: bool = False) -> None:
        self._machine = machine
        self._timing = enable_timing
        self._at: int | None = None
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._at, self._time = self._machine.sent, time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        if stream is not None and not isinstance(stream, Stream):
            raise TypeError(f"a stream is wanted, not {stream!r}")

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self._machine.recording is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing (Event.synchronize)")
        if self._at is not None:
            self._machine.deliver(self._at)

    def elapsed_time(self, end_event: Event) -> float:
        if not (self._timing and end_event._timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        return 1e3 * max(end_event._time - self._time, 1e-6)


class Graph:
    """As `torch.cuda.CUDAGraph`: every call of torch between begin and end is called again by `replay`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._calls: list[Call] = []
        self._state = "new"

    def capture_begin(
        self,
        pool: tuple[int, int] | None = None,
        capture_error_mode: str = "global",
        check_input_liveness: bool = False,  # given by torch.cuda.graph of torch 2.13
    ) -> None:
        machine = self._machine
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(f"Unknown capture error mode: {capture_error_mode}")
        if machine.current_stream is machine.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if machine.recording is not None:
            raise RuntimeError("a capture inside a capture")
        if capture_error_mode == "global":
            raise RuntimeError("a capture in mode 'global': any call of another thread (a loader, a copy) would end it")
        if pool is not None and not isinstance(pool, tuple):
            raise TypeError(f"not a pool: {pool!r}")
        self._state = "capturing"
        machine.recording = self._calls

    def capture_end(self) -> None:
        if self._state != "capturing":
            raise RuntimeError("the graph is not capturing")
        self._machine.recording = None
        self._state = "captured"
        self._machine.captures += 1
        # Nothing was computed: what only this graph wrote holds nothing yet.
        made: set[int] = set()
        for call in self._calls:
            arguments = {t.untyped_storage().data_ptr() for t in _tensors((call.args, call.kwargs))}
            made |= {t.untyped_storage().data_ptr() for t in call.outputs} - arguments
        for call in self._calls:
            for tensor in call.outputs:
                if tensor.untyped_storage().data_ptr() in made and tensor.is_floating_point():
                    _plainly(spoil, tensor)

    def replay(self) -> None:
        if self._state != "captured":
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        if self._machine.recording is not None:
            raise RuntimeError("a replay inside a capture")
        self._machine.replays += 1
        for call in self._calls:
            _plainly(call.again)

    def pool(self) -> tuple[int, int]:
        return (0, id(self))

    def reset(self) -> None:
        self._calls, self._state = [], "new"


def _plainly(function: Callable[..., object], *arguments: Any) -> None:
    from pretend_tensors import on_device

    with on_device(), torch.inference_mode():
        function(*arguments)


def _tensors(value: Any) -> list[torch.Tensor]:
    from pretend_tensors import tensors_in

    return tensors_in(value)
