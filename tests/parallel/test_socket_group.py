"""Collectives over sockets between real processes: the bits of plain torch, one reason for all, and who is lost."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
import torch
from rank_cases import draw_case, expected_deal, hash_of
from rank_processes import Workers, connected

from engine.parallel.socket_group import SocketGroup


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_every_rank_gets_the_bits_of_plain_torch(workers: Workers, size: int) -> None:
    first, count, most_rows, most_columns = 1000 * size, 60, 64, 700
    cases = [draw_case(seed, size, most_rows, most_columns) for seed in range(first, first + count)]
    assert max(case.rows * case.columns[0] * 4 for case in cases if not case.gathers) > 1 << 16
    expected = [hash_of(case.expected()) for case in cases]
    assert workers.socket_group(size).all("run_cases", first, count, most_rows, most_columns) == [expected] * size


def test_what_is_larger_than_a_piece_goes_in_several(workers: Workers) -> None:
    seeds = {kind: next(s for s in range(100) if draw_case(s, 3, 300, 5000).gathers == kind and _large(s))
             for kind in (True, False)}  # fmt: skip
    ranks = workers.socket_group(3)
    for seed in seeds.values():
        expected = hash_of(draw_case(seed, 3, 300, 5000).expected())
        assert ranks.all("run_cases", seed, 1, 300, 5000) == [[expected]] * 3


def _large(seed: int) -> bool:
    case = draw_case(seed, 3, 300, 5000)
    return case.rows * case.columns[0] * case.x_dtype.itemsize > 5 << 20


@pytest.mark.parametrize(("size", "most_rows", "most_columns", "count"), [(2, 64, 700, 30), (3, 300, 5000, 5)])
def test_every_rank_gets_the_columns_that_are_for_it(
    workers: Workers, size: int, most_rows: int, most_columns: int, count: int
) -> None:
    cases = [draw_case(seed, size, most_rows, most_columns) for seed in range(count)]
    found = workers.socket_group(size).all("run_deal_cases", 0, count, most_rows, most_columns)
    assert found == [[hash_of(expected_deal(case, rank)) for case in cases] for rank in range(size)]


def test_thousands_of_collectives_do_not_meet_one_another(workers: Workers) -> None:
    assert workers.socket_group(3).all("run_many", 5, 40, 2000) == [[], [], []]


def test_the_first_reason_reaches_those_who_wait_and_those_who_do_not(workers: Workers) -> None:
    reason = "rank 1 was killed – §" + "ü" * 600  # two bytes each: longer than what is kept
    waiting, other, third = workers.socket_group(3).processes
    waiting.send("reduce", 1, 8, torch.float32)
    assert not waiting.answers(0.1)
    other.send("abort", reason)
    other.result()
    with pytest.raises(RuntimeError, match=r"rank 1 was killed – §ü+$"):
        waiting.result()
    for late in (other, third):
        late.send("reduce", 1, 8, torch.float32)
        with pytest.raises(RuntimeError, match="rank 1 was killed"):
            late.result()

    waiting, _ = workers.socket_group(2).processes
    waiting.send("reduce_and_abort", "enough")
    with pytest.raises(RuntimeError, match=r"^enough$"):
        waiting.result()


def test_a_rank_that_waits_leaves_its_core_to_others(workers: Workers) -> None:
    waiting, late = workers.socket_group(2).processes
    waiting.send("reduce_and_measure")
    assert not waiting.answers(0.6)
    late.send("reduce", 1, 8, torch.float32)
    late.result()
    assert waiting.result() < 0.1


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([("reduce", 2, 4, torch.float32), ("gather", 2, [4, 4])],
         "rank 1 called all_gather of \\[2, 4\\] .* to 8 columns where rank 0 called all_reduce of \\[2, 4\\] float32"),
        ([("reduce", 2, 4, torch.float32), ("reduce", 4, 2, torch.float32)],
         "rank 1 called all_reduce of \\[4, 2\\] .* where rank 0 called all_reduce of \\[2, 4\\] float32"),
        ([("gather", 2, [3, 5]), ("gather", 2, [4, 4])],
         "rank 1 called all_gather of \\[2, 4\\] .* where rank 0 called all_gather of \\[2, 3\\]"),
    ],
)  # fmt: skip
def test_ranks_that_call_something_else_are_told_at_once_in_the_same_words(
    workers: Workers, calls: list[tuple[object, ...]], words: str
) -> None:
    ranks = workers.socket_group(2)
    for process, (name, *arguments) in zip(ranks.processes, calls):
        process.send(str(name), *arguments)
    for process in ranks.processes:
        with pytest.raises(RuntimeError, match=f"^{words}"):
            process.result()


def test_what_one_rank_is_refused_the_others_do_not_wait_for(workers: Workers) -> None:
    first, second = workers.socket_group(2).processes
    first.send("reduce", 1, 8, torch.float32)
    second.send("reduce", 1, 8, torch.int32)
    with pytest.raises(RuntimeError, match="sums are made of float32"):
        second.result()
    with pytest.raises(RuntimeError, match=r"^rank 1: all_reduce: sums are made of float32"):
        first.result()


def test_a_lost_rank_is_named_where_nobody_says_why_and_else_the_cause_is(workers: Workers) -> None:
    for cause in (None, "rank 2 ended by signal 9"):
        waiting, other, killed = workers.socket_group(3).processes
        waiting.send("reduce", 1, 8, torch.float32)
        assert not waiting.answers(0.1)
        killed.process.send_signal(signal.SIGKILL)
        killed.process.wait()
        assert not waiting.answers(0.1)
        if cause is not None:
            other.send("abort", cause)
            other.result()
        with pytest.raises(RuntimeError, match=f"^{cause or 'rank 0 has lost rank 2: '}"):
            waiting.result()


def test_what_is_no_stream_is_refused_and_what_nobody_of_the_group_sends(native_cache: Path) -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        pytest.raises(RuntimeError, match="is no stream to rank 1"),
    ):
        SocketGroup([-1, datagrams.fileno()], "refused", 0, native_cache)
    ours, theirs = connected()
    group = SocketGroup([-1, ours.detach()], "babbled", 0, native_cache)
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4)
    with pytest.raises(RuntimeError, match="rank 0 received what rank 1 cannot have sent"):
        group.all_reduce(torch.ones(1, 8), None, torch.float32, group.name)
    group.close()
    theirs.close()
