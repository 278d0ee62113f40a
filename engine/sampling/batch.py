"""What the host knows about a batch before it launches sampling: who is drawn how, who is penalised, who is scored.

Every shape in `Sampler.sample` comes from here, so nothing waits for the device. A decode batch keeps its rows over
many steps; the sampler keeps a few of these and uploads index tensors only when the composition is new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
import torch

from engine.sampling.draw import NARROW_TOP_K, Filters
from engine.sampling.masks import BatchEdits, RowEdits, combine
from engine.sampling.upload import upload
from engine.step import RowParams

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
    """Rows of a batch that are treated alike."""

    index: torch.Tensor | None
    """positions in the batch, int64 `[n]`; None: all of it, in order"""

    def select(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.index is None else values[self.index]


class DrawGroup(Group, frozen=True):
    kind: Kind
    filters: Filters


class PenalisedGroup(msgspec.Struct, frozen=True):
    places: torch.Tensor
    """positions in the batch, int64 `[n]`"""
    slots: torch.Tensor
    """int64 `[n]`"""
    slots_host: tuple[int, ...]


class ScoredGroup(Group, frozen=True):
    rows: tuple[int, ...]
    ks: tuple[int, ...]


class BatchPlan(msgspec.Struct, frozen=True):
    draws: tuple[DrawGroup, ...]
    """without greedy rows: argmax serves every row first, and groups overwrite it; one group for the whole batch where
    rows are not grouped"""
    edits: BatchEdits | None
    penalised: PenalisedGroup | None
    scored: ScoredGroup | None

    @property
    def edits_logits(self) -> bool:
        return self.edits is not None or self.penalised is not None


def plan_batch(
    states: Mapping[int, RowState], rows: Sequence[int], device: torch.device, groups_rows: bool
) -> BatchPlan:
    """`groups_rows`: see `SamplingKernels`. Raises `KeyError` when a row was never added."""
    batch = [states[row] for row in rows]

    def index_of(places: Sequence[int]) -> torch.Tensor | None:
        return None if len(places) == len(batch) else upload(places, torch.int64, device)

    draws: list[DrawGroup] = []
    if groups_rows:
        for kind in ("narrow", "probed", "wide"):
            draws += _draw_groups(batch, kind, index_of)
    elif any(s.kind != "greedy" for s in batch):
        draws.append(DrawGroup(None, "wide", _joined([s.filters for s in batch])))
    penalised = scored = None
    slots = [(at, s.slot) for at, s in enumerate(batch) if s.slot is not None]
    if slots:
        used = tuple(slot for _, slot in slots)
        penalised = PenalisedGroup(
            upload([at for at, _ in slots], torch.int64, device), upload(used, torch.int64, device), used
        )
    asked = [(at, s.params.logprobs) for at, s in enumerate(batch) if s.params.logprobs is not None]
    if asked:
        at = [a for a, _ in asked]
        scored = ScoredGroup(index_of(at), tuple(rows[a] for a in at), tuple(k for _, k in asked))
    edits = combine([(at, s.edits) for at, s in enumerate(batch) if s.edits is not None], device)
    return BatchPlan(tuple(draws), edits, penalised, scored)


def _draw_groups(
    batch: Sequence[RowState], kind: str, index_of: Callable[[Sequence[int]], torch.Tensor | None]
) -> list[DrawGroup]:
    """Wide rows are split by whether they filter at all: plain temperature needs no mask."""
    groups = []
    for plain in (True, False):
        at = [i for i, s in enumerate(batch) if s.kind == kind and (s.filters == Filters()) == plain]
        if at:
            filters = _joined([batch[i].filters for i in at])
            groups.append(DrawGroup(index_of(at), batch[at[0]].kind, filters))
    return groups


def _joined(used: Sequence[Filters]) -> Filters:
    return Filters(min_p=any(f.min_p for f in used), top_p=any(f.top_p for f in used), top_k=max(f.top_k for f in used))
