from __future__ import annotations

import msgspec
import pytest

from engine.errors import EngineError
from engine.executor.rank_reports import group_load_report, group_warm_up_report
from engine.reports import LoadReport, WarmUpReport

FIRST = LoadReport(
    weight_bytes=100,
    activation_bytes=20,
    workspace_bytes=30,
    graph_bytes=4,
    block_bytes=8,
    windows=(None, 64),
    device_bytes_total=1000,
    device_bytes_free=900,
    attention_backend="cpu",
)
SECOND = msgspec.structs.replace(
    FIRST, weight_bytes=90, activation_bytes=25, block_bytes=16, device_bytes_total=800, device_bytes_free=950
)


def test_ranks_of_one_cpu_share_its_memory() -> None:
    both = group_load_report("cpu", [FIRST, SECOND])
    assert (both.weight_bytes, both.activation_bytes, both.workspace_bytes, both.graph_bytes) == (190, 45, 60, 8)
    assert both.block_bytes == 24, "as many blocks in each rank, of what heads each has"
    assert (both.device_bytes_total, both.device_bytes_free) == (1000, 900), "what rank 0 saw"
    assert (both.windows, both.attention_backend) == ((None, 64), "cpu")
    before = group_load_report("cpu", [FIRST, SECOND], (5000, 4000))
    assert (before.device_bytes_total, before.device_bytes_free) == (5000, 4000), "before any rank began"


def test_each_gpu_has_to_hold_what_its_rank_needs() -> None:
    both = group_load_report("cuda", [FIRST, SECOND])
    assert (both.weight_bytes, both.activation_bytes, both.workspace_bytes, both.graph_bytes) == (100, 25, 30, 4)
    assert both.block_bytes == 16
    assert (both.device_bytes_total, both.device_bytes_free) == (800, 900)


def test_each_host_has_to_hold_what_its_ranks_need() -> None:
    third = msgspec.structs.replace(SECOND, weight_bytes=150, device_bytes_total=700, device_bytes_free=300)
    of_all = group_load_report("cpu", [FIRST, third, SECOND], (5000, 4000), ["a", "b", "a"])
    assert (of_all.weight_bytes, of_all.activation_bytes, of_all.block_bytes) == (190, 45, 24)
    assert (of_all.device_bytes_total, of_all.device_bytes_free) == (700, 300)
    shared = group_load_report("cpu", [FIRST, third, SECOND], (5000, 4000), ["a", "a", "a"])
    assert shared == group_load_report("cpu", [FIRST, third, SECOND], (5000, 4000))


@pytest.mark.parametrize(
    ("name", "value"), [("windows", (None,)), ("attention_backend", "reference"), ("exact_lengths", True)]
)
def test_ranks_that_disagree_are_refused(name: str, value: object) -> None:
    with pytest.raises(EngineError, match=f"disagree about {name}: rank 0: .*, rank 1: "):
        group_load_report("cpu", [FIRST, msgspec.structs.replace(SECOND, **{name: value})])


def test_a_group_is_ready_when_its_slowest_rank_is() -> None:
    first = WarmUpReport(distinct_pieces=3, compiled=2, reused=1, seconds=5.0, graphs_captured=9, swap_block_s=0.1)
    second = WarmUpReport(distinct_pieces=4, compiled=1, reused=3, seconds=7.0, graphs_captured=8, graphs_pending=1)
    both = group_warm_up_report([first, second])
    assert (both.distinct_pieces, both.compiled, both.reused, both.seconds) == (3, 3, 4, 7.0)
    assert (both.graphs_captured, both.graphs_pending, both.swap_block_s) == (8, 1, 0.1)
    assert not both.compile_failed
    failed = msgspec.structs.replace(second, compile_failed=True)
    assert group_warm_up_report([first, failed]).compile_failed
