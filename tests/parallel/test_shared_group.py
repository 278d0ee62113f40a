"""Collectives between real processes, against plain torch in the order of ranks."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_cases import draw_case, expected_deal, hash_of
from rank_processes import Workers

from engine.executor import kernels_ahead
from engine.parallel import build, shared_memory
from engine.parallel.shared_memory import SharedGroup, allocate

ROOT = Path(__file__).parents[2]


def test_the_build_key_covers_every_source() -> None:
    described = build.sources()
    assert set(build.CSRC.iterdir()) <= {unit.source for unit in described.units} | set(described.headers)


def test_the_library_is_built_with_the_package_and_ahead_where_there_are_ranks() -> None:
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "tools" / "build_backend.py")
    assert spec is not None and spec.loader is not None
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    assert build.__name__ in backend.DESCRIPTIONS
    assert backend.DESCRIPTIONS == kernels_ahead.DESCRIPTIONS_OF_RANKS


@pytest.mark.parametrize(("size", "slot_bytes"), [(2, 1 << 19), (2, 1 << 14), (3, 1 << 14), (4, 1)])
def test_every_rank_gets_the_bits_of_plain_torch(workers: Workers, size: int, slot_bytes: int) -> None:
    """Slots smaller and larger than what is summed at once, and than the tensors."""
    first, count, most_rows, most_columns = 1000 * size, 60, 64, 700
    cases = [draw_case(seed, size, most_rows, most_columns) for seed in range(first, first + count)]
    largest = max(case.rows * case.columns[0] * 4 for case in cases if not case.gathers)
    assert largest > 1 << 16
    expected = [hash_of(case.expected()) for case in cases]
    ranks = workers.group(size, slot_bytes)
    assert ranks.all("run_cases", first, count, most_rows, most_columns) == [expected] * size


@pytest.mark.parametrize(("size", "slot_bytes"), [(2, 1 << 19), (3, 1 << 14), (4, 1)])
def test_every_rank_gets_the_columns_that_are_for_it(workers: Workers, size: int, slot_bytes: int) -> None:
    first, count, most = 3000 * size, 40, (64, 700)
    cases = [draw_case(seed, size, *most) for seed in range(first, first + count)]
    found = workers.group(size, slot_bytes).all("run_deal_cases", first, count, *most)
    assert found == [[hash_of(expected_deal(case, rank)) for case in cases] for rank in range(size)]


def test_thousands_of_collectives_do_not_meet_one_another(workers: Workers) -> None:
    ranks = workers.group(3, 4096)
    assert ranks.all("run_many", 5, 40, 4000) == [[], [], []]


def test_whoever_waits_is_stopped_by_a_third_party_and_by_another_thread(workers: Workers, native_cache: Path) -> None:
    ranks = workers.group(2)
    waiting, other = ranks.processes
    waiting.send("reduce", 1, 8, torch.float32)
    assert not waiting.answers(0.1)
    reason = "rank 1 was killed – §" + "ü" * 600  # two bytes each: longer than what is kept
    shared_memory.abort(ranks.fd, reason, native_cache)
    shared_memory.abort(ranks.fd, "a second reason", native_cache)
    with pytest.raises(RuntimeError, match=r"rank 1 was killed – §ü+$"):
        waiting.result()
    other.send("gather", 1, [1, 1])
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        other.result()

    waiting, _ = workers.group(2).processes
    waiting.send("reduce_and_abort", "enough")
    with pytest.raises(RuntimeError, match=r"^enough$"):
        waiting.result()


def test_a_rank_that_waits_long_leaves_its_core_to_others(workers: Workers) -> None:
    waiting, late = workers.group(2).processes
    waiting.send("reduce_and_measure")
    assert not waiting.answers(0.6)
    late.send("reduce", 1, 8, torch.float32)
    late.result()
    assert waiting.result() < 0.3


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([("reduce", 2, 4, torch.float32), ("gather", 2, [4, 4])],
         ("all_reduce of \\[2, 4\\] float32", "all_gather of \\[2, 4\\] float32 to 8 columns")),
        ([("reduce", 2, 4, torch.float32), ("reduce", 4, 2, torch.float32)],
         ("all_reduce of \\[2, 4\\] float32", "all_reduce of \\[4, 2\\] float32")),
        ([("reduce", 300, 400, torch.float32), ("reduce", 300, 400, torch.float16)],
         ("all_reduce of \\[300, 400\\] float32", "all_reduce of \\[300, 400\\] float32 to float16")),
        ([("reduce", 0, 4, torch.float32), ("reduce", 0, 4, torch.float32, True)],
         ("all_reduce of \\[0, 4\\] float32", "all_reduce with a residual of \\[0, 4\\] float32")),
        ([("gather", 2, [3, 5]), ("gather", 2, [4, 4])],
         ("all_gather of \\[2, 3\\] float32 to 8 columns", "all_gather of \\[2, 4\\] float32 to 8 columns")),
        ([("gather", 2, [4, 4]), ("deal", 2, [4, 4])],
         ("all_gather of \\[2, 4\\] float32 to 8 columns", "all_to_all of \\[2, 4\\] float32 to 8 columns")),
    ],
)  # fmt: skip
def test_ranks_that_call_something_else_are_told_at_once(
    workers: Workers, calls: list[tuple[object, ...]], words: tuple[str, str]
) -> None:
    ranks = workers.group(2)
    for process, (name, *arguments) in zip(ranks.processes, calls):
        process.send(str(name), *arguments)
    first, second = words
    told = f"^rank 1 called {second} where rank 0 called {first}$|^rank 0 called {first} where rank 1 called {second}$"
    reasons = []
    for process in ranks.processes:
        with pytest.raises(RuntimeError, match=told) as raised:
            process.result()
        reasons.append(str(raised.value))
    assert reasons[0] == reasons[1]


def test_what_one_rank_is_refused_the_others_do_not_wait_for(workers: Workers) -> None:
    first, second = workers.group(2).processes
    first.send("reduce", 1, 8, torch.float32)
    second.send("reduce", 1, 8, torch.int32)
    with pytest.raises(RuntimeError, match="sums are made of float32"):
        second.result()
    with pytest.raises(RuntimeError, match=r"^rank 1: all_reduce: sums are made of float32"):
        first.result()


def test_a_function_compiled_once_calls_the_same_collectives_for_any_number_of_rows(workers: Workers) -> None:
    ranks = workers.group(2)
    rows, columns = [3, 7, 200, 2], [4, 3]
    for unbacked in (True, False):
        got = ranks.all("compute_both", rows, columns, unbacked)
        for at, count in enumerate(rows):
            x = torch.arange(count * 4, dtype=torch.float32).view(count, 4)
            doubled = (x + (x + 1)).to(torch.bfloat16) * 2
            expected = hash_of(torch.cat([doubled, doubled[:, :3]], dim=1))
            assert [of_rank[at] for of_rank in got] == [expected] * 2


def test_closing_leaves_no_mapping_and_no_file(workers: Workers) -> None:
    before = set(os.listdir("/dev/shm"))
    ranks = workers.group(2)
    assert all(len(mapped) == 1 for mapped in ranks.all("mappings"))
    assert set(os.listdir("/dev/shm")) <= before
    ranks.all("reduce", 1, 8, torch.float32)
    ranks.all("leave")
    assert ranks.all("mappings") == [[], []]
    ranks.processes[0].send("reduce", 1, 8, torch.float32)
    with pytest.raises(RuntimeError, match=r"no group named group-[0-9]+ is open"):
        ranks.processes[0].result()


def test_a_rank_that_was_killed_is_not_waited_for_once_its_watcher_says_so(
    workers: Workers, native_cache: Path
) -> None:
    ranks = workers.group(2)
    waiting, killed = ranks.processes
    ranks.all("reduce", 1, 8, torch.float32)
    waiting.send("run_many", 1, 3, 10)
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait()
    assert not waiting.answers(0.1)
    shared_memory.abort(ranks.fd, "rank 1 ended by signal 9", native_cache)
    with pytest.raises(RuntimeError, match=r"^rank 1 ended by signal 9$"):
        waiting.result()


@pytest.fixture
def alone(native_cache: Path) -> Iterator[SharedGroup]:
    fd = allocate(1, 100)
    group = SharedGroup(fd, "alone", 0, 1, native_cache)
    os.close(fd)
    yield group
    group.close()


def test_a_group_of_one_rank_rounds_and_adds(alone: SharedGroup) -> None:
    x, residual = torch.randn(40, 300), torch.randn(40, 300, dtype=torch.bfloat16)
    got = alone.all_reduce(x, residual, torch.bfloat16, alone.name)
    assert torch.equal(got, x.to(torch.bfloat16) + residual)
    ids = torch.randint(0, 9, (40, 600))[:, 10:310]
    assert torch.equal(alone.all_gather(ids, [300], "alone"), ids)


@pytest.mark.parametrize(
    ("x", "residual", "words"),
    [
        (torch.ones(2, 4).T, None, "contiguous"),
        (torch.ones(4), None, "contiguous .rows, columns"),
        (torch.ones(2, 4, dtype=torch.bfloat16), None, "float32, or of the result's dtype"),
        (torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bfloat16), "of the result's dtype"),
        (torch.ones(2, 4), torch.ones(1, 4), "residual must be contiguous .2, 4."),
        (torch.ones(2, 4), torch.ones(2, 8)[:, ::2], "residual must be contiguous"),
    ],
)
def test_what_cannot_be_summed_is_refused(
    alone: SharedGroup, x: torch.Tensor, residual: torch.Tensor | None, words: str
) -> None:
    with pytest.raises(RuntimeError, match=words):
        alone.all_reduce(x, residual, torch.float32, alone.name)


@pytest.mark.parametrize(("columns", "words"), [([4, 4], "columns of 2 ranks"), ([3], "must be .rows, 3.")])
def test_what_cannot_be_gathered_is_refused(alone: SharedGroup, columns: list[int], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        alone.all_gather(torch.ones(2, 4), columns, alone.name)
    with pytest.raises(RuntimeError, match=words):
        alone.all_to_all(torch.ones(2, 4), columns, alone.name)


def test_groups_of_one_name_are_found_by_names_of_their_own(alone: SharedGroup, native_cache: Path) -> None:
    fd = allocate(1, 100)
    try:
        second = SharedGroup(fd, alone.name, 0, 1, native_cache)
    finally:
        os.close(fd)
    assert second.name == f"{alone.name}-2"
    second.abort("the second")
    x = torch.ones(1, 2)
    with pytest.raises(RuntimeError, match="the second"):
        second.all_reduce(x, None, torch.float32, second.name)
    second.close()


def test_a_rank_is_taken_once(alone: SharedGroup, native_cache: Path, tmp_path: Path) -> None:
    fd = allocate(2, 100)
    try:
        SharedGroup(fd, "other", 1, 2, native_cache).close()
        with pytest.raises(RuntimeError, match="rank 1 of this memory has been taken before"):
            SharedGroup(fd, "other", 1, 2, native_cache)
        with pytest.raises(RuntimeError, match="rank 2 of 3 does not fit a memory of 2 ranks"):
            SharedGroup(fd, "other", 2, 3, native_cache)
        with (tmp_path / "short").open("w+") as file, pytest.raises(RuntimeError, match="not the memory of a group"):
            SharedGroup(file.fileno(), "other", 0, 2, native_cache)
        with pytest.raises(OSError):
            os.ftruncate(fd, 0)  # would be a bus error of every rank
    finally:
        os.close(fd)
    with pytest.raises(ValueError):
        allocate(65, 100)


def test_an_abort_after_the_end_harms_nobody(native_cache: Path) -> None:
    fd = allocate(1, 100)
    group = SharedGroup(fd, "ended", 0, 1, native_cache)
    os.close(fd)
    group.close()
    group.abort("too late")
