from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.runner.kernels.host import HostKernels
from engine.runner.staging import BufferRing, StagedWrites
from engine.runner.streams import Event, HostStreams, ImmediateEvent
from engine.step import Write, Writes

DTYPES = (torch.int32, torch.int64, torch.float32)


class FakeEvent:
    """Device work that is still running until somebody waits for it."""

    log: list[str]

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.in_flight = name, log, False

    def record(self) -> None:
        self.in_flight = True
        self.log.append(f"record {self.name}")

    def wait(self) -> None:
        self.log.append(f"order {self.name}")

    def synchronize(self) -> None:
        self.in_flight = False
        self.log.append(f"wait {self.name}")


class FakeDevice(HostStreams):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[FakeEvent] = []
        self.log: list[str] = []

    def event(self) -> FakeEvent:
        self.events.append(FakeEvent(str(len(self.events)), self.log))
        return self.events[-1]


def staged(tables: list[torch.Tensor], ring: BufferRing | None = None) -> StagedWrites:
    return StagedWrites(tables, HostKernels(), HostStreams(), ring or BufferRing(HostStreams(), 4, 1))


@settings(deadline=None)
@given(depth=st.integers(1, 4), sizes=st.lists(st.integers(1, 600), min_size=1, max_size=20))
def test_a_buffer_in_flight_is_never_lent(depth: int, sizes: list[int]) -> None:
    device = FakeDevice()
    ring = BufferRing(device, words=16, depth=depth)
    owner: dict[int, FakeEvent] = {}
    for words in sizes:
        buffer = ring.acquire(words)
        assert buffer.numel() >= words
        previous = owner.get(buffer.data_ptr())
        assert previous is None or not previous.in_flight
        ring.commit()
        name = device.log[-1].split()[1]
        owner = {pointer: event for pointer, event in owner.items() if event.name != name}
        owner[buffer.data_ptr()] = device.events[int(name)]
    # A wait happens only when the ring comes round: never for the first `depth` steps.
    assert not any(entry.startswith("wait") for entry in device.log[:depth])
    assert sum(entry.startswith("wait") for entry in device.log) == max(0, len(sizes) - depth)


class LateDevice(HostStreams):
    """Executes what is queued whenever it likes, or when somebody waits; `deaf`: nobody can wait for it."""

    queued = True

    def __init__(self, deaf: bool = False) -> None:
        super().__init__()
        self.queue: list[Callable[[], None]] = []
        self.deaf = deaf

    def run(self, count: int) -> None:
        for work in [self.queue.pop(0) for _ in range(min(count, len(self.queue)))]:
            work()

    def event(self) -> Event:
        return LateEvent(self)


class LateEvent(ImmediateEvent):
    def __init__(self, device: LateDevice) -> None:
        self.device, self.reached = device, True

    def record(self) -> None:
        def reach() -> None:
            self.reached = True

        self.reached = False
        self.device.queue.append(reach)

    def synchronize(self) -> None:
        while not self.reached and not self.device.deaf:
            self.device.run(1)


def send_late(device: LateDevice, depth: int, progress: list[int]) -> list[tuple[int, list[int]]]:
    """(what the host put into a buffer, what its copy read when the device got there), in the device's order."""
    ring, copied = BufferRing(device, words=4, depth=depth), []
    for step, count in enumerate(progress):
        buffer = ring.acquire(words=4 + 4 * (step % 3))
        buffer.fill_(step)
        device.queue.append(lambda step=step, buffer=buffer: copied.append((step, buffer.unique().tolist())))
        ring.commit()
        device.run(count)
    device.run(len(device.queue))
    return copied


@given(depth=st.integers(1, 4), progress=st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_a_buffer_is_refilled_only_after_its_copy_ran(depth: int, progress: list[int]) -> None:
    expected = [(step, [step]) for step in range(len(progress))]
    assert send_late(LateDevice(), depth, progress) == expected


def test_a_ring_that_does_not_wait_is_found_out() -> None:
    assert send_late(LateDevice(deaf=True), 3, [0] * 5) != [(step, [step]) for step in range(5)]


def test_a_ring_refuses_to_lend_two_buffers_at_once() -> None:
    ring = BufferRing(HostStreams(), words=4, depth=2)
    ring.acquire()
    with pytest.raises(RuntimeError, match="before the last one was committed"):
        ring.acquire()
    ring.commit()
    with pytest.raises(RuntimeError, match="nobody acquired"):
        ring.commit()


writes = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 11), st.integers(0, 12)).filter(
        lambda w: w[2] + w[3] <= 12
    ),
    max_size=14,
)


@given(steps=st.lists(writes, max_size=4), seed=st.integers(0, 1000), arrays=st.booleans(), columns=st.booleans())
def test_staged_writes_equal_assignments_in_order(
    steps: list[list[tuple[int, int, int, int]]], seed: int, arrays: bool, columns: bool
) -> None:
    """`columns`: those of a table in one go; it has two groups of three rows."""
    rng = np.random.default_rng(seed)
    tables = [torch.zeros(6, 12, dtype=dtype) for dtype in DTYPES]
    expected = [t.clone() for t in tables]
    staging = staged(tables, BufferRing(HostStreams(), words=1, depth=2))
    for step in steps:
        by_table: dict[int, list[tuple[int, int, np.ndarray]]] = {}
        for table, row, start, length in step:
            values = rng.integers(-1000, 1000, length)
            if columns and length:
                by_table.setdefault(table, []).append((row, start, values))
            else:
                staging.write(table, row, start, values if arrays else values.tolist())
            expected[table][row, start : start + length] = torch.from_numpy(values).to(DTYPES[table])
        for table, many in by_table.items():
            staging.write_all(table, in_columns(many, 3), 3)
        staging.send()
        staging.apply()
        for index, oracle in enumerate(expected):
            assert torch.equal(tables[index], oracle)


def in_columns(writes: list[tuple[int, int, np.ndarray]], group_rows: int) -> Writes:
    return Writes.of(
        Write(row // group_rows, row % group_rows, start, values.tolist()) for row, start, values in writes
    )


@pytest.mark.parametrize("row, start, length", [(6, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 10, 3)])
def test_a_write_outside_its_table_is_refused(row: int, start: int, length: int) -> None:
    staging = staged([torch.zeros(6, 12, dtype=torch.int32)])
    with pytest.raises(ValueError, match="outside table 0"):
        staging.write(0, row, start, [1] * length)
    good = (2, 0, np.array([1]))
    with pytest.raises(ValueError, match="outside table 0"):
        staging.write_all(0, in_columns([good, (row, start, np.ones(length, dtype=np.int64))], 3), 3)


def test_a_value_too_large_for_its_table_is_refused_not_wrapped() -> None:
    staging = staged([torch.zeros(6, 12, dtype=torch.int32)])
    staging.write(0, 0, 0, [2**31])
    with pytest.raises(OverflowError):
        staging.send()
        staging.apply()
    with pytest.raises(OverflowError):
        Writes.of([Write(0, 0, 0, [1, -(2**31) - 1])])


def test_a_table_that_kernels_cannot_address_is_refused() -> None:
    for table in (torch.zeros(3), torch.zeros(3, 4).t(), torch.zeros(3, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="contiguous 2-D"):
            staged([table])


def test_full_precision_survives_int64_and_float32() -> None:
    tables = [torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4)]
    staging = staged(tables)
    staging.write(0, 1, 1, [2**62 + 1, -(2**63)])
    staging.write(1, 0, 2, [0.1, -1e30])
    staging.send()
    staging.apply()
    assert tables[0][1].tolist() == [0, 2**62 + 1, -(2**63), 0]
    assert torch.equal(tables[1][0], torch.tensor([0, 0, 0.1, -1e30]))
