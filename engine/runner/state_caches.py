"""States of layers that keep one in the place of keys and values: where they lie in the pages of the KV cache, and what
a step makes of them.

A bundle's pages, each with its part in every cache, are one row of bytes; a layer's state is a piece of it
(`engine.layer_groups.state_starts`). A step reads a sequence's state where the table's entry before its first token
says, and writes it wherever an entry of a block that it computes in names a bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from attention_backends.interface import AttentionBatch
from engine.cpu_kernels.states import StatePlace
from engine.errors import EngineError
from engine.kv_cache.block_pool import NO_BLOCK
from engine.layer_groups import State, state_page, state_starts
from engine.models.decoder_layer import Mixing
from engine.models.state_kernels import PIECE_BYTES, Piece, StateKernels, device_kernels
from engine.models.state_layers import Segment, StateStep
from engine.runner.state_drafts import Span, StateDrafts, sent_together
from engine.step import Rows, Writes


class _Run(NamedTuple):
    """A piece of a layer's state that lies in one page of one cache."""

    page: int
    cache: int
    start: int
    size: int
    """both in bytes"""


class StateCaches:
    def __init__(self, layers: Sequence[Mixing], dtype: torch.dtype, state: State) -> None:
        """`dtype`: of the model's numbers."""
        self._layers, self._pages = list(layers), state.pages
        self._sizes = [layer.facts.state_bytes(dtype.itemsize) for layer in layers]
        taps = {layer.facts.taps for layer in layers}
        if len(taps) > 1:
            raise EngineError(f"layers that keep states have convolutions of several lengths: {sorted(taps)}")
        (self._taps,) = taps
        self._caches: list[torch.Tensor] = []
        self._runs: list[list[_Run]] = []
        self._pieces: list[torch.Tensor] = []
        """of each layer, where there are kernels"""
        self._kernels: StateKernels | None = None
        self._blocks = torch.empty(0)
        self._tables: dict[int, list[int]] = {}
        """by row: its blocks, on the host, which plans every step"""
        self._step: StateStep | None = None
        self._num_tokens = 0
        self.drafts = StateDrafts()
        self.places: list[StatePlace | None] = []
        """of each layer's states, for native kernels"""

    @property
    def page_bytes(self) -> int:
        """That each has where no keys and values lie in them."""
        return state_page(state_starts(self._sizes)[-1], self._pages)

    def allocate(self, caches: Sequence[torch.Tensor]) -> None:
        """`caches` [blocks, elements] each: those of the attention. Raises EngineError where states do not fit into as
        many pages."""
        self._caches = [cache.view(torch.uint8) for cache in caches]
        num_blocks, device = len(caches[0]), caches[0].device
        self._blocks = torch.zeros(num_blocks, self._pages, dtype=torch.int64, device=device)
        self._blocks[:, 0] = torch.arange(num_blocks, device=device)
        starts, room = state_starts(self._sizes), self._pages * sum(cache.size(1) for cache in self._caches)
        if starts[-1] > room:
            raise EngineError(f"states of {starts[-1]} bytes do not fit into {self._pages} pages of {room} bytes")
        self._runs = [self._lie(start, size) for start, size in zip(starts, self._sizes)]
        words = all(run.start % 4 == 0 and run.size % 4 == 0 for runs in self._runs for run in runs)
        if device.type == "cuda" and words:
            self._kernels = device_kernels()
            self._pieces = [self._pieces_of(runs).to(device) for runs in self._runs]
        on_cpu = device.type == "cpu"
        self.places = [StatePlace(self._caches, self._blocks, start) if on_cpu else None for start in starts]

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

    def _pieces_of(self, runs: Sequence[_Run]) -> torch.Tensor:
        """As kernels have them: int64 [pieces, 5]."""
        pieces, at = list[Piece](), 0
        for run in runs:
            cache = self._caches[run.cache]
            for done in range(0, run.size, PIECE_BYTES):
                start, size = cache.data_ptr() + run.start + done, min(PIECE_BYTES, run.size - done)
                pieces.append(Piece(start, cache.stride(0), run.page, at + done, size))
            at += run.size
        return torch.tensor(pieces, dtype=torch.int64)

    def place(self, bundles: Sequence[Sequence[int]], appends: Writes, group: int) -> None:
        """As many blocks each are a bundle from now on; and what rows' tables hold of them, as `StepPlan.block_appends`
        says of all groups."""
        if bundles:
            (rows,) = sent_together([np.array(bundles, np.int64)], self._blocks.device)
            self._blocks[rows[:, 0]] = rows
        at = 0
        for of, row, start, length in appends.where.T.tolist() if len(appends) else ():
            if of == group:
                self._tables[row] = [*self._tables.get(row, [])[:start], *appends.values[at : at + length].tolist()]
            at += length

    def clean(self, blocks: Sequence[int]) -> None:
        """They held states, which read as keys and values may be no numbers."""
        if blocks:
            (where,) = sent_together([np.array(blocks, np.int64)], self._blocks.device)
            for cache in self._caches:
                cache.index_fill_(0, where, 0)

    def begin_step(self, batch: AttentionBatch, rows: Rows) -> None:
        """The calls of `mix` that follow belong to this."""
        device = batch.block_tables.device
        tables, spans = [self._tables[row] for row in rows.row.tolist()], self.drafts.begin_step(rows, device)
        self._num_tokens = rows.num_tokens
        step = _plan(spans, tables, batch.block_size, self._taps - 1, device)
        self._step = step._replace(kernels=self._kernels)

    def mix(self, x: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        """`pageloom::mix_states`, bound: shapes as there. Rows of padding become zeros."""
        step, tokens = self._step, self._num_tokens
        assert step is not None
        given = self.drafts.with_replayed(x[:tokens], layer)
        made = out[:tokens] if len(given) == tokens else out.new_empty(len(given), out.size(1))
        self._layers[layer](given, made, _OfLayer(self, layer, step))
        if len(given) != tokens:
            self.drafts.take_own(made, out[:tokens])
        out[tokens:] = 0

    def forgetful(self, lengths: Sequence[int], device: torch.device) -> Callable[..., None]:
        """What stands for `mix` before there are caches: new sequences of so many tokens, of which nothing is kept."""
        tables, spans = [[0]] * len(lengths), [Span(0, length, length) for length in lengths]
        step = _plan(spans, tables, max(lengths), self._taps - 1, device)

        def mix(x: torch.Tensor, out: torch.Tensor, layer: int) -> None:
            self._layers[layer](x, out, _Forgotten(step, self._sizes[layer]))

        return mix

    def read(self, layer: int, firsts: torch.Tensor) -> torch.Tensor:
        """uint8 [bundles, bytes]"""
        if self._kernels is not None:
            states = torch.empty(len(firsts), self._sizes[layer], dtype=torch.uint8, device=firsts.device)
            self._kernels.move(self._pieces[layer], self._blocks, firsts, states, write=False)
            return states
        pages = self._blocks[firsts]
        parts = [
            self._caches[run.cache][pages[:, run.page], run.start : run.start + run.size] for run in self._runs[layer]
        ]
        return torch.cat(parts, dim=1)

    def write(self, layer: int, firsts: torch.Tensor, states: torch.Tensor) -> None:
        """As `read` gives them."""
        if self._kernels is not None:
            self._kernels.move(self._pieces[layer], self._blocks, firsts, states.contiguous(), write=True)
            return
        pages, at = self._blocks[firsts], 0
        for run in self._runs[layer]:
            part = states[:, at : at + run.size]
            self._caches[run.cache][pages[:, run.page], run.start : run.start + run.size] = part
            at += run.size


class _OfLayer:
    """A `LayerStates`."""

    def __init__(self, caches: StateCaches, layer: int, step: StateStep) -> None:
        self._caches, self._layer, self.step = caches, layer, step
        self.place = caches.places[layer]

    def read(self) -> torch.Tensor:
        return self._caches.read(self._layer, self.step.read).masked_fill_(self.step.fresh, 0)

    def write(self, states: torch.Tensor) -> None:
        self._caches.write(self._layer, self.step.written, states)


class _Forgotten:
    """A `LayerStates` that keeps nothing."""

    place = None

    def __init__(self, step: StateStep, size_bytes: int) -> None:
        self.step, self._size = step, size_bytes

    def read(self) -> torch.Tensor:
        return torch.zeros(len(self.step.read), self._size, dtype=torch.uint8, device=self.step.read.device)

    def write(self, states: torch.Tensor) -> None:
        """Nobody reads it."""


def _plan(
    spans: Sequence[Span], tables: Sequence[Sequence[int]], size: int, before: int, device: torch.device
) -> StateStep:
    """`tables`: blocks of each row; `size`: of a block; `before`: inputs that a state holds."""
    fresh, read, written = list[bool](), list[int](), list[int]()
    past, own, last = list[range](), list[int](), list[range]()
    singles, segments = list[tuple[int, int, int]](), list[Segment]()
    sequences, writes = list[tuple[int, int, int, int]](), list[tuple[int, int]]()
    at = 0  # of all inputs: before each sequence's own come as many as its state holds
    for row, (begin, certain, upto) in enumerate(spans):
        query_len = upto - begin
        fresh.append(begin == 0)
        read.append(tables[row][(begin - 1) // size] if begin else 0)
        past.append(range(at, at + before))
        token = done = len(own)
        own.extend(range(at + before, at + before + query_len))
        sequences.append((token, len(own), read[-1] if begin else -1, len(written)))
        for block in range(begin // size, -(-certain // size)) if query_len else ():
            if (kept := tables[row][block]) != NO_BLOCK:
                end = min((block + 1) * size, certain) - begin
                segments.append(Segment(row, done, token + end, len(written)))
                done = token + end
                writes.append((done, kept))
                written.append(kept)
                last.append(range(at + end, at + end + before))
        if done < len(own):
            segments.append(Segment(row, done, len(own), -1))
        elif query_len == 1:
            singles.append((row, token, segments.pop().write))
        at += before + query_len
    shapes = [(-1, 1), (-1,), (-1, before), (-1,), (-1,), (-1, before), (-1, 3), (-1, 4), (-1, 2)]
    numbers = [fresh, read, past, own, written, last, singles, sequences, writes]
    arrays = [np.array(each, np.int64).reshape(shape) for each, shape in zip(numbers, shapes)]
    arrays[6] = arrays[6].T
    sent = sent_together(arrays, device)
    return StateStep(sent[0] > 0, *sent[1:7], segments, *sent[7:], None)  # type: ignore[arg-type,call-arg]  # nine
