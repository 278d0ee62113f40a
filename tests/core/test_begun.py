"""What a core has begun is known when it is dead."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from core_fakes import request, tiny_config

from engine.core import begun
from engine.core.begun import Begun, BegunLog
from engine.core.client import ProcessClient
from engine.core.wire import each_delta
from engine.errors import CoreDiedError


def test_the_last_ones_are_known_and_where_nothing_is_all_may_have_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(begun, "MOST", 4)
    assert Begun(None).has_any(["a"]) and Begun(str(tmp_path)).has_any(["a"])
    log = BegunLog(str(tmp_path))
    assert not Begun(str(tmp_path)).has_any(["a", "b"])
    for name in "abcdef":
        log.add(name)
    known = Begun(str(tmp_path))
    assert [name for name in "abcdefg" if known.has_any([name])] == list("cdef")
    assert known.has_any(["a", "c"]) and not known.has_any([])


def test_a_full_disk_ends_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    log = BegunLog(str(tmp_path))
    log.add("a")
    monkeypatch.setattr(os, "pwrite", full)
    log.add("b")
    log.add("c")
    assert Begun(str(tmp_path)).has_any(["b"]), "nothing is known any more"
    log = BegunLog(str(tmp_path))
    os.unlink(tmp_path / "begun")
    log.add("a")
    log.add("b")


def test_where_so_many_files_are_open_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_many(*_: object) -> int:
        raise OSError(24, "Too many open files")

    BegunLog(str(tmp_path)).add("a")
    monkeypatch.setattr("builtins.open", too_many)
    assert Begun(str(tmp_path)).has_any(["b"])


@pytest.mark.timeout(60)
def test_a_core_that_was_killed_had_begun_as_many_as_it_has_rows() -> None:
    client = ProcessClient(tiny_config(max_num_seqs=2), executor="core_fakes:FakeExecutor")
    try:
        client.start()
        for index in range(6):
            client.send(request(f"r{index}", max_tokens=1000))
        seen = set[str]()
        while seen < {"r0", "r1"}:
            seen |= {delta.request_id for delta in each_delta(client.recv().deltas)}
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(CoreDiedError):
            for _ in range(1000):
                client.recv()
        known = client.begun()
        assert [known.has_any([f"r{index}"]) for index in range(6)] == [True, True, False, False, False, False]
    finally:
        client.close()
    assert client.begun().has_any(["r5"]), "its directory is gone"
