"""A step's data: what the scheduler tells the runner (`StepPlan`) and what comes back (`StepResult`).

Torch-free. A *row* is a sequence's place in the device tables from the moment it starts running until it finishes or is
preempted. Nothing that the device already holds is sent again: a plan carries differences.

Invariants
- A row that is in `released` holds nothing any more; it may be in `added` of the same plan again (release is applied
  first).
- `added` carries every known token (prompt, and after a preemption what was generated too). The token that step N
  samples for a row is written by the device at `tokens[row, computed + query_len]`, where step N+1 reads it; the host
  never sends it.
- Order of application on the device: released, added, rewrites, block_appends, swap_out, swap_in, block_copies, then
  the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import msgspec
import numpy as np


class RowParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling as the device needs it: every default resolved, every word a token id."""

    seed: int
    """64-bit; with the position it keys every random draw"""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] = []
    """token sequences whose last token is forbidden where the ones before it have just been generated"""
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    """all ids that end the sequence, EOS included unless ignored; forbidden until `min_tokens` are generated"""
    logprobs: int | None = None
    """None: off; k: the sampled token and the k most likely"""
    prompt_logprobs: int | None = None


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    row: int
    token_ids: list[int]
    """all tokens known now; positions 0 .. len-1"""
    prompt_len: int
    """the first `prompt_len` of them are the prompt; the rest was generated before a preemption"""
    params: RowParams


class BlockAppend(msgspec.Struct, frozen=True, gc=False):
    """Write `block_ids` into the row's block table of layer group `group`, from entry `start` on."""

    row: int
    group: int
    start: int
    block_ids: list[int]


class TokenRewrite(msgspec.Struct, frozen=True, gc=False):
    """What a row holds from `start` on is replaced: its sequence took over another one's history (beams)."""

    row: int
    start: int
    token_ids: list[int]


class ScheduledRow(msgspec.Struct, frozen=True, gc=False):
    row: int
    computed: int
    """tokens whose KV exists before this step = position of the first query token"""
    query_len: int
    """tokens to compute in this step; 0: a fork, which samples from the logits of the row before it in the plan (or of
    the one before that, if it is a fork, too)"""
    samples: bool
    """true when this step reaches the last known token, so that a token is sampled at position computed + query_len"""


class ScheduledRows(Sequence[ScheduledRow]):
    """Many rows: decodes in columns, then the others."""

    __slots__ = ("computed", "decodes", "others")

    def __init__(self, decodes: np.ndarray, computed: np.ndarray, others: list[ScheduledRow]) -> None:
        """`decodes`, `computed`: integers [decodes], the rows and what they have computed."""
        self.decodes, self.computed, self.others = decodes, computed, others

    def __len__(self) -> int:
        return len(self.decodes) + len(self.others)

    def __iter__(self) -> Iterator[ScheduledRow]:
        for row, computed in zip(self.decodes.tolist(), self.computed.tolist()):
            yield ScheduledRow(row, computed, 1, samples=True)
        yield from self.others

    @overload
    def __getitem__(self, index: int) -> ScheduledRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[ScheduledRow]: ...

    def __getitem__(self, index: int | slice) -> ScheduledRow | list[ScheduledRow]:
        return list(self)[index]

    def columns(self) -> np.ndarray:
        """int32 [4, rows]: row, computed, query length, whether it samples."""
        n = len(self.decodes)
        columns = np.ones((4, len(self)), dtype=np.int32)
        columns[0, :n], columns[1, :n] = self.decodes, self.computed
        if self.others:
            columns[:, n:] = np.array([(r.row, r.computed, r.query_len, r.samples) for r in self.others]).T
        return columns


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    step_id: int
    rows: Sequence[ScheduledRow]
    """decode rows (query_len 1 and sampling) first, then prefill chunks and those with forks, each before its forks"""
    released: list[int] = []
    added: list[NewRow] = []
    rewrites: Sequence[TokenRewrite] = []
    block_appends: Sequence[BlockAppend] = []
    block_copies: list[tuple[int, int]] = []
    """(source, destination): copy-on-write, one after the other"""
    swap_out: list[tuple[int, int]] = []
    """(device block, host block), one after the other"""
    swap_in: list[tuple[int, int]] = []
    """(host block, device block), one after the other"""

    @property
    def num_tokens(self) -> int:
        if isinstance(self.rows, ScheduledRows):
            return len(self.rows.decodes) + sum(r.query_len for r in self.rows.others)
        return sum(r.query_len for r in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One position: the token in question first, then the top alternatives, most likely first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """1-based rank of token_ids[0] in the vocabulary"""


class RowLogprobs(Mapping[int, TokenLogprobs]):
    """Sampled positions by row, as arrays; an entry is made when it is asked for."""

    __slots__ = ("_logprobs", "_place", "_ranks", "_rows", "_token_ids", "_widths")

    def __init__(
        self,
        rows: Sequence[int],
        widths: Sequence[int],
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        ranks: np.ndarray,
    ) -> None:
        """`token_ids`: int64 [rows, columns], `logprobs`: float64 [rows, columns], of which `widths` count; `ranks`:
        int64 [rows]. Nobody writes to them any more."""
        self._rows = rows
        self._place = np.full(max(rows, default=-1) + 1, -1, dtype=np.int64)
        self._place[list(rows)] = np.arange(len(rows))
        self._widths, self._token_ids, self._logprobs, self._ranks = widths, token_ids, logprobs, ranks

    def __getitem__(self, row: int) -> TokenLogprobs:
        index = int(self._place[row]) if 0 <= row < len(self._place) else -1
        if index < 0:
            raise KeyError(row)
        width = self._widths[index]
        token_ids, logprobs = self._token_ids[index, :width].tolist(), self._logprobs[index, :width].tolist()
        return TokenLogprobs(token_ids=token_ids, logprobs=logprobs, rank=int(self._ranks[index]))

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def columns(self, rows: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
        """Of rows with entries of one length, the first `most` at most: tokens int64 [rows, columns] and
        log-probabilities float64 [rows, columns]."""
        indices = self._place[rows]
        width = min(self._widths[indices[0]], most)
        return self._token_ids.take(indices, 0)[:, :width], self._logprobs.take(indices, 0)[:, :width]


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """Lists align with the plan's rows that sample, in the plan's order."""

    step_id: int
    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprobs] = {}
    """row → the sampled position, for rows that asked"""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """row → one entry per prompt token at positions computed+1 .. min(computed+query_len, prompt_len-1), for rows that
    asked. The chunk's query at position p scores the known token at p+1, so position 0 never has an entry."""
    faults: list[int] = []
    """rows whose logits held NaN (or nothing allowed), or of which anything else failed: their token does not count"""
    reasons: dict[int, str] = {}
    """of the faults that are something else: what failed"""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor found out when it loaded the model; bytes."""

    weight_bytes: int
    activation_bytes: int
    """peak of a step at the full token budget"""
    workspace_bytes: int
    """tables, sampler state, attention workspace"""
    graph_bytes: int = 0
    """what captured graphs will take, estimated"""
    block_bytes: int
    """one KV block over all layers of a group"""
    windows: tuple[int | None, ...] = (None,)
    """of each layer group, in tokens; None: its layers see everything"""
    device_bytes_total: int
    device_bytes_free: int
    """before anything was loaded"""
    attention_backend: str


class WarmUpReport(msgspec.Struct, frozen=True, kw_only=True):
    distinct_pieces: int = 0
    compiled: int = 0
    """pieces compiled now; the rest came from the cache"""
    reused: int = 0
    seconds: float = 0.0
    graph_bytes: int = 0
    """what the graphs captured so far took of the device, measured"""
    graphs_captured: int = 0
    graphs_pending: int = 0
    """captured later, between steps"""
    swap_block_s: float = 0.0
    """a block to the host tier and back, measured; 0: there is no tier"""
    compile_failed: bool = False
    """pieces were wanted and failed on this device: the model itself runs"""
