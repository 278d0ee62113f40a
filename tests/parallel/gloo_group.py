"""What carries NCCL's exchanges between processes that have no GPU."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import cast

from torch import distributed
from torch._C._distributed_c10d import Store

from engine.parallel.device_group import DeviceGroup, Exchange


def gloo_group(fd: int, name: str, rank: int, size: int, cache_dir: Path) -> DeviceGroup:
    """An `engine.executor.joining.MakeGroup`."""

    def make(store: Store, rank: int, size: int) -> Exchange:
        return cast(Exchange, distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=100)))

    return DeviceGroup(fd, name, rank, size, make)
