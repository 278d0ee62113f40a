"""Copying and swapping blocks: right on real memory, and right whatever the order in which two streams run."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_backends import cuda_blocks
from attention_backends.cuda_blocks import BlockMover
from attention_backends.cuda_launchers import Launchers

CPU = torch.device("cpu")


def caches_of(blocks: int, layers: int = 3, shape: tuple[int, ...] = (2, 1, 16, 4)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(blocks)
    return [torch.randn(blocks, *shape, generator=generator) for _ in range(layers)]


@dataclass
class FakeStream:
    """Work that runs later, in its own order; a wait holds until the event's work is done."""

    name: str
    queue: list[tuple[str, Callable[[], None] | FakeEvent]] = field(default_factory=list)

    def wait_event(self, event: FakeEvent) -> None:
        self.queue.append(("wait", event))

    def record_event(self) -> FakeEvent:
        event = FakeEvent()
        self.queue.append(("record", event))
        return event

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())


@dataclass(eq=False)
class FakeEvent:
    happened: bool = False


class Machine:
    """Two streams whose work runs in a random order that respects nothing but their waits."""

    def __init__(self) -> None:
        self.streams = [FakeStream("home"), FakeStream("side")]
        self.current = self.streams[0]

    @contextmanager
    def on(self, stream: FakeStream | None) -> Iterator[None]:
        assert stream is not None
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(self, work: Callable[[], None]) -> None:
        self.current.queue.append(("work", work))

    def run(self, seed: int) -> None:
        order = random.Random(seed)
        while any(stream.queue for stream in self.streams):
            able = [s for s in self.streams if s.queue and not self._held(s)]
            assert able, "streams wait for each other"
            kind, what = order.choice(able).queue.pop(0)
            if kind == "work":
                assert callable(what)
                what()
            elif kind == "record":
                assert isinstance(what, FakeEvent)
                what.happened = True

    def _held(self, stream: FakeStream) -> bool:
        kind, what = stream.queue[0]
        return kind == "wait" and isinstance(what, FakeEvent) and not what.happened


class MemoryLaunchers:
    """Block kernels that move real memory; the other launchers are not called here."""

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine
        self.slices: list[int] = []

    def _do(self, work: Callable[[], None]) -> None:
        if self._machine is None:
            work()
        else:
            self._machine.launch(work)

    def copy_blocks(self, bases: torch.Tensor, pairs: torch.Tensor, block_bytes: int) -> None:
        def work() -> None:
            for base in bases.tolist():
                for source, destination in pairs.tolist():
                    ctypes.memmove(base + destination * block_bytes, base + source * block_bytes, block_bytes)

        self._do(work)

    def gather_blocks(self, bases: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor, block_bytes: int) -> None:
        self._move(bases, ids, staging, block_bytes, into_staging=True)

    def scatter_blocks(self, bases: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor, block_bytes: int) -> None:
        self._move(bases, ids, staging, block_bytes, into_staging=False)

    def _move(
        self, bases: torch.Tensor, ids: torch.Tensor, staging: torch.Tensor, block_bytes: int, into_staging: bool
    ) -> None:
        assert ids.numel() * bases.numel() * block_bytes <= staging.numel()
        self.slices.append(ids.numel())

        def work() -> None:
            for i, block in enumerate(ids.tolist()):
                for j, base in enumerate(bases.tolist()):
                    inside = staging.data_ptr() + (i * bases.numel() + j) * block_bytes
                    outside = base + block * block_bytes
                    ctypes.memmove(*((inside, outside) if into_staging else (outside, inside)), block_bytes)

        self._do(work)

    def _absent(self, *_: object) -> None:
        raise AssertionError("not a block kernel")

    schedule_decode = attend = write_kv = _absent


def mover_of(launchers: Launchers) -> BlockMover:
    return BlockMover(launchers, CPU)


def expected(
    sources: Sequence[torch.Tensor], destinations: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    wanted = [cache.clone() for cache in destinations]
    for source, target in zip(sources, wanted, strict=True):
        for from_block, to_block in pairs:
            target[to_block] = source[from_block]
    return wanted


def equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_copied_blocks_equal_their_sources_in_every_layer_whatever_its_block_size() -> None:
    caches = [*caches_of(6), *caches_of(6, 2, (2, 3, 16, 4))]
    pairs = [(0, 5), (1, 3)]
    wanted = expected([cache.clone() for cache in caches], caches, pairs)
    mover = mover_of(MemoryLaunchers())
    mover.copy(caches, pairs)
    assert equal(caches, wanted)
    mover.copy(caches, [])
    assert equal(caches, wanted)


@given(st.integers(1, 9), st.permutations(range(8)), st.permutations(range(11)), st.integers(1, 3))
def test_swapped_blocks_arrive_in_every_layer_slice_by_slice(
    count: int, from_ids: list[int], to_ids: list[int], per_slice: int
) -> None:
    device, host = caches_of(8), caches_of(11)
    pairs = list(zip(from_ids, to_ids))[:count]
    launchers = MemoryLaunchers()
    slice_bytes = 3 * device[0][0].numel() * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_blocks, "STAGING_BYTES", 2 * per_slice * slice_bytes)
        wanted = expected(device, host, pairs)
        mover = mover_of(launchers)
        mover.swap(device, host, pairs)
    assert equal(host, wanted)
    assert max(launchers.slices) <= per_slice
    mover.swap(host, device, [(to_block, from_block) for from_block, to_block in pairs])
    assert equal(device, caches_of(8)), "there and back again"


@pytest.mark.parametrize("gathers_at_home", [True, False], ids=["out", "in"])
@pytest.mark.parametrize("seed", range(20))
def test_slices_do_not_race_whatever_the_order_of_the_streams(
    seed: int, gathers_at_home: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    sources, destinations = caches_of(9), caches_of(12)
    monkeypatch.setattr(cuda_blocks, "STAGING_BYTES", 2 * 2 * 3 * sources[0][0].numel() * 4)
    monkeypatch.setattr(cuda_blocks, "_on", machine.on)
    mover = mover_of(MemoryLaunchers(machine))
    monkeypatch.setattr(mover, "_streams", lambda: tuple(machine.streams))
    pairs = [(i, 11 - i) for i in range(9)]
    wanted = expected(sources, destinations, pairs)
    # What the step queued before must be seen, and what it queues afterwards must see the result.
    fresh = [cache + 1 for cache in sources]
    wanted = expected(fresh, destinations, pairs)
    machine.launch(lambda: [cache.copy_(new) for cache, new in zip(sources, fresh, strict=True)] and None)
    from_layers, to_layers = mover._layers_of(sources), mover._layers_of(destinations)
    ids = torch.tensor([[a for a, _ in pairs], [b for _, b in pairs]])
    mover._swap_layers(from_layers[0], to_layers[0], ids, gathers_at_home)
    seen: list[torch.Tensor] = []
    machine.launch(lambda: seen.extend(cache.clone() for cache in destinations))
    machine.launch(lambda: [cache.zero_() for cache in sources] and None)
    machine.run(seed)
    assert equal(seen, wanted)


def test_blocks_that_do_not_exist_or_do_not_match_are_refused() -> None:
    mover = mover_of(MemoryLaunchers())
    with pytest.raises(ValueError, match="block 6 is outside a cache of 6"):
        mover.copy(caches_of(6), [(0, 6)])
    with pytest.raises(ValueError, match="block -1"):
        mover.swap(caches_of(6), caches_of(4), [(-1, 0)])
    with pytest.raises(ValueError, match="block 5 is outside a cache of 4"):
        mover.swap(caches_of(6), caches_of(4), [(0, 5)])
    with pytest.raises(ValueError, match="differ in size"):
        mover.swap(caches_of(6), caches_of(4, shape=(2, 1, 16, 8)), [(0, 0)])
    with pytest.raises(ValueError, match="contiguous"):
        mover.copy([cache[:, :1] for cache in caches_of(6)], [(0, 1)])
