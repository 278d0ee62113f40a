"""States between two stages: what comes is what was sent, of the step that was meant, or an error. Through memory that
they share, and through a stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from socket import SHUT_RDWR
from typing import Protocol

import pytest
import torch
from rank_processes import connected

from engine.errors import EngineError
from engine.parallel.stage_link import LinkEnd, StageLinks, StateLink
from engine.parallel.stream_link import StreamEnd

COLUMNS = 8


class Wire(Protocol):
    """Between stages 1 and 2 of three."""

    def ends(self) -> tuple[LinkEnd, LinkEnd]: ...

    def abort(self) -> None: ...


class SharedWire:
    def __init__(self) -> None:
        self.links = StageLinks(3)

    def ends(self) -> tuple[LinkEnd, LinkEnd]:
        after, before = self.links.after(1), self.links.before(2)
        assert after is not None and before is not None
        return after, before

    def abort(self) -> None:
        self.links.abort()

    def close(self) -> None:
        self.links.close()


class StreamWire:
    def __init__(self) -> None:
        self._sockets = connected()

    def ends(self) -> tuple[LinkEnd, LinkEnd]:
        after, before = (StreamEnd(each.fileno()) for each in self._sockets)
        return after, before

    def abort(self) -> None:
        self._sockets[0].shutdown(SHUT_RDWR)

    def close(self) -> None:
        for each in self._sockets:
            each.close()


@pytest.fixture(params=[SharedWire, StreamWire])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    made = request.param()
    yield made
    made.close()


def opened(wire: Wire, slots: int = 2, rows: int = 64) -> tuple[StateLink, StateLink]:
    sender, receiver = (end.open(slots, rows, COLUMNS, torch.bfloat16) for end in wire.ends())
    return sender, receiver


def states(rows: int, step: int) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(step)).bfloat16()


def test_a_stage_has_neighbours_but_at_the_ends() -> None:
    wire = SharedWire()
    assert wire.links.before(0) is None and wire.links.after(2) is None
    assert wire.links.before(1) is not None and wire.links.after(0) is not None
    wire.close()


def test_states_come_as_they_were_sent_however_far_the_sender_is_ahead(wire: Wire) -> None:
    sender, receiver = opened(wire)
    sizes = [(step * 37) % 65 for step in range(300)]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [sender.send(step, states(rows, step)) for step, rows in enumerate(sizes)])
        for step, rows in enumerate(sizes):
            assert torch.equal(receiver.receive(step, rows), states(rows, step))
        sent.result()


def test_states_that_no_buffer_holds_and_those_whose_rows_lie_apart_come_whole(wire: Wire) -> None:
    sender, receiver = opened(wire, rows=1 << 20)
    large = states(1 << 20, 0)
    with ThreadPoolExecutor(1) as pool:
        sent = [pool.submit(sender.send, 0, large), pool.submit(sender.send, 1, large[::2])]
        assert torch.equal(receiver.receive(0, 1 << 20), large)
        assert torch.equal(receiver.receive(1, 1 << 19), large[::2])
        for each in sent:
            each.result()


def test_what_is_kept_of_a_step_is_not_overwritten_by_the_next_one(wire: Wire) -> None:
    sender, receiver = opened(wire, slots=1)
    sender.send(0, states(4, 0))
    first = receiver.receive(0, 4)
    sender.send(1, states(4, 1))
    assert torch.equal(first, states(4, 0))


@pytest.mark.parametrize("meant", [(8, 4), (7, 5)])
def test_stages_that_compute_different_steps_are_an_error(wire: Wire, meant: tuple[int, int]) -> None:
    sender, receiver = opened(wire)
    sender.send(7, states(4, 0))
    with pytest.raises(EngineError, match=f"waits for {meant[1]} states of step {meant[0]} .* sent 4 of step 7"):
        receiver.receive(*meant)


@pytest.mark.parametrize("waits", ["sender", "receiver"])
def test_who_waits_is_woken_by_who_watches(wire: Wire, waits: str) -> None:
    sender, receiver = opened(wire, slots=1, rows=1 << 20)
    large = states(1 << 20, 0)

    def send() -> None:
        for step in range(3):
            sender.send(step, large)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(send) if waits == "sender" else pool.submit(receiver.receive, 0, 1)
        threading.Timer(0.1, wire.abort).start()
        with pytest.raises(EngineError, match="before or behind this one has gone"):
            waiting.result()
    with pytest.raises(EngineError, match="has gone"):
        sender.send(3, large)


def test_states_of_which_only_the_beginning_came_are_an_error() -> None:
    ours, theirs = connected()
    with ours, theirs:
        receiver = StreamEnd(theirs.fileno()).open(1, 4, COLUMNS, torch.float32)
        sender = StreamEnd(ours.fileno()).open(1, 4, COLUMNS, torch.float32)
        sender.send(0, torch.ones(4, COLUMNS))
        assert torch.equal(receiver.receive(0, 4), torch.ones(4, COLUMNS))
        ours.sendall(b"\0" * 24)  # step 0 again
        ours.shutdown(SHUT_RDWR)
        with pytest.raises(EngineError, match="waits for 4 states of step 1"):
            receiver.receive(1, 4)
        with pytest.raises(EngineError, match="has gone"):
            receiver.receive(2, 4)
