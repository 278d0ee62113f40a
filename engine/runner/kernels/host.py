"""The vectorised twin of the input kernels: what a CPU engine runs, and what the Triton kernels are tested against.

Tensors are CPU tensors, worked on in place through NumPy views of the same memory: a small NumPy call costs about a
third of a small torch call, and a decode step is nothing but small calls. A decode step finds its caches full of the
model's weights, so that every call costs two to three times what a tight loop shows: the plain decode step, one token
for every sequence, has a short way of its own, and views of what lives as long as the engine are kept.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.runner.kernels import InputBuffers, StepSizes

_KEPT_VIEWS = 32


class HostKernels:
    """See `InputKernels`."""

    def __init__(self) -> None:
        self._views: dict[int, tuple[torch.Tensor, np.ndarray]] = {}

    def apply_staged_writes(
        self, table: torch.Tensor, writes: torch.Tensor, values: torch.Tensor, max_length: int
    ) -> None:
        flat, source = table.numpy().reshape(-1), values.numpy()
        if len(writes) <= 4:
            for dst, src, length in writes.tolist():
                flat[dst : dst + length] = source[src : src + length]
            return
        dst, src, lengths = writes.numpy().T
        total = int(lengths.sum())
        first = int(src[0])
        # Sources are consecutive, so element k of the concatenated values belongs to dst + (k - (src - first)) of its
        # write.
        targets = np.arange(total, dtype=np.int64)
        targets += np.repeat(dst - src + first, lengths)
        flat[targets] = source[first : first + total]

    def prepare_inputs(
        self,
        step: torch.Tensor,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        block_tables: torch.Tensor,
        out: InputBuffers,
        sizes: StepSizes,
        block_size: int,
    ) -> None:
        n = sizes.num_seqs
        self._settle(self._view(step)[:, :n], self._view(lengths))
        if sizes.one_token_each and n == sizes.num_samples == sizes.padded_seqs == sizes.padded_tokens:
            self._prepare_decodes(step, tokens, block_tables, out, n, block_size)
        else:
            self._prepare_any(step, tokens, block_tables, out, sizes, block_size)

    def _prepare_decodes(
        self,
        step: torch.Tensor,
        tokens: torch.Tensor,
        block_tables: torch.Tensor,
        out: InputBuffers,
        n: int,
        block_size: int,
    ) -> None:
        """Every sequence has one token and samples: token i is sequence i is sample i."""
        view = self._view
        fields = view(step)
        rows, computed, starts = fields[0, :n], fields[1, :n], fields[2, : n + 1]
        seq_lens = view(out.seq_lens)[:n]
        np.add(computed, 1, out=seq_lens)
        view(out.query_start_loc)[: n + 1] = starts
        view(out.input_ids)[:n] = view(tokens)[rows, computed]
        view(out.positions)[:n] = computed
        block, offset = np.divmod(computed, block_size)
        slots = view(out.slot_mapping)[:, :n]
        slots[:] = view(block_tables)[:, rows, block]
        slots *= block_size
        slots += offset
        view(out.logits_indices)[:n] = starts[:n]
        view(out.sample_rows)[:n] = rows
        view(out.sample_positions)[:n] = seq_lens

    def _prepare_any(
        self,
        step: torch.Tensor,
        tokens: torch.Tensor,
        block_tables: torch.Tensor,
        out: InputBuffers,
        sizes: StepSizes,
        block_size: int,
    ) -> None:
        n, total, samples = sizes.num_seqs, sizes.num_tokens, sizes.num_samples
        rows, computed, starts, sample_index = step.numpy()
        rows, computed, starts, sample_index = rows[:n], computed[:n], starts[: n + 1], sample_index[:n]
        seq_lens = out.seq_lens.numpy()
        np.add(computed, np.diff(starts), out=seq_lens[:n])
        seq_lens[n : sizes.padded_seqs] = 0
        query_start_loc = out.query_start_loc.numpy()
        query_start_loc[: n + 1] = starts
        if sizes.padded_seqs > n:
            ends = np.arange(1, sizes.padded_seqs - n + 1) * sizes.padded_query_len
            query_start_loc[n + 1 : sizes.padded_seqs + 1] = ends + total

        if sizes.one_token_each:
            token_rows, token_positions = rows, computed
        else:
            lengths = np.diff(starts)
            token_rows = np.repeat(rows, lengths)
            token_positions = np.arange(total, dtype=np.int32)
            token_positions += np.repeat(computed - starts[:-1], lengths)
        input_ids, positions, slots = out.input_ids.numpy(), out.positions.numpy(), out.slot_mapping.numpy()
        input_ids[:total] = tokens.numpy()[token_rows, token_positions]
        positions[:total] = token_positions
        block, offset = np.divmod(token_positions, block_size)
        table_slots = block_tables.numpy()[:, token_rows, block].astype(np.int64)
        table_slots *= block_size
        np.add(table_slots, offset, out=slots[:, :total])
        if sizes.padded_tokens > total:
            input_ids[total : sizes.padded_tokens] = 0
            positions[total : sizes.padded_tokens] = 0
            slots[:, total : sizes.padded_tokens] = -1

        picked = slice(None) if samples == n else sample_index >= 0
        for target, source in (
            (out.logits_indices.numpy(), starts[1:][picked] - 1),
            (out.sample_rows.numpy(), rows[picked]),
            (out.sample_positions.numpy(), seq_lens[:n][picked]),
        ):
            target[:samples] = source
            target[samples : sizes.padded_seqs] = 0

    def gather_block_tables(
        self, block_tables: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, sizes: StepSizes, num_columns: int
    ) -> None:
        n, target = sizes.num_seqs, self._view(out)
        picked = rows.numpy()[:n]
        for table, gathered in zip(self._view(block_tables), target):
            gathered[:n, :num_columns] = table[:, :num_columns][picked]
        if sizes.padded_seqs > n:
            target[:, n : sizes.padded_seqs, :num_columns] = 0

    def post_update(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        known: torch.Tensor | None = None,
    ) -> None:
        at, where = rows.numpy(), positions.numpy()
        self._view(tokens)[at, where] = token_ids.numpy()
        self._view(lengths)[at] = where + 1 if known is None else known.numpy()

    @staticmethod
    def _settle(fields: np.ndarray, lengths: np.ndarray) -> None:
        """Places that the host does not know."""
        rows, computed = fields[0], fields[1]
        if len(computed) and computed.min() < 0:
            np.copyto(computed, lengths[rows] - 1 + ~computed, where=computed < 0)

    def _view(self, tensor: torch.Tensor) -> np.ndarray:
        """NumPy's view of a tensor that lives long; kept with the tensor, so that an `id` is never another's."""
        kept = self._views.get(id(tensor))
        if kept is not None:
            return kept[1]
        if len(self._views) >= _KEPT_VIEWS:
            self._views.clear()
        array = tensor.numpy()
        self._views[id(tensor)] = tensor, array
        return array
