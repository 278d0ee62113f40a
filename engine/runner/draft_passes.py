"""What proposers that are models have in common: one pass after another over one token of each of some rows.

Layers of a draft are layers behind the target's: their keys and values lie in the same blocks, in caches of their own,
so whoever plans steps need not know of them; a block is only larger. A pass takes its place in a row from the device's
`RequestTable.lengths`, so nothing waits for the host to learn it. Steps come one after another, and passes of a step
before its own inputs are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention_backends.interface import AttentionBatch
from engine.runner.kernels import InputKernels
from engine.runner.paged_attention import PagedAttention
from engine.runner.request_table import RequestTable
from engine.sampling import Sampler
from engine.sampling.upload import upload


@dataclass(frozen=True)
class DraftRows:
    """Rows that propose at once, those with most drafts first."""

    numbers: list[int]
    counts: list[int]
    """drafts of each"""
    rows: torch.Tensor
    """int64 [rows]: `numbers` on the device"""
    known: torch.Tensor
    """int64 [rows]: tokens of each that are certain"""

    def at_least(self, count: int) -> int:
        """How many rows, the first ones, have so many drafts."""
        return sum(each >= count for each in self.counts)


class DraftPasses:
    """Of one runner. `group`: the layer group whose block tables the draft's layers share."""

    def __init__(
        self,
        table: RequestTable,
        sampler: Sampler,
        kernels: InputKernels,
        attention: PagedAttention,
        block_size: int,
        group: int,
    ) -> None:
        self.table, self.attention = table, attention
        self._sampler, self._kernels = sampler, kernels
        self._block_size, self._group = block_size, group
        self._device = table.tokens.device
        self._starts = torch.arange(2 * table.max_rows + 1, dtype=torch.int32, device=self._device)

    def rows_of(self, rows: Sequence[int], counts: Sequence[int]) -> DraftRows | None:
        """None: nobody has any."""
        order = sorted((at for at, count in enumerate(counts) if count), key=lambda at: -counts[at])
        if not order:
            return None
        numbers = [rows[at] for at in order]
        on_device = self.upload(numbers)
        known = self.table.lengths[on_device].to(torch.int64)
        return DraftRows(numbers, [counts[at] for at in order], on_device, known)

    def upload(self, values: Sequence[int]) -> torch.Tensor:
        """int64, without a wait."""
        return upload(values, torch.int64, self._device)

    def begin(self, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Attention of what follows is that of one token of each of `rows` (int64; one may be there several times), at
        its position."""
        count = len(rows)
        lengths = positions + 1
        # Elsewhere the host knows only what none can exceed.
        most = self.table.tokens.shape[1] - 1
        host = lengths.tolist() if self._device.type == "cpu" else [most] * count
        table, size = self.table.block_tables[self._group], self._block_size
        block = positions // size
        batch = AttentionBatch(
            num_seqs=count,
            num_tokens=count,
            max_query_len=1,
            max_seq_len=max(host),
            query_start_loc=self._starts[: count + 1],
            seq_lens=lengths.to(torch.int32),
            block_tables=table[rows, : -(-max(host) // size)],
            slot_mapping=table[rows, block].to(torch.int64) * size + positions % size,
            block_size=size,
            num_decodes=count,
            query_lens_host=[1] * count,
            seq_lens_host=host,
            group=self._group,
        )
        self.attention.begin_pass(batch)

    def write(self, drafting: DraftRows, logits: torch.Tensor, index: int) -> torch.Tensor:
        """Draw draft `index` (from 0) of the first rows from `logits` [rows, vocab_size], as the target would, and put
        it behind what the row knows. int64 [rows]."""
        count = len(logits)
        rows, positions = drafting.rows[:count], drafting.known[:count] + index
        tokens = self.table.tokens
        drafts = self._sampler.draft(logits, rows, drafting.numbers[:count], positions, tokens)
        self._kernels.post_update(tokens, self.table.lengths, rows, positions, drafts, drafting.known[:count])
        return drafts
