"""Draws tokens from processed logits: Gumbel-max over what min-p, top-k and top-p keep.

Three ways to one result. *Narrow* rows (a small top-k) look at their first k tokens only. *Probed* rows (top-p or
min-p) look at the first few hundred; where a look at the device costs nothing (CPU) and those suffice, that is all,
and else the row is drawn as a *wide* row: a mask over the whole vocabulary. Masks are exact and noise belongs to
token ids, so the way taken cannot change the token.

Masses are fixed point, `floor(exp((logit - max) / temperature) * 2^s)`, with s such that a row's total fits int64:
sums are exact in any order. Their error, 2^-26 of the largest probability over a whole row, is that of float32
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import torch

from engine.sampling.noise import Noise
from engine.sampling.order import order_keys, prefix_mask, top_ids

NARROW_TOP_K = 1024
"""top-k up to which a row is drawn from its candidates alone"""
_PROBE = 256
_TILE_CPU = 1 << 18
_TILE_DEVICE = 1 << 24
"""elements of one temporary: half a core's L2 on CPU, 64 MiB of float32 on a GPU"""


class DrawRows(msgspec.Struct, frozen=True):
    """Device columns of the rows to draw, all `[m]` but `keys` int32 `[m, 2]`."""

    maxima: torch.Tensor
    temperature: torch.Tensor
    log_min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    keys: torch.Tensor

    def select(self, index: torch.Tensor | slice) -> DrawRows:
        return DrawRows(
            self.maxima[index],
            self.temperature[index],
            self.log_min_p[index],
            self.top_p[index],
            self.top_k[index],
            self.keys[index],
        )


class Filters(msgspec.Struct, frozen=True):
    """What the host knows of a group of rows: which filters at least one of them uses."""

    min_p: bool = False
    top_p: bool = False
    top_k: int = 0
    """the largest top-k among the rows; 0: none"""


def row_tiles(rows: int, vocab: int, device: torch.device, coarse: bool = False) -> Iterator[slice]:
    """Slices of rows that keep a temporary of one element per logit small; `coarse`: where most are smaller than
    that."""
    step = max(1, (_TILE_CPU if device.type == "cpu" and not coarse else _TILE_DEVICE) // vocab)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def draw_wide(logits: torch.Tensor, rows: DrawRows, filters: Filters, noise: Noise) -> torch.Tensor:
    """Tokens int64 `[m]` from logits `[m, V]`, with noise for the whole vocabulary."""

    def tile(part: torch.Tensor, columns: DrawRows) -> torch.Tensor:
        scaled = _scaled(part, columns)
        keep = _wide_mask(part, scaled, columns, filters)
        scores = scaled.sub_(noise.log_exponential(columns.keys))
        if keep is not None:
            scores = scores.masked_fill_(~keep, float("-inf"))
        return scores.argmax(-1)

    return _tiled(logits, rows, tile)


def draw_narrow(logits: torch.Tensor, rows: DrawRows, filters: Filters, noise: Noise) -> torch.Tensor:
    """Tokens int64 `[m]` where every row has 1 <= top_k <= `NARROW_TOP_K`."""

    def tile(part: torch.Tensor, columns: DrawRows) -> torch.Tensor:
        ids = top_ids(part, min(filters.top_k, part.shape[1]))
        scaled = _scaled(part.gather(1, ids), columns)
        keep = torch.arange(ids.shape[1], device=ids.device) < columns.top_k.unsqueeze(1)
        if filters.min_p:
            keep &= scaled >= columns.log_min_p.unsqueeze(1)
        if filters.top_p:
            mass = _mass(scaled, part.shape[1]).masked_fill_(~keep, 0)
            keep &= _nucleus(mass, mass.sum(-1), columns)
        return _draw_candidates(ids, scaled, keep, columns, noise)

    return _tiled(logits, rows, tile, coarse=True)


def draw_probed(logits: torch.Tensor, rows: DrawRows, filters: Filters, noise: Noise) -> torch.Tensor:
    """Tokens int64 `[m]` of rows with top-p or min-p and no top-k. Looks at the device's data: for CPU tensors."""
    vocab = logits.shape[1]

    def tile(part: torch.Tensor, columns: DrawRows) -> torch.Tensor:
        ids = top_ids(part, min(_PROBE, vocab))
        scaled = _scaled(part.gather(1, ids), columns)
        keep = scaled >= columns.log_min_p.unsqueeze(1)
        if filters.top_p:
            total = _total_mass(part, columns, filters)
            keep &= _nucleus(_mass(scaled, vocab).masked_fill_(~keep, 0), total, columns)
        tokens = _draw_candidates(ids, scaled, keep, columns, noise)
        if ids.shape[1] < vocab and bool(keep[:, -1].any()):
            open_rows = keep[:, -1].nonzero().squeeze(1)  # the prefix may go on past the candidates
            tokens[open_rows] = draw_wide(part[open_rows], columns.select(open_rows), filters, noise)
        return tokens

    return _tiled(logits, rows, tile, coarse=True)


def _tiled(
    logits: torch.Tensor,
    rows: DrawRows,
    tile: Callable[[torch.Tensor, DrawRows], torch.Tensor],
    coarse: bool = False,
) -> torch.Tensor:
    slices = row_tiles(logits.shape[0], logits.shape[1], logits.device, coarse)
    tiles = [tile(logits[s], rows.select(s)) for s in slices]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _scaled(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """log p up to a constant that makes the largest 0: no temperature can overflow it."""
    return (logits - rows.maxima.unsqueeze(1)).div_(rows.temperature.unsqueeze(1))


def mass_unit(vocab: int) -> int:
    """The fixed-point mass of the largest probability: a power of two with which a row's total fits int64."""
    return 1 << (62 - vocab.bit_length())


def _mass(scaled: torch.Tensor, vocab: int) -> torch.Tensor:
    # anything for NaN: such a row is a fault whatever is drawn
    return scaled.exp().mul_(mass_unit(vocab)).to(torch.int64)


def _total_mass(logits: torch.Tensor, rows: DrawRows, filters: Filters) -> torch.Tensor:
    """int64 `[m]`: the mass that min-p leaves."""

    def tile(part: torch.Tensor, columns: DrawRows) -> torch.Tensor:
        scaled = _scaled(part, columns)
        mass = _mass(scaled, part.shape[1])
        if filters.min_p:
            mass.masked_fill_(scaled < columns.log_min_p.unsqueeze(1), 0)
        return mass.sum(-1)

    return _tiled(logits, rows, tile)


def _nucleus(mass: torch.Tensor, total: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """Top-p over candidates in order: kept while the mass before a token is below p of the total."""
    before = mass.cumsum(1).sub_(mass)
    return (before < _top_p_target(total, rows).unsqueeze(1)) | (rows.top_p >= 1.0).unsqueeze(1)


def _top_p_target(total: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    return (total.to(torch.float64) * rows.top_p).ceil_().to(torch.int64).clamp_(min=1)


def _wide_mask(logits: torch.Tensor, scaled: torch.Tensor, rows: DrawRows, filters: Filters) -> torch.Tensor | None:
    keep = scaled >= rows.log_min_p.unsqueeze(1) if filters.min_p else None
    if not (filters.top_k or filters.top_p):
        return keep
    keys = order_keys(logits)
    if filters.top_k:
        limit = rows.top_k.masked_fill(rows.top_k <= 0, logits.shape[1])
        first = prefix_mask(keys, torch.ones_like(keys, dtype=torch.int64), limit)
        keep = first if keep is None else keep & first
    if filters.top_p:
        mass = _mass(scaled, logits.shape[1])
        if keep is not None:
            mass = mass.masked_fill_(~keep, 0)
        nucleus = prefix_mask(keys, mass, _top_p_target(mass.sum(-1), rows)) | (rows.top_p >= 1.0).unsqueeze(1)
        keep = nucleus if keep is None else keep & nucleus
    return keep


def _draw_candidates(
    ids: torch.Tensor, scaled: torch.Tensor, keep: torch.Tensor, rows: DrawRows, noise: Noise
) -> torch.Tensor:
    scores = (scaled - noise.log_exponential(rows.keys, ids)).masked_fill_(~keep, float("-inf"))
    return ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
