"""The soak serves traffic that preempts in every way, and notices a block, a row or a request that is left behind."""

from __future__ import annotations

import json

import pytest
import soak

from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.sequence_blocks import SequenceBlocks
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.running_rows import RunningRows

SHORT = ["--minutes", "0"]
"""one burst on each engine"""


def test_two_seconds_leave_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--minutes", str(2 / 60)]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["requests"] == sum(number for name, number in figures.items() if name.startswith("ended: "))
    for name in ("ended: abort", "ended: stop", "ended: length", "swaps", "blocks swapped in", "prefix tokens found"):
        assert figures[name] > 0, name
    assert figures["preemptions"] > figures["swaps"], "some are computed again"


def test_a_block_that_is_not_given_back_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = KVCache.free

    def forgetful(kv: KVCache, blocks: SequenceBlocks) -> None:
        """The last block of long sequences."""
        for table in blocks.tables:
            del table[12:]
        free(kv, blocks)

    monkeypatch.setattr(KVCache, "free", forgetful)
    assert soak.main(SHORT) == 1
    assert "leak (seed 0)" in capsys.readouterr().err


def test_a_host_block_that_a_transfer_has_read_and_keeps_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = HostTier.load

    def greedy(host: HostTier, block: int, device_block: int) -> None:
        host.pool.acquire(block)
        load(host, block, device_block)

    monkeypatch.setattr(HostTier, "load", greedy)
    assert soak.main(SHORT) == 1
    assert "'host blocks': " in capsys.readouterr().err


def test_rows_that_a_search_keeps_are_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def keep_one(rows: RunningRows, group: BeamGroup) -> None:
        rows.free += group.spare_rows[1:]
        group.spare_rows = []

    monkeypatch.setattr(RunningRows, "give_back", keep_one)
    assert soak.main(SHORT) == 1
    assert "rows are held" in capsys.readouterr().err
