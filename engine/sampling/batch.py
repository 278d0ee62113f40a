"""What the host knows about a batch before it launches sampling: who is drawn how, who is penalised, who is scored.

Every shape in `Sampler.sample` comes from here, so nothing waits for the device. A decode batch keeps its rows over
many steps; the sampler keeps a few of these and uploads index tensors only when the composition is new. How many drafts
each row has changes with nearly every step: what does not depend on that is sorted once (`SortedRows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import torch

from engine.sampling.draw import NARROW_TOP_K, Filters
from engine.sampling.masks import BatchEdits, JoinedEdits, RowEdits, combine, ranges
from engine.sampling.upload import upload
from engine.step import RowParams

_NONE = np.zeros(0, dtype=np.int64)
Kind = Literal["greedy", "narrow", "probed", "wide"]


class RowState(msgspec.Struct, frozen=True):
    params: RowParams
    kind: Kind
    filters: Filters
    slot: int | None
    """in `SeenTokens`; None without penalties"""
    edits: RowEdits | None


def classify(params: RowParams, vocab_size: int, look_is_free: bool) -> tuple[Kind, Filters]:
    """How a row is drawn. `look_is_free`: reading the device's data costs no wait (CPU), so probing is possible."""
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    if params.temperature < 1e-5 or top_k == 1:
        return "greedy", Filters()
    filters = Filters(min_p=params.min_p > 0.0, top_p=params.top_p < 1.0, top_k=top_k)
    if 0 < top_k <= NARROW_TOP_K:
        return "narrow", filters
    if look_is_free and not top_k and (filters.min_p or filters.top_p):
        return "probed", filters
    return "wide", filters


class Group(msgspec.Struct, frozen=True):
    """Positions of a batch that are treated alike."""

    index: torch.Tensor | None
    """which, int64 `[n]`; None: all of it, in order"""

    def select(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.index is None else values[self.index]


class DrawGroup(Group, frozen=True):
    kind: Kind
    filters: Filters


class PenalisedGroup(msgspec.Struct, frozen=True):
    places: torch.Tensor
    """the first position in the batch of each penalised row, int64 `[n]`"""
    slots: torch.Tensor
    """int64 `[n]`"""
    slots_host: tuple[int, ...]
    each: tuple[int, ...]
    """at how many positions each row is sampled"""
    drafted: tuple[torch.Tensor, ...]
    """for 1, 2, …: which of the n rows have as many drafts at least, int64"""


class ScoredGroup(Group, frozen=True):
    rows: tuple[int, ...]
    ks: tuple[int, ...]


class BatchPlan(msgspec.Struct, frozen=True):
    draws: tuple[DrawGroup, ...]
    """without greedy rows: argmax serves every row first, and groups overwrite it; one group for the whole batch where
    rows are not grouped"""
    edits: BatchEdits | None
    penalises: bool
    penalised: PenalisedGroup | None
    """None also where rows are not grouped"""
    scored: ScoredGroup | None

    @property
    def edits_logits(self) -> bool:
        return self.edits is not None or self.penalises


class SortedRows(msgspec.Struct, frozen=True):
    """Distinct rows by what is done with them: all of a plan that does not depend on how many drafts a row has. Arrays
    are places among these rows, int64, ascending."""

    num_rows: int
    draws: tuple[tuple[np.ndarray | None, Kind, Filters], ...]
    """None: all"""
    edits: JoinedEdits | None
    penalises: bool
    penalised: np.ndarray
    """empty where rows are not grouped"""
    slots: np.ndarray
    scored: np.ndarray
    scored_rows: np.ndarray
    ks: np.ndarray

    @property
    def is_placed(self) -> bool:
        """Whether a plan says of some rows where they are in the batch."""
        grouped = len(self.penalised) or any(places is not None for places, _, _ in self.draws)
        return bool(grouped or len(self.scored) or self.edits is not None)


def sort_rows(
    states: Mapping[int, RowState], rows: Sequence[int], device: torch.device, groups_rows: bool
) -> SortedRows:
    """`groups_rows`: see `SamplingKernels`. Raises `KeyError` when a row was never added."""
    batch = [states[row] for row in rows]
    draws: list[tuple[np.ndarray | None, Kind, Filters]] = []
    if groups_rows:
        for kind in ("narrow", "probed", "wide"):
            draws += _draw_groups(batch, kind)
    elif any(s.kind != "greedy" for s in batch):
        draws.append((None, "wide", _joined([s.filters for s in batch])))
    slots = [(at, s.slot) for at, s in enumerate(batch) if s.slot is not None]
    asked = [(at, s.params.logprobs) for at, s in enumerate(batch) if s.params.logprobs is not None]
    used = slots if groups_rows else ()
    return SortedRows(
        num_rows=len(batch),
        draws=tuple(draws),
        edits=combine([(at, s.edits) for at, s in enumerate(batch) if s.edits is not None], device),
        penalises=bool(slots),
        penalised=_int64([at for at, _ in used]),
        slots=_int64([slot for _, slot in used]),
        scored=_int64([at for at, _ in asked]),
        scored_rows=_int64([rows[at] for at, _ in asked]),
        ks=_int64([k for _, k in asked]),
    )


def plan_batch(batch: SortedRows, positions_each: Sequence[int] | None, device: torch.device) -> BatchPlan:
    """`positions_each`: at how many consecutive positions each row is sampled; None: at one."""
    each = None
    if positions_each is not None and batch.is_placed:
        each = np.array(positions_each, dtype=np.int64)

    def index_of(places: np.ndarray | None) -> torch.Tensor | None:
        if places is None or len(places) == batch.num_rows:
            return None
        at = places if each is None else ranges(np.cumsum(each)[places] - each[places], each[places])
        return upload(at, torch.int64, device)

    scored = None
    if len(batch.scored):
        rows, ks = batch.scored_rows, batch.ks
        if each is not None:
            rows, ks = np.repeat(rows, each[batch.scored]), np.repeat(ks, each[batch.scored])
        scored = ScoredGroup(index_of(batch.scored), tuple(rows.tolist()), tuple(ks.tolist()))
    return BatchPlan(
        draws=tuple(DrawGroup(index_of(places), kind, filters) for places, kind, filters in batch.draws),
        edits=None if batch.edits is None else batch.edits.placed(each, device),
        penalises=batch.penalises,
        penalised=_penalised(batch, each, device) if len(batch.penalised) else None,
        scored=scored,
    )


def _penalised(batch: SortedRows, each: np.ndarray | None, device: torch.device) -> PenalisedGroup:
    first, positions = batch.penalised, np.ones_like(batch.penalised)
    if each is not None:
        first, positions = (np.cumsum(each) - each)[batch.penalised], each[batch.penalised]
    drafted = (np.flatnonzero(positions > drafts) for drafts in range(1, positions.max()))
    return PenalisedGroup(
        places=upload(first, torch.int64, device),
        slots=upload(batch.slots, torch.int64, device),
        slots_host=tuple(batch.slots.tolist()),
        each=tuple(positions.tolist()),
        drafted=tuple(upload(which, torch.int64, device) for which in drafted),
    )


def _draw_groups(batch: Sequence[RowState], kind: Kind) -> list[tuple[np.ndarray | None, Kind, Filters]]:
    """Wide rows are split by whether they filter at all: plain temperature needs no mask."""
    groups: list[tuple[np.ndarray | None, Kind, Filters]] = []
    for plain in (True, False):
        at = [i for i, s in enumerate(batch) if s.kind == kind and (s.filters == Filters()) == plain]
        if at:
            groups.append((_int64(at), kind, _joined([batch[i].filters for i in at])))
    return groups


def _joined(used: Sequence[Filters]) -> Filters:
    return Filters(min_p=any(f.min_p for f in used), top_p=any(f.top_p for f in used), top_k=max(f.top_k for f in used))


def _int64(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64) if values else _NONE
