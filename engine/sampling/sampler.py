"""From logits to tokens, for rows that each have their own parameters, without a wait for the device.

Order (vLLM's): allowed tokens, logit bias, bad words and stop ids before `min_tokens`; then repetition penalty
(prompt and generated tokens), frequency and presence (generated only); then temperature; min-p (relative to the
largest probability after temperature); top-k; top-p over what is left, renormalised; then the draw. Prefixes follow
one order of tokens: larger logit first, lower id among equals. Temperature 0 and top-k 1 take the first token of that
order.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch

from engine.sampling.batch import BatchPlan, RowState, SortedRows, classify, plan_batch, sort_rows
from engine.sampling.columns import FLOATS, INTS, NUM_FLOATS, NUM_INTS, PROMPT_LEN
from engine.sampling.kernels import SamplingKernels, StepTensors, select_kernels
from engine.sampling.logprobs import LogprobTensors
from engine.sampling.masks import row_edits
from engine.sampling.noise import seed_words
from engine.sampling.penalties import SeenTokens
from engine.sampling.upload import upload
from engine.step import RowParams

TableWrite = tuple[int, int, int, list[float] | list[int]]
"""(table, row, first column, values)"""

_Kept = TypeVar("_Kept")
_KEPT_PLANS = 16
_WARM_UP = (
    RowParams(seed=0, temperature=0.0),
    RowParams(seed=0),
    RowParams(seed=0, top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0, logprobs=1),
)
"""Between them every variant of every kernel."""


class SampleOutput(msgspec.Struct, frozen=True):
    token_ids: torch.Tensor
    """int64 `[m]`; 0 where `faults`"""
    faults: torch.Tensor
    """bool `[m]`: the row's largest logit is not finite (NaN, infinity, or nothing allowed)"""
    logprobs: LogprobTensors | None


class Sampler:
    """Sampling parameters and history of up to `max_rows` table rows.

    The host calls `add` and `release`; parameter columns reach the device tables (`tables`) through whoever applies
    `drain_writes`, before `sample`. All device work goes to the current stream. `kernels`: those for `device` unless
    given. `cache_dir`: where kernels that are built on this machine are kept; without one a CPU samples in torch.
    """

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        max_model_len: int,
        kernels: SamplingKernels | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        self._vocab = vocab_size
        self._max_rows = max_rows
        self._device = device
        self._kernels = select_kernels(device, vocab_size, cache_dir) if kernels is None else kernels
        self._seen = SeenTokens(max_rows, vocab_size, max_model_len, device)
        floats = torch.zeros((max_rows, NUM_FLOATS), dtype=torch.float32, device=device)
        self._tables = [floats, torch.zeros((max_rows, NUM_INTS), dtype=torch.int64, device=device)]
        self._writes: list[TableWrite] = []
        self._states: dict[int, RowState] = {}
        self._sorted: OrderedDict[tuple[int, ...], SortedRows] = OrderedDict()
        self._plans: OrderedDict[tuple[int, ...], BatchPlan] = OrderedDict()

    def add(self, row: int, params: RowParams, token_ids: Sequence[int], prompt_len: int) -> None:
        """Start sampling for `row`, whose known tokens are `token_ids`: `prompt_len` of prompt, the rest generated
        before a preemption. Replaces what the row was. Raises `InvalidRequestError` for a parameter that names an
        unknown token."""
        if not 0 <= row < self._max_rows:
            raise ValueError(f"row {row} is outside the table of {self._max_rows} rows")
        edits = row_edits(params, self._vocab, self._device)
        self.release(row)
        kind, filters = classify(params, self._vocab, look_is_free=self._device.type == "cpu")
        slot = self._seen.acquire(token_ids, prompt_len) if params.has_penalties else None
        self._states[row] = RowState(params, kind, filters, slot, edits)
        floats = [
            0.0 if kind == "greedy" else params.temperature,
            params.top_p,
            math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        ]
        self._writes.append((FLOATS, row, 0, floats))
        self._writes.append(
            (INTS, row, 0, [seed_words(params.seed), filters.top_k, prompt_len, -1 if slot is None else slot])
        )

    def release(self, row: int) -> None:
        """Forget `row`; nothing happens when it is not there."""
        state = self._states.pop(row, None)
        if state is None:
            return
        self._plans.clear()
        self._sorted.clear()
        if state.slot is not None:
            self._seen.release(state.slot)

    def tables(self) -> list[torch.Tensor]:
        """The device tables that `drain_writes` addresses, row first: float32 `[max_rows, 6]`, int64 `[max_rows,
        4]`."""
        return list(self._tables)

    def drain_writes(self) -> list[TableWrite]:
        """What `add` wrote since the last call, in order."""
        writes, self._writes = self._writes, []
        return writes

    @property
    def workspace_bytes(self) -> int:
        """Device memory held now; lists of allowed tokens and biases not counted."""
        return sum(t.nbytes for t in self._tables) + self._kernels.size_bytes + self._seen.size_bytes

    @property
    def max_workspace_bytes(self) -> int:
        """`workspace_bytes` when every row uses penalties."""
        return self.workspace_bytes - self._seen.size_bytes + self._seen.max_size_bytes

    def restrict(self, logits: torch.Tensor, places: Sequence[int], bits: np.ndarray) -> None:
        """See `SamplingKernels.restrict`; before `sample`, of the same logits."""
        self._kernels.restrict(logits, places, np.require(bits, np.int32, ["C", "W"]))  # torch wants to own it

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        rows_host: Sequence[int],
        positions: torch.Tensor,
        tokens: torch.Tensor,
    ) -> SampleOutput:
        """Draw one token for each of m positions.

        `logits` float32 `[m, V]`, contiguous, may be changed; `rows` int64 `[m]` on the device and the same on the
        host; `positions` int64 `[m]`: where the new token goes, so that `tokens[row, :position]` is its history;
        `tokens` int32 `[table rows, max_model_len]`. A row comes once, or several times one behind the other, at
        consecutive positions: then its tokens from the first position on are drafts. They are history to what is
        behind them, and forgotten when this returns: what is there when the row comes next counts. Raises `ValueError`
        for logits of another shape or type, and for a row that comes again behind another one.
        """
        expected = (len(rows_host), self._vocab)
        if logits.shape != expected or logits.dtype != torch.float32 or not logits.is_contiguous():
            raise ValueError(f"logits must be contiguous float32 {expected}, got {logits.dtype} {tuple(logits.shape)}")
        plan = self._plan(rows_host)
        scored = plan.scored
        raw = None
        if scored is not None:
            raw = scored.select(logits)
            if scored.index is None and plan.edits_logits:
                raw = raw.clone()
        if plan.edits is not None:
            prompt_lens = self._tables[INTS][rows, PROMPT_LEN]
            plan.edits.apply(logits, rows, positions, prompt_lens, tokens)
        step = StepTensors(logits, rows, positions, tokens, self._tables[FLOATS], self._tables[INTS])
        if plan.penalises:
            self._kernels.penalise(step, self._seen, plan)
        token_ids, faults = self._kernels.draw(step, plan)
        logprobs = None
        if scored is not None and raw is not None:
            logprobs = self._kernels.score(raw, scored.select(token_ids), scored.rows, scored.ks)
        return SampleOutput(token_ids, faults, logprobs)

    def draft(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        rows_host: Sequence[int],
        positions: torch.Tensor,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """What another model's `logits` would have `sample` draw there: with the noise of the same seed and position,
        so that two models that agree draw the same token. Arguments as there; int64 `[m]`. Leaves no trace, so
        penalties, which count what was drawn, do not take part.
        """
        plan = self._plan(rows_host)
        if plan.edits is not None:
            plan.edits.apply(logits, rows, positions, self._tables[INTS][rows, PROMPT_LEN], tokens)
        step = StepTensors(logits, rows, positions, tokens, self._tables[FLOATS], self._tables[INTS])
        return self._kernels.draw(step, plan)[0]

    def prompt_logprobs(self, logits: torch.Tensor, targets: torch.Tensor, k: int) -> LogprobTensors:
        """Score known tokens: `logits` float32 `[m, V]`, unmodified; `targets` int64 `[m]`; `k` alternatives each."""
        m = logits.shape[0]
        return self._kernels.score(logits, targets, range(m), [k] * m)

    def warm_up(self) -> None:
        """Run every kernel once on a table of its own, so that none compiles while requests wait. Leaves no trace
        here."""
        sampler = Sampler(1, self._vocab, self._device, 8, self._kernels)
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        tokens = torch.zeros((1, 8), dtype=torch.int32, device=self._device)
        for params in _WARM_UP:
            sampler.add(0, params, [0], 1)
            for table, row, start, values in sampler.drain_writes():
                target = sampler._tables[table]
                target[row, start : start + len(values)] = upload(values, target.dtype, self._device)
            logits = torch.zeros((1, self._vocab), dtype=torch.float32, device=self._device)
            sampler.sample(logits, zero, [0], zero + 1, tokens)

    def _plan(self, rows_host: Sequence[int]) -> BatchPlan:
        key = tuple(rows_host)
        plan = self._plans.get(key)
        if plan is None:
            rows = tuple(dict.fromkeys(key))
            each = None if len(rows) == len(key) else _positions_each(key, len(rows))
            plan = plan_batch(self._sort(rows), each, self._device)
            _keep(self._plans, key, plan)
        else:
            self._plans.move_to_end(key)
        return plan

    def _sort(self, rows: tuple[int, ...]) -> SortedRows:
        batch = self._sorted.get(rows)
        if batch is None:
            batch = sort_rows(self._states, rows, self._device, self._kernels.groups_rows)
            _keep(self._sorted, rows, batch)
        else:
            self._sorted.move_to_end(rows)
        return batch


def _keep(kept: OrderedDict[tuple[int, ...], _Kept], key: tuple[int, ...], value: _Kept) -> None:
    kept[key] = value
    if len(kept) > _KEPT_PLANS:
        kept.popitem(last=False)


def _positions_each(rows: Sequence[int], distinct: int) -> list[int]:
    """How often each row comes. Raises `ValueError` where one comes again behind another."""
    each: list[int] = []
    before = None
    for row in rows:
        if row == before:
            each[-1] += 1
        else:
            each.append(1)
            before = row
    if len(each) != distinct:
        raise ValueError("a row that is sampled at several positions must be given one time behind the other")
    return each
