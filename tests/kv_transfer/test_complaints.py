"""What the log says of pages that do not come: each source and cause, all that failed, and no line for each request."""

from __future__ import annotations

import pytest

from engine.kv_transfer.complaints import EVERY_S, MOST, Complaints
from engine.kv_transfer.params import KVTransferParams


def source(port: int) -> KVTransferParams:
    return KVTransferParams(remote_host="10.0.0.1", remote_port=port)


def test_a_source_and_cause_is_one_line_a_minute_that_counts(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    complaints = Complaints(lambda: now[0])
    for _ in range(7):
        complaints.add(source(1), "block_size 16 and 32")
    complaints.add(source(1), "another cause")
    complaints.add(source(2), "block_size 16 and 32")
    assert [line.partition(", for pages did not come from ")[::2] for line in caplog.messages] == [
        ("a prompt is computed here", "10.0.0.1:1: block_size 16 and 32"),
        ("a prompt is computed here", "10.0.0.1:1: another cause"),
        ("a prompt is computed here", "10.0.0.1:2: block_size 16 and 32"),
    ]
    now[0] += EVERY_S
    complaints.add(source(1), "block_size 16 and 32")
    assert caplog.messages[3:] == [
        "7 prompts were computed here, for pages did not come from 10.0.0.1:1: block_size 16 and 32"
    ]


def test_who_names_sources_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(lambda: 0.0)
    for port in range(10 * MOST):
        complaints.add(source(port), "x" * 10_000)
    assert len(caplog.messages) == MOST + 1 and max(map(len, caplog.messages)) < 1_000
