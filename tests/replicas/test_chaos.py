"""Every process of two replicas of two ranks, killed and stopped while requests run: nothing hangs, is lost or is left.

How long it takes until one is told is measured by `tools/kill_processes.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from chaos import MODES, Chaos, kill_the_front_end

pytestmark = pytest.mark.timeout(300)


def test_processes_may_be_killed_and_stopped(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    chaos = Chaos(tmp_path, seed=1)
    try:
        for index, mode in enumerate(MODES):
            chaos.round(index, mode)
    finally:
        left = chaos.close()
    assert left == 0
    assert set(os.listdir("/dev/shm")) <= before


def test_nothing_outlives_a_killed_front_end(tmp_path: Path) -> None:
    kill_the_front_end(tmp_path)
