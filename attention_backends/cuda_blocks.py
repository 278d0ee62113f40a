"""Moving whole blocks between and inside caches on a CUDA device: copy-on-write, and swapping with host memory.

Swapping is two kernels a slice: one gathers blocks of all layers into a staging buffer on the device, one scatters them
to where they belong. Host caches are pinned, so kernels reach them at their host addresses (unified addressing) and the
data crosses the bus once, at bus speed, without the host: a pinned staging buffer in between would need the host to
wait for the device and to copy everything again. The half that crosses the bus runs on a side stream; with two staging
halves it overlaps the other half of the neighbouring slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from attention_backends.cuda_launchers import Launchers

STAGING_BYTES = 32 << 20
"""both halves together; allocated at the first swap"""


@dataclass(frozen=True, slots=True)
class _Layers:
    """Caches whose blocks have the same size."""

    bases: torch.Tensor
    block_bytes: int

    @property
    def slice_bytes(self) -> int:
        return self.block_bytes * self.bases.numel()


class BlockMover:
    """One runner's block traffic; `device` is where the kernels run."""

    def __init__(self, launchers: Launchers, device: torch.device) -> None:
        self._launchers = launchers
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._layers: dict[tuple[tuple[int, int], ...], tuple[_Layers, ...]] = {}
        self._staging: tuple[torch.Tensor, torch.Tensor] | None = None
        self._side: torch.cuda.Stream | None = None

    def copy(self, caches: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
        """Block source → destination in every cache. Raises ValueError for a block that a cache does not have."""
        if not pairs or not caches:
            return
        _check_blocks(caches, [pair[0] for pair in pairs])
        _check_blocks(caches, [pair[1] for pair in pairs])
        on_device = self._to_device(pairs)
        for layers in self._layers_of(caches):
            self._launchers.copy_blocks(layers.bases, on_device, layers.block_bytes)

    def reaches(self, caches: Sequence[torch.Tensor]) -> bool:
        """Whether kernels may read and write these caches: they lie on the device, or in pinned memory."""
        return not self._on_gpu or all(cache.is_cuda or cache.is_pinned() for cache in caches)

    def swap(
        self,
        sources: Sequence[torch.Tensor],
        destinations: Sequence[torch.Tensor],
        pairs: Sequence[tuple[int, int]],
    ) -> None:
        """Block source → destination in every layer; both sides must be within reach. Raises ValueError for blocks that
        do not exist or lists that do not match."""
        if not pairs or not sources:
            return
        from_blocks, to_blocks = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        _check_blocks(sources, from_blocks)
        _check_blocks(destinations, to_blocks)
        from_layers, to_layers = self._layers_of(sources), self._layers_of(destinations)
        if [x.slice_bytes for x in from_layers] != [x.slice_bytes for x in to_layers]:
            raise ValueError("swap_blocks: blocks of the sources and of the destinations differ in size")
        ids = self._to_device([from_blocks, to_blocks])
        gathers_at_home = sources[0].is_cuda
        for each_from, each_to in zip(from_layers, to_layers, strict=True):
            self._swap_layers(each_from, each_to, ids, gathers_at_home)

    def _swap_layers(self, source: _Layers, destination: _Layers, ids: torch.Tensor, gathers_at_home: bool) -> None:
        halves = self._staging_halves(source.slice_bytes)
        per_slice = halves[0].numel() // source.slice_bytes
        home, away = self._streams()
        producer, consumer = (home, away) if gathers_at_home else (away, home)
        if home is not None and away is not None:
            away.wait_stream(home)
        emptied: list[torch.cuda.Event | None] = [None, None]
        for number, first in enumerate(range(0, ids.shape[1], per_slice)):
            half = number % 2
            last = min(first + per_slice, ids.shape[1])
            with _on(producer):
                _wait(producer, emptied[half])
                self._launchers.gather_blocks(source.bases, ids[0, first:last], halves[half], source.block_bytes)
                filled = _mark(producer)
            with _on(consumer):
                _wait(consumer, filled)
                self._launchers.scatter_blocks(
                    destination.bases, ids[1, first:last], halves[half], destination.block_bytes
                )
                emptied[half] = _mark(consumer)
        if home is not None and away is not None:
            home.wait_stream(away)

    def _streams(self) -> tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]:
        """The caller's stream and the side stream; nothing where there are none."""
        if not self._on_gpu:
            return None, None
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return torch.cuda.current_stream(self._device), self._side

    def _staging_halves(self, slice_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._staging is None or self._staging[0].numel() < slice_bytes:
            size = max(STAGING_BYTES // 2, slice_bytes)
            # Replaced halves are safe to free: the caller's stream has waited for the side stream.
            both = torch.empty(2, size, dtype=torch.uint8, device=self._device)
            self._staging = (both[0], both[1])
        return self._staging

    def _to_device(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """int64, without waiting for the device."""
        if not self._on_gpu:
            return torch.tensor(rows, dtype=torch.int64, device=self._device)
        return torch.tensor(rows, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)

    def _layers_of(self, caches: Sequence[torch.Tensor]) -> tuple[_Layers, ...]:
        """The caches by size of block, in order of first appearance, with their addresses on the device."""
        sizes = [(cache.data_ptr(), cache.stride(0) * cache.element_size()) for cache in caches]
        if any(not cache.is_contiguous() for cache in caches):  # addresses come again when their caches have gone
            raise ValueError("caches must be contiguous")
        key = tuple(sizes)
        if key not in self._layers:
            groups: dict[int, list[int]] = {}
            for address, block_bytes in sizes:
                groups.setdefault(block_bytes, []).append(address)
            self._layers[key] = tuple(_Layers(self._to_device([group])[0], size) for size, group in groups.items())
        return self._layers[key]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
    if stream is not None and event is not None:
        stream.wait_event(event)


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return None if stream is None else stream.record_event()


def _check_blocks(caches: Sequence[torch.Tensor], blocks: Sequence[int]) -> None:
    lowest, highest = min(blocks), max(blocks)
    for cache in caches:
        if lowest < 0 or highest >= cache.shape[0]:
            raise ValueError(f"block {lowest if lowest < 0 else highest} is outside a cache of {cache.shape[0]} blocks")
