"""States of layers that keep one in the place of keys and values: where they lie in the pages of the KV cache, and what
a step makes of them.

A bundle's pages, each with its part in every cache, are one row of bytes; a layer's state is a piece of it
(`engine.layer_groups.state_starts`). A step reads a sequence's state where the table's entry before its first token
says, and writes it wherever an entry of a block that it computes in names a bundle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from attention_backends.interface import AttentionBatch
from engine.errors import EngineError
from engine.kv_cache.block_pool import NO_BLOCK
from engine.layer_groups import State, state_starts
from engine.models.facts import ConvFacts

ConvWeights = tuple[torch.Tensor, torch.Tensor | None]
"""[channels, 1, taps], the newest input's last; and a bias [channels]"""


class _Run(NamedTuple):
    """A piece of a layer's state that lies in one page of one cache."""

    page: int
    cache: int
    start: int
    size: int
    """both in bytes"""


class _Step(NamedTuple):
    """Index arrays of one step, which all layers share."""

    fresh: torch.Tensor
    """bool [sequences, 1, 1]: has no state yet"""
    read: torch.Tensor
    """int64 [sequences]: the first block of the bundle that each reads; 0 where it is fresh"""
    past: torch.Tensor
    """int64 [sequences, taps - 1]: where the inputs before a sequence's own go, of all inputs one after the other"""
    own: torch.Tensor
    """int64 [tokens]: where a token's goes"""
    written: torch.Tensor
    """int64 [writes]: first blocks of bundles"""
    last: torch.Tensor
    """int64 [writes, taps - 1]: of all inputs, those that they are to hold"""


class StateCaches:
    def __init__(
        self, layers: Sequence[ConvFacts], weights: Sequence[ConvWeights], dtype: torch.dtype, group: int, state: State
    ) -> None:
        """`dtype`: of the states' numbers. `group`: which of a step's batches has the tables."""
        self._layers, self._weights, self._dtype = list(layers), list(weights), dtype
        self.group, self._pages = group, state.pages
        self._taps = {layer.taps for layer in layers}
        if len(self._taps) > 1:
            raise EngineError(f"layers that keep states have convolutions of several lengths: {sorted(self._taps)}")
        self._caches: list[torch.Tensor] = []
        self._runs: list[list[_Run]] = []
        self._blocks = torch.empty(0)
        self._step: _Step | None = None

    def allocate(self, caches: Sequence[torch.Tensor]) -> None:
        """`caches` [blocks, elements] each: those of the attention."""
        self._caches = [cache.view(torch.uint8) for cache in caches]
        num_blocks, device = len(caches[0]), caches[0].device
        self._blocks = torch.zeros(num_blocks, self._pages, dtype=torch.int64, device=device)
        self._blocks[:, 0] = torch.arange(num_blocks, device=device)
        sizes = [layer.state_bytes(self._dtype.itemsize) for layer in self._layers]
        self._runs = [self._lie(start, size) for start, size in zip(state_starts(sizes), sizes)]

    def _lie(self, start: int, size: int) -> list[_Run]:
        """From that byte of a bundle on."""
        widths = [cache.size(1) for cache in self._caches]
        runs, end, at = [], start + size, 0
        for page in range(self._pages):
            for cache, width in enumerate(widths):
                low, high = max(start, at), min(end, at + width)
                if low < high:
                    runs.append(_Run(page, cache, low - at, high - low))
                at += width
        return runs

    def place(self, bundles: Sequence[Sequence[int]]) -> None:
        """As many blocks each are a bundle from now on."""
        if bundles:
            rows = torch.tensor(bundles, dtype=torch.int64).to(self._blocks.device)
            self._blocks[rows[:, 0]] = rows

    def clean(self, blocks: Sequence[int]) -> None:
        """They held states, which read as keys and values may be no numbers."""
        if blocks:
            where = torch.tensor(blocks, dtype=torch.int64).to(self._blocks.device)
            for cache in self._caches:
                cache[where] = 0

    def begin_step(self, batch: AttentionBatch) -> None:
        """The calls of `mix` that follow belong to this."""
        (taps,) = self._taps
        size, device, before = batch.block_size, batch.block_tables.device, taps - 1
        tables = batch.block_tables.tolist()
        fresh, read, written = list[bool](), list[int](), list[int]()
        past, own, last = list[range](), list[int](), list[range]()
        at = 0  # of all inputs: before each sequence's own come as many as its state holds
        for row, (query_len, seq_len) in enumerate(zip(batch.query_lens_host, batch.seq_lens_host, strict=True)):
            begin = seq_len - query_len
            fresh.append(begin == 0)
            read.append(tables[row][(begin - 1) // size] if begin else 0)
            past.append(range(at, at + before))
            own.extend(range(at + before, at + before + query_len))
            for block in range(begin // size, -(-seq_len // size)) if query_len else ():
                if tables[row][block] != NO_BLOCK:
                    end = at + min((block + 1) * size, seq_len) - begin
                    written.append(tables[row][block])
                    last.append(range(end, end + before))
            at += before + query_len

        def on_device(values: object, *shape: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64).view(*shape).to(device)

        self._step = _Step(
            torch.tensor(fresh, device=device).view(-1, 1, 1),
            on_device(read, -1),
            on_device([list(each) for each in past], -1, before),
            on_device(own, -1),
            on_device(written, -1),
            on_device([list(each) for each in last], -1, before),
        )

    def mix(self, x: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        """`pageloom::mix_states`, bound: shapes as there. Rows of padding become zeros."""
        step, (weight, bias) = self._step, self._weights[layer]
        assert step is not None
        tokens, taps = len(step.own), weight.size(2)
        b, c, given = x[:tokens].chunk(3, dim=1)
        inputs = x.new_empty(step.past.numel() + tokens, given.size(1))
        inputs[step.own] = b * given
        state = self._read(layer, step.read).masked_fill_(step.fresh, 0)
        inputs[step.past.flatten()] = state.flatten(0, 1)
        sums = torch.zeros_like(given, dtype=torch.float32)
        for tap in range(taps):
            sums += inputs[step.own - (taps - 1 - tap)].float() * weight[:, 0, tap].float()
        if bias is not None:
            sums += bias.float()
        out[:tokens] = c * sums.to(x.dtype)
        out[tokens:] = 0
        self._write(layer, step.written, inputs[step.last])

    def _read(self, layer: int, firsts: torch.Tensor) -> torch.Tensor:
        """[bundles, taps - 1, channels]"""
        pages = self._blocks[firsts]
        parts = [
            self._caches[run.cache][pages[:, run.page], run.start : run.start + run.size] for run in self._runs[layer]
        ]
        spec = self._layers[layer]
        return torch.cat(parts, dim=1).view(self._dtype).view(len(firsts), spec.taps - 1, spec.channels)

    def _write(self, layer: int, firsts: torch.Tensor, states: torch.Tensor) -> None:
        pages, data, at = self._blocks[firsts], states.flatten(1).contiguous().view(torch.uint8), 0
        for run in self._runs[layer]:
            part = data[:, at : at + run.size]
            self._caches[run.cache][pages[:, run.page], run.start : run.start + run.size] = part
            at += run.size
