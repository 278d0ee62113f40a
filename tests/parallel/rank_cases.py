"""Collectives of random shapes that ranks run, and what plain torch says of them: the same cases from the same seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (1.0, 1.0, 1e4, 1e-6, 1e-39)  # sums above float16's largest number, subnormals of float16 and of bfloat16


@dataclass(frozen=True)
class Case:
    seed: int
    rows: int
    columns: tuple[int, ...]
    """of each rank; of an all-reduce the first counts"""
    gathers: bool
    x_dtype: torch.dtype
    dtype: torch.dtype
    has_residual: bool
    scale: float

    def part(self, rank: int) -> torch.Tensor:
        columns = self.columns[rank] if self.gathers else self.columns[0]
        made = self._random(self.rows, columns, self.seed * 100 + rank)
        return made.to(self.x_dtype)

    def residual(self) -> torch.Tensor | None:
        return (
            self._random(self.rows, self.columns[0], self.seed * 100 + 99).to(self.dtype) if self.has_residual else None
        )

    def _random(self, rows: int, columns: int, seed: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * self.scale

    def expected(self) -> torch.Tensor:
        parts = [self.part(rank) for rank in range(len(self.columns))]
        if self.gathers:
            return torch.cat(parts, dim=1)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        rounded, residual = total.to(self.dtype), self.residual()
        return rounded if residual is None else (rounded.float() + residual.float()).to(self.dtype)


def draw_case(seed: int, size: int, most_rows: int, most_columns: int) -> Case:
    chance = random.Random(seed)
    rows = chance.choice((0, 1, 2, most_rows, chance.randint(3, most_rows)))
    columns = [chance.choice((1, 7, 64, most_columns, chance.randint(1, most_columns))) for _ in range(size)]
    if chance.random() < 0.2:
        columns[chance.randrange(size)] = 0
    gathers, dtype = chance.random() < 0.4, chance.choice(FLOATS)
    x_dtype = chance.choice((torch.float32, dtype))
    return Case(seed, rows, tuple(columns), gathers, x_dtype, dtype, chance.random() < 0.5, chance.choice(SCALES))


def run_deal_case(case: Case, rank: int, all_to_all: Callable[..., torch.Tensor], group: str) -> torch.Tensor:
    return all_to_all(_dealt(case, rank), list(case.columns), group)


def expected_deal(case: Case, rank: int) -> torch.Tensor:
    ranks = range(len(case.columns))
    return torch.cat([_dealt(case, each).split(case.columns, dim=1)[rank] for each in ranks], dim=1)


def _dealt(case: Case, rank: int) -> torch.Tensor:
    """Every second rank's rows lie apart."""
    total = sum(case.columns)
    x = replace(case, gathers=True, columns=(total + rank % 2,) * len(case.columns)).part(rank)
    return x[:, :total]


def hash_of(tensor: torch.Tensor) -> str:
    shape = f"{list(tensor.shape)} {tensor.dtype} ".encode()
    return hashlib.sha256(shape + tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def run_case(
    case: Case, rank: int, all_reduce: Callable[..., torch.Tensor], all_gather: Callable[..., torch.Tensor], group: str
) -> torch.Tensor:
    if case.gathers:
        return all_gather(case.part(rank), list(case.columns), group)
    return all_reduce(case.part(rank), case.residual(), case.dtype, group)
