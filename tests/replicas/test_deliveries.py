"""What callers have been given, and what is left of a request that moves."""

from __future__ import annotations

import time

import msgspec
import pytest
from core_fakes import request
from fleet_life import added

from engine.core.wire import BeamParams, SequenceDelta
from engine.replicas.deliveries import Deliveries
from engine.speculation_config import SpeculationConfig


def test_what_was_let_in_is_not_refused_when_it_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time goes on, wherever it is; and what has begun is not given up while it waits."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    message = msgspec.structs.replace(added("a", [1, 2, 3], 40, n=2), wait_s=5.0, deadline_s=9.0)
    search = msgspec.structs.replace(added("b", [1], 9), wait_s=5.0, deadline_s=9.0, beams=BeamParams(width=2))
    deliveries = Deliveries(SpeculationConfig())
    deliveries.add(message, 0)
    deliveries.add(search, 0)
    now[0] = 103.0
    for name in "ab":
        waits = deliveries.resumed(name)
        assert (waits.wait_s, waits.deadline_s, waits.accepted, waits.begun) == (2.0, 6.0, True, False)
        assert not deliveries.is_overdue(name, 104.9) and deliveries.is_overdue(name, 105.0)
    deliveries.take_in(0, [SequenceDelta(request_id="a", token_ids=[1], finish_reason="stop")])
    now[0] = 110.0
    began = deliveries.resumed("a")  # the sample that is left waited for its row: the other one was given whole
    assert (began.wait_s, began.deadline_s, began.accepted, began.begun) == (None, 0.0, True, True)
    assert began.resumed == [] and not deliveries.is_overdue("a", 1e9)
    deliveries.waits_anew(["b"])  # it was being computed, and nothing was told of it
    assert (deliveries.resumed("b").wait_s, deliveries.resumed("b").deadline_s) == (5.0, 0.0)
    assert not deliveries.is_overdue("b", 114.9) and deliveries.is_overdue("b", 115.0)


def test_what_has_begun_is_told_of_once() -> None:
    deliveries = Deliveries(SpeculationConfig())
    deliveries.add(request("a", max_tokens=4), 0)
    deliveries.take_in(0, [SequenceDelta(request_id="a", token_ids=[1], started_at=1.0, cached_tokens=16)])
    deliveries.move("a", 1)
    again = SequenceDelta(request_id="a", token_ids=[2], started_at=2.0, cached_tokens=32)
    assert deliveries.take_in(1, [again]).deltas == [SequenceDelta(request_id="a", token_ids=[2])]
