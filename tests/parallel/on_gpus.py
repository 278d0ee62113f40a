"""Ranks with a GPU each, for tests whose tensors come from the host and go back there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.parallel.device_group import DeviceGroup
from engine.parallel.device_group import nccl_group as group_of_gpus


class Carried:
    def __init__(self, group: DeviceGroup) -> None:
        self._group = group
        self.name, self.rank, self.size, self.close = group.name, group.rank, group.size, group.close
        self._gpu = torch.device("cuda", group.rank)

    def all_reduce(
        self, x: torch.Tensor, residual: torch.Tensor | None, dtype: torch.dtype, group: str
    ) -> torch.Tensor:
        there = None if residual is None else residual.to(self._gpu)
        return self._group.all_reduce(x.to(self._gpu), there, dtype, group).cpu()

    def all_gather(self, x: torch.Tensor, columns: Sequence[int], group: str) -> torch.Tensor:
        return self._group.all_gather(x.to(self._gpu), columns, group).cpu()


def nccl_group(fd: int, name: str, rank: int, size: int, cache_dir: Path) -> Carried:
    torch.cuda.set_device(rank)
    return Carried(group_of_gpus(fd, name, rank, size, cache_dir))
