"""The streams of a step, and nothing else of a device's order: who queues what where, and who waits for whom.

A device runs a step on three queues. The *input* stream brings the plan's differences and builds the step's inputs, the
*main* stream (whichever is current) runs model, sampler and `post_update`, the *result* stream copies what the host
asked for. What orders them are events, and every event of a step is recorded and awaited in `model_runner.py`,
`staging.py` and `results.py` through these few methods, so a test can put a recorder in the place of the device and
prove that no two of them touch a buffer unordered.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream; the part of `torch.cuda.Event` that a step needs. May be recorded again."""

    def record(self) -> None:
        """On the current stream: behind everything queued there so far."""
        ...

    def wait(self) -> None:
        """What is queued on the current stream from now on runs after the event. The host does not wait."""
        ...

    def synchronize(self) -> None:
        """The host waits for the event."""
        ...


class Streams(Protocol):
    """Owns a device's side streams and makes its events."""

    queued: bool
    """True: a call returns when the work is queued. False: when it is done, so buffers need no rings and no copies."""
    inputs: AbstractContextManager[object]
    """What is queued inside goes to the input stream; may be entered again and again, not nested."""
    results: AbstractContextManager[object]
    """The same for the result stream."""

    def event(self) -> Event: ...

    def host_buffer(self, words: int) -> torch.Tensor:
        """int32 [words] on the host, from which a copy to the device does not wait."""
        ...


class ImmediateEvent:
    """For devices whose work is done when the call returns."""

    def record(self) -> None:
        return

    def wait(self) -> None:
        return

    def synchronize(self) -> None:
        return


class HostStreams:
    """A CPU has one queue: the calling thread."""

    queued = False

    def __init__(self) -> None:
        self.inputs: AbstractContextManager[object] = nullcontext()
        self.results: AbstractContextManager[object] = nullcontext()
        self._event = ImmediateEvent()

    def event(self) -> Event:
        return self._event

    def host_buffer(self, words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int32)


class CudaStreams:
    """Both side streams have high priority: their work is short, and the main stream waits for one of them."""

    queued = True

    def __init__(self, device: torch.device) -> None:
        # torch.cuda.Stream has no annotations.
        inputs = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        results = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.inputs: AbstractContextManager[object] = torch.cuda.stream(inputs)
        self.results: AbstractContextManager[object] = torch.cuda.stream(results)

    def event(self) -> Event:
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's class has no annotations
        return event

    def host_buffer(self, words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int32, pin_memory=True)


def streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
