"""From a plan's scheduled rows to the tensors of one step: the host sends four integers per sequence, kernels do the
rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attention_backends.interface import AttentionBatch
from engine.runner.kernels import InputBuffers, InputKernels, StepSizes
from engine.runner.request_table import RequestTable
from engine.runner.staging import BufferRing
from engine.step import ScheduledRow


@dataclass(frozen=True)
class StepBatch:
    """One step's inputs; tensors are views of buffers that the next step overwrites (in stream order)."""

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
    attention: AttentionBatch
    every_token_samples: bool
    """logits_indices is 0 .. tokens - 1: nothing to gather"""


class BatchBuilder:
    """Owns the step's input buffers and fills them from the request table."""

    def __init__(
        self,
        table: RequestTable,
        kernels: InputKernels,
        max_tokens: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        rows = table.max_rows
        self._table = table
        self._kernels = kernels
        self._max_tokens = max_tokens
        self._block_size = block_size
        self._device = device
        self._ring = BufferRing(device, words=4 * (rows + 1))
        self._step = torch.zeros(4, rows + 1, dtype=torch.int32, device=device)

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

    def build(self, rows: Sequence[ScheduledRow], group: int = 0) -> StepBatch:
        """Queue the kernels that build the step over `rows`; `group` is the layer group whose block tables attention
        reads.

        Raises ValueError where the plan exceeds the rows or the token budget that this runner was built for.
        """
        n = len(rows)
        if n > self._table.max_rows:
            raise ValueError(f"a plan of {n} rows exceeds max_num_seqs ({self._table.max_rows})")
        fields = np.array([(r.row, r.computed, r.query_len, r.samples) for r in rows], dtype=np.int32).T
        computed, query_lens, samples = fields[1], fields[2], fields[3]
        query_lens_host = query_lens.tolist()
        seq_lens_host = (computed + query_lens).tolist()
        num_tokens = sum(query_lens_host)
        if num_tokens > self._max_tokens:
            raise ValueError(f"a plan of {num_tokens} tokens exceeds max_num_batched_tokens ({self._max_tokens})")
        sampled = np.cumsum(samples)
        num_samples = int(sampled[-1])
        sizes = StepSizes(n, num_tokens, num_samples, padded_seqs=n, padded_tokens=num_tokens)
        step = self._send(fields, sampled)

        out, table, kernels = self.buffers, self._table, self._kernels
        max_seq_len = max(seq_lens_host)
        kernels.prepare_inputs(step, table.tokens, table.block_tables, out, sizes, self._block_size)
        columns = -(-max_seq_len // self._block_size)
        kernels.gather_block_tables(table.block_tables, step[0], out.block_tables, sizes, columns)
        attention = AttentionBatch(
            num_seqs=n,
            num_tokens=num_tokens,
            max_query_len=max(query_lens_host),
            max_seq_len=max_seq_len,
            query_start_loc=out.query_start_loc[: n + 1],
            seq_lens=out.seq_lens[:n],
            block_tables=out.block_tables[group, :n],
            slot_mapping=out.slot_mapping[group, :num_tokens],
            block_size=self._block_size,
            num_decodes=_leading_ones(query_lens_host),
            query_lens_host=query_lens_host,
            seq_lens_host=seq_lens_host,
        )
        return StepBatch(
            input_ids=out.input_ids[:num_tokens],
            positions=out.positions[:num_tokens],
            logits_indices=out.logits_indices[:num_samples],
            sample_rows=out.sample_rows[:num_samples],
            sample_positions=out.sample_positions[:num_samples],
            sample_rows_host=[r.row for r in rows if r.samples],
            attention=attention,
            every_token_samples=num_samples == num_tokens,
        )

    def _send(self, fields: np.ndarray, sampled: np.ndarray) -> torch.Tensor:
        """The `step` argument of `prepare_inputs`, on the device."""
        n = fields.shape[1]
        host = self._ring.acquire()[: self._step.numel()].view_as(self._step)
        step = host.numpy()
        step[:2, :n] = fields[:2]
        step[2, 0] = 0
        np.cumsum(fields[2], out=step[2, 1 : n + 1])
        step[3, :n] = np.where(fields[3], sampled - 1, -1)
        if self._device.type == "cpu":
            self._step = host
        else:
            self._step.copy_(host, non_blocking=True)
        self._ring.commit()
        return self._step


def _leading_ones(query_lens: list[int]) -> int:
    for index, length in enumerate(query_lens):
        if length != 1:
            return index
    return len(query_lens)
