"""From a plan's scheduled rows to the tensors of one step: the host sends four integers per sequence, kernels do the
rest.

Two calls per step, both on the input stream: `send` starts the copy while the step before may still compute, `build`
queues the kernels once that step has left the tables and the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from attention_backends.interface import AttentionBatch
from compilation.graphs.dispatcher import Dispatch
from engine.runner.kernels import InputBuffers, InputKernels, StepSizes
from engine.runner.request_table import RequestTable
from engine.runner.staging import BufferRing
from engine.runner.streams import Streams
from engine.step import Rows

ChooseRoute = Callable[[int, bool], Dispatch]
"""(tokens, whether every sequence has exactly one) → how the step runs"""


def run_eagerly(num_tokens: int, uniform_decode: bool) -> Dispatch:
    """`ChooseRoute` where nothing is captured."""
    return Dispatch("eager", num_tokens)


@dataclass(frozen=True)
class SentStep:
    """What the host knows of a step whose fields are on their way to the device."""

    num_seqs: int
    num_tokens: int
    one_token_each: bool
    query_lens: list[int]
    seq_lens: list[int]
    """this step's tokens included"""
    sample_rows: list[int]
    rows: Rows
    """the plan's, as far as the host knows them: see `BatchBuilder.send`"""
    positions_each: np.ndarray | None
    """of each row that samples, at how many positions; None: at one"""


@dataclass(frozen=True)
class StepBatch:
    """One step's inputs; tensors are views of buffers that the next step overwrites (in stream order)."""

    dispatch: Dispatch
    num_tokens: int
    """real ones; input_ids and positions have `dispatch.size`"""
    input_ids: torch.Tensor
    """int64 [padded tokens]"""
    positions: torch.Tensor
    """int64 [padded tokens]"""
    logits_indices: torch.Tensor
    """int64 [samples]"""
    sample_rows: torch.Tensor
    """int64 [samples]"""
    sample_positions: torch.Tensor
    """int64 [samples]: where the sampled tokens go"""
    sample_rows_host: list[int]
    rows: Rows
    positions_each: np.ndarray | None
    """both as in `SentStep`"""
    attention: list[AttentionBatch]
    """of each layer group"""
    every_token_samples: bool
    """logits_indices is 0 .. tokens - 1: nothing to gather"""


class _Extents(NamedTuple):
    """How far a step goes into each buffer."""

    size: int
    """tokens, padding included"""
    samples: int
    seqs: int
    tokens: int
    """those that attention sees"""


@dataclass(frozen=True)
class _Views:
    """The parts of `InputBuffers` that a step uses; names as there."""

    extents: _Extents
    input_ids: torch.Tensor
    positions: torch.Tensor
    logits_indices: torch.Tensor
    sample_rows: torch.Tensor
    sample_positions: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: list[torch.Tensor]
    """of each layer group"""
    slot_mapping: list[torch.Tensor]


class BatchBuilder:
    """Owns the step's input buffers and fills them from the request table."""

    def __init__(
        self,
        table: RequestTable,
        kernels: InputKernels,
        max_tokens: int,
        block_size: int,
        streams: Streams,
        ring_depth: int = 1,
        max_seqs: int | None = None,
    ) -> None:
        """`ring_depth`: host buffers, where copies are queued. `max_seqs`: rows of a step, and the drafts that it
        computes; None: the table's rows."""
        rows, device = max_seqs or table.max_rows, table.tokens.device
        self._max_seqs = rows
        self._table = table
        self._kernels = kernels
        self._max_tokens = max_tokens
        self._block_size = block_size
        self._streams = streams
        self._step = torch.zeros(4, rows + 1, dtype=torch.int32, device=device)
        self._ring = BufferRing(streams, 4 * (rows + 1), ring_depth) if streams.queued else None
        """None: the device is the host, and the fields are written where the kernels read them"""
        self._step_in_place = self._step.numpy() if self._ring is None else np.empty(0, dtype=np.int32)
        self._counting = np.arange(rows + 1, dtype=np.int32)
        self._kept_views: dict[_Extents, _Views] = {}

        def int64(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.buffers = InputBuffers(
            input_ids=int64(max_tokens),
            positions=int64(max_tokens),
            slot_mapping=int64(table.num_groups, max_tokens),
            seq_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            query_start_loc=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            logits_indices=int64(rows),
            sample_rows=int64(rows),
            sample_positions=int64(rows),
            block_tables=torch.zeros(table.num_groups, rows, table.max_blocks, dtype=torch.int32, device=device),
        )

    @property
    def size_bytes(self) -> int:
        tensors = [t for t in vars(self.buffers).values() if isinstance(t, torch.Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def send(self, rows: Rows) -> SentStep:
        """Start the copy of the step's fields. Where a row is `unsure`, the device knows where it starts, and what the
        host says of its place is an upper bound.

        Raises ValueError where the plan exceeds the rows or the token budget that this runner was built for.
        """
        if len(rows) > self._table.max_rows:
            raise ValueError(f"a plan of {len(rows)} rows exceeds max_num_seqs ({self._table.max_rows})")
        positions_each, each = None, rows
        if len(rows) and rows.samples.max() > 1:
            positions_each = rows.samples[rows.samples > 0]
            each = _one_by_one(rows)
        n = len(each)
        if n > self._max_seqs:
            raise ValueError(f"a plan that samples at {n} positions exceeds {self._max_seqs}")
        query_lens = each.query_lens.tolist()
        num_tokens = sum(query_lens)
        if num_tokens > self._max_tokens:
            raise ValueError(f"a plan of {num_tokens} tokens exceeds max_num_batched_tokens ({self._max_tokens})")
        samples = each.samples > 0
        one_token_each = num_tokens == n and 0 not in query_lens
        seq_lens = (each.computed + each.query_lens).tolist()
        fields = each.columns
        if rows.unsure.any():
            first = np.repeat(rows.computed, np.maximum(rows.samples, 1))
            fields = fields.copy()
            np.copyto(fields[1], ~(each.computed - first), where=each.unsure > 0)
        self._copy(fields, one_token_each and bool(samples.all()))
        sample_rows = each.row[samples].tolist()
        return SentStep(n, num_tokens, one_token_each, query_lens, seq_lens, sample_rows, rows, positions_each)

    def build(self, sent: SentStep, choose: ChooseRoute = run_eagerly) -> StepBatch:
        """Queue the kernels that build the step last sent, padded as `choose` says."""
        n, tokens, samples = sent.num_seqs, sent.num_tokens, len(sent.sample_rows)
        dispatch = choose(tokens, sent.one_token_each)
        full = dispatch.route == "full"
        seqs = dispatch.size if full else n
        longest = max(sent.query_lens)
        sizes = StepSizes(n, tokens, samples, seqs, dispatch.size, longest, int(full), sent.one_token_each)
        table, kernels, step = self._table, self._kernels, self._step
        max_seq_len = max(sent.seq_lens)
        kernels.prepare_inputs(
            step, table.tokens, table.lengths, table.block_tables, self.buffers, sizes, self._block_size
        )
        columns = -(-max_seq_len // self._block_size)
        kernels.gather_block_tables(table.block_tables, step[0], self.buffers.block_tables, sizes, columns)
        views = self._views(_Extents(dispatch.size, samples, seqs, dispatch.size if full else tokens))
        attention = self._attention_batches(
            views, full, sent.one_token_each, longest, max_seq_len, sent.query_lens, sent.seq_lens
        )
        return StepBatch(
            dispatch=dispatch,
            num_tokens=tokens,
            input_ids=views.input_ids,
            positions=views.positions,
            logits_indices=views.logits_indices,
            sample_rows=views.sample_rows,
            sample_positions=views.sample_positions,
            sample_rows_host=sent.sample_rows,
            rows=sent.rows,
            positions_each=sent.positions_each,
            attention=attention,
            every_token_samples=sent.one_token_each and samples == n,
        )

    def clear(self, size: int) -> None:
        """Make the first `size` tokens, on the current stream, ones that have no effect: they exist and write no KV."""
        self.buffers.input_ids[:size].zero_()
        self.buffers.positions[:size].zero_()
        self.buffers.slot_mapping[:, :size].fill_(-1)

    def stand_in(self, size: int) -> list[AttentionBatch]:
        """`clear`, and `size` sequences of length 1: what a full decode graph is captured on. Block 0 is read, whoever
        owns it, and what is computed from it goes nowhere."""
        self.clear(size)
        starts, ones = self.buffers.query_start_loc[: size + 1], [1] * size
        self.buffers.seq_lens[:size].fill_(1)
        self.buffers.block_tables[:, :size].zero_()
        starts.copy_(torch.arange(size + 1, dtype=torch.int32, device=starts.device))
        return self._attention_batches(self._views(_Extents(size, size, size, size)), True, True, 1, 1, ones, ones)

    def _views(self, extents: _Extents) -> _Views:
        """The parts of the buffers that a step uses. A step of decodes meets the same ones again: those are kept, and
        there are at most as many as rows (times padded sizes)."""
        kept = self._kept_views.get(extents)
        if kept is not None:
            return kept
        out, (size, samples, seqs, tokens) = self.buffers, extents
        views = _Views(
            extents=extents,
            input_ids=out.input_ids[:size],
            positions=out.positions[:size],
            logits_indices=out.logits_indices[:samples],
            sample_rows=out.sample_rows[:samples],
            sample_positions=out.sample_positions[:samples],
            query_start_loc=out.query_start_loc[: seqs + 1],
            seq_lens=out.seq_lens[:seqs],
            block_tables=[tables[:seqs] for tables in out.block_tables],
            slot_mapping=[slots[:tokens] for slots in out.slot_mapping],
        )
        if samples == tokens:
            self._kept_views[extents] = views
        return views

    def _attention_batches(
        self,
        views: _Views,
        full: bool,
        one_token_each: bool,
        max_query_len: int,
        max_seq_len: int,
        query_lens: list[int],
        seq_lens: list[int],
    ) -> list[AttentionBatch]:
        seqs = views.extents.seqs
        num_decodes = seqs if one_token_each else _leading_ones(query_lens)
        return [
            AttentionBatch(
                num_seqs=seqs,
                num_tokens=views.extents.tokens,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                query_start_loc=views.query_start_loc,
                seq_lens=views.seq_lens,
                block_tables=views.block_tables[group],
                slot_mapping=views.slot_mapping[group],
                block_size=self._block_size,
                num_decodes=num_decodes,
                query_lens_host=query_lens,
                seq_lens_host=seq_lens,
                group=group,
                graph_size=seqs if full else None,
            )
            for group in range(self._table.num_groups)
        ]

    def _copy(self, fields: np.ndarray, decodes: bool) -> None:
        """The `step` argument of `prepare_inputs`: to the device, or into its place. `decodes`: every sequence has one
        token and samples."""
        n = fields.shape[1]
        host, step = self._acquire()
        step[:2, :n] = fields[:2]
        if decodes:
            step[2:, : n + 1] = self._counting[: n + 1]
        else:
            samples = fields[3]
            step[2, 0] = 0
            np.cumsum(fields[2], out=step[2, 1 : n + 1])
            step[3, :n] = np.where(samples, np.cumsum(samples) - 1, -1)
        self._commit(host)

    def _acquire(self) -> tuple[torch.Tensor, np.ndarray]:
        if self._ring is None:
            return self._step, self._step_in_place
        host = self._ring.acquire()[: self._step.numel()].view_as(self._step)
        return host, host.numpy()

    def _commit(self, host: torch.Tensor) -> None:
        if self._ring is not None:
            self._step.copy_(host, non_blocking=True)
            self._ring.commit()


def _one_by_one(rows: Rows) -> Rows:
    """Where drafts are computed, every position that samples becomes a sequence of its own, which ends there: the same
    computation, bit for bit, as without drafts, because a step writes its KV before it reads any."""
    each = np.maximum(rows.samples, 1)
    row, computed, query_lens, samples, unsure = np.repeat(rows.columns, each, axis=1)
    ahead = np.arange(len(row)) - np.repeat(np.cumsum(each) - each, each)
    first = query_lens - np.maximum(samples, 1) + 1
    start = np.where(ahead, computed + first + ahead - 1, computed)
    columns = (row, start, np.where(ahead, 1, first), samples > 0, unsure)
    return Rows(np.array(columns, dtype=np.int32))


def as_known(rows: Rows, lengths: np.ndarray, drafted: Mapping[int, int]) -> Rows:
    """Where the device is the host: each row where it really starts, with as many drafts as there are. `lengths`: int32
    [table rows], the tokens that each knows; `drafted`: drafts, by row, of those that compute others than planned."""
    if not drafted and not rows.unsure.any():
        return rows
    columns = rows.columns.copy()
    row, computed, query_lens, samples, unsure = columns
    np.copyto(computed, lengths[row] - 1, where=unsure > 0)
    unsure[:] = 0
    for index in np.flatnonzero(samples > 1).tolist():
        missing = samples[index] - 1 - drafted.get(int(row[index]), samples[index] - 1)
        query_lens[index] -= missing
        samples[index] -= missing
    return Rows(columns)


def _leading_ones(query_lens: list[int]) -> int:
    for index, length in enumerate(query_lens):
        if length != 1:
            return index
    return len(query_lens)
