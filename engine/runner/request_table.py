"""The request table: what the device knows of every running sequence, indexed by row, and how a plan's differences
reach it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from engine.errors import in_words
from engine.step import NewRow, Pooling, RowParams, StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.runner.staging import StagedWrites, Values


logger = logging.getLogger(__name__)

_ANYHOW = RowParams(seed=0, temperature=0.0)
"""of a row whose request has failed, until it is released"""


class SamplerColumns(Protocol):
    """The sampling room's part of a row: its own tables, changed through the same staged writes."""

    def add(self, row: int, params: RowParams, token_ids: Sequence[int], prompt_len: int) -> None: ...

    def release(self, row: int) -> None: ...

    def tables(self) -> list[torch.Tensor]: ...

    def drain_writes(self) -> Sequence[tuple[int, int, int, Values]]: ...


class RequestTable:
    """Device tensors by row; which rows are taken, and the two things of a row that the host must know.

    Two lengths are easily confused: `prompt_len` is fixed, while the tokens known on the host when a row is added may
    be more (a resumed sequence brings what it generated). Tokens sampled afterwards exist only in `tokens`, written by
    `post_update`.
    """

    def __init__(
        self, max_rows: int, max_model_len: int, block_size: int, num_groups: int, device: torch.device
    ) -> None:
        self.max_rows = max_rows
        self.num_groups = num_groups
        self.max_blocks = -(-(max_model_len + 1) // block_size)
        self.tokens = torch.zeros(max_rows, max_model_len + 1, dtype=torch.int32, device=device)
        """int32 [rows, max_model_len + 1]; the last column takes the token sampled at the context's very end"""
        self.lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        """int32 [rows]: tokens that a row knows, written when it is added and with every token that is sampled"""
        self.block_tables = torch.zeros(num_groups, max_rows, self.max_blocks, dtype=torch.int32, device=device)
        """int32 [groups, rows, max_blocks]"""
        self.prompt_len: dict[int, int] = {}
        """on the host: no kernel needs it"""
        self.prompt_logprobs: dict[int, int] = {}
        """rows that asked for the log-probabilities of their prompt → how many alternatives"""
        self.pooling: dict[int, Pooling] = {}
        """rows of which hidden states are wanted, and which"""
        self.cache_salts: dict[int, str] = {}
        """rows whose prefixes, and outputs, are for rows with an equal one"""
        self.adapter_slots = np.full(max_rows, -1, dtype=np.int32)
        """int32 [rows], on the host: each row's adapter; -1: none"""
        self.failed: dict[int, str] = {}
        """rows that hold what could not be applied, and why: they end with the step that is told of it"""

    def staged_tables(self) -> list[torch.Tensor]:
        """The tables in the order in which `stage` numbers them; the sampler's follow."""
        return [self.tokens, self.block_tables.view(-1, self.max_blocks), self.lengths.view(-1, 1)]

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.staged_tables())

    def stage(self, plan: StepPlan, sampler: SamplerColumns, writes: StagedWrites) -> None:
        """Stage the plan's differences: released, added, tokens, block appends. Raises ValueError on a plan that breaks
        the rows."""
        for row in plan.released:
            self._release(row)
            sampler.release(row)
        for new in plan.added:
            self._add(new)
            try:
                sampler.add(new.row, new.params, new.token_ids, new.prompt_len)
            except Exception as error:
                logger.exception("row %d cannot be sampled as its request asks", new.row)
                self.failed[new.row] = in_words(error)
                sampler.add(new.row, _ANYHOW, new.token_ids, new.prompt_len)
            writes.write(0, new.row, 0, new.token_ids)
            writes.write(2, new.row, 0, [len(new.token_ids)])
        for table, many in ((0, plan.rewrites), (0, plan.drafts), (1, plan.block_appends)):
            if len(many):
                writes.write_all(table, many, self.max_rows)
        for table, row, start, values in sampler.drain_writes():
            writes.write(3 + table, row, start, values)

    def _release(self, row: int) -> None:
        if self.prompt_len.pop(row, None) is None:
            raise ValueError(f"row {row} was released, but holds nothing")
        self.prompt_logprobs.pop(row, None)
        self.pooling.pop(row, None)
        self.cache_salts.pop(row, None)
        self.adapter_slots[row] = -1
        self.failed.pop(row, None)

    def _add(self, new: NewRow) -> None:
        if new.row in self.prompt_len:
            raise ValueError(f"row {new.row} was added, but is taken")
        if not 0 < new.prompt_len <= len(new.token_ids):
            raise ValueError(
                f"row {new.row} was added with prompt_len {new.prompt_len} and {len(new.token_ids)} known tokens"
            )
        self.prompt_len[new.row] = new.prompt_len
        self.adapter_slots[new.row] = new.adapter_slot
        if new.cache_salt is not None:
            self.cache_salts[new.row] = new.cache_salt
        if new.params.prompt_logprobs is not None:
            self.prompt_logprobs[new.row] = new.params.prompt_logprobs
        if new.params.pooling is not None:
            self.pooling[new.row] = new.params.pooling
