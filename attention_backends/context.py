"""Attention of one sequence in parts: each rank of a context group has the keys and values of some positions, and what
they find is merged by the logarithms of their sums (Milakov and Gimelshein, 2018; Dao et al., 2022, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ContextPart:
    """Of every sequence the positions rank, rank + size, rank + 2 size, ...: position p is the p // size-th of them.

    A block of size * S positions is so a block of S in each part, under the same number, and parts differ by one
    position at most. With one part all formulas are those of a whole sequence.
    """

    size: int = 1
    rank: int = 0

    def before(self, position: int) -> int:
        """How many of its positions are less than `position` (at least 0): the keys that a query at p sees in this
        part begin at before(oldest position that it sees) and end at before(p + 1)."""
        return (position - self.rank + self.size - 1) // self.size

    def slots(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Slots in blocks of size * S positions → in this part's blocks of S; -1 of others' positions and of none."""
        is_own = (slot_mapping >= 0) & (slot_mapping % self.size == self.rank)
        return torch.where(is_own, slot_mapping // self.size, -1)


WHOLE = ContextPart()


def merge_parts(found: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """What parts found → what the whole finds, float32 [tokens, heads, head_dim].

    `found` float32 [tokens, parts, heads, head_dim + 1]: a head's values, and the logarithm of the sum of exponentials
    of its scores. `sinks` float32 [heads] as in `AttentionLayer`.

    A part without a visible key has 0 and -inf, and counts nothing; where all are so, the result is 0. Sums go through
    the parts in order.
    """
    out, lse = found[..., :-1], found[..., -1]
    top = lse.amax(dim=1)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = torch.where(top == -torch.inf, 0.0, top)
    total = torch.zeros_like(top) if sinks is None else torch.exp(sinks - top)
    merged = torch.zeros_like(out[:, 0])
    for part in range(out.size(1)):
        weight = torch.exp(lse[:, part] - top)
        total = total + weight
        merged = merged + weight[..., None] * out[:, part]
    return merged / torch.where(total == 0, 1.0, total)[..., None]
