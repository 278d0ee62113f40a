"""What is a rank's own: its GPU, its cores; and who gets an executor of several ranks."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from core_fakes import tiny_config
from fake_ranks import group_config

from engine.config import DeviceConfig
from engine.core.start import DEFAULT_EXECUTOR
from engine.executor import cores
from engine.executor.cores import share_of_cores
from engine.executor.default import make_executor
from engine.executor.inline import InlineExecutor
from engine.executor.joining import named
from engine.executor.multiproc import MultiprocExecutor
from engine.executor.ranks import rank_config


@pytest.fixture
def six_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads each, numbered as Linux does."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(cores, "cores_of", lambda cpus: [{core, core + 6} for core in range(6) if core in cpus])


@pytest.mark.usefixtures("six_cores")
def test_ranks_divide_the_cores_where_there_are_exactly_enough() -> None:
    assert [share_of_cores(rank, 3, 2) for rank in range(3)] == [(0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11)]
    assert share_of_cores(1, 2, 3) == (3, 4, 5, 9, 10, 11)
    assert share_of_cores(0, 2, 2) is None and share_of_cores(0, 6, 2) is None


@pytest.mark.usefixtures("six_cores")
def test_a_rank_computes_on_its_own_cores_or_its_own_gpu(tmp_path: Path) -> None:
    config = group_config(tiny_config(), 3, tmp_path)
    on_cpu = msgspec.structs.replace(config, device=DeviceConfig(kind="cpu", threads=2))
    assert [rank_config(on_cpu, rank).device.cores for rank in (0, 2)] == [(0, 1, 6, 7), (4, 5, 10, 11)]
    assert rank_config(config, 1).device.cores is None, "one thread each"
    on_gpu = msgspec.structs.replace(config, device=DeviceConfig(kind="cuda"))
    assert [rank_config(on_gpu, rank).device.index for rank in range(3)] == [0, 1, 2]
    assert rank_config(on_gpu, 2).device.cores is None


def test_several_ranks_get_processes_and_one_gets_none(tmp_path: Path) -> None:
    config = tiny_config(async_scheduling=False)
    assert named(DEFAULT_EXECUTOR) is make_executor
    for given, kind in ((config, InlineExecutor), (group_config(config, 2, tmp_path), MultiprocExecutor)):
        made = make_executor(given)
        assert type(made) is kind
        made.close()
