"""How many streams of weights one row meets: no bit depends on it, and the machine's choice is measured once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.cpu_kernels import streams
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps, pack_bf16
from engine.cpu_kernels.streams import CANDIDATES, DEFAULT, Matrix, choose_streams

N, K = 32 * 21 + 5, 130


@pytest.fixture
def ops(linear_ops: LinearOps) -> Iterator[LinearOps]:
    yield linear_ops
    linear_ops.choose_streams(DEFAULT)


def matrix() -> Matrix:
    return Matrix(pack_bf16(torch.randn(N, K, generator=torch.Generator().manual_seed(1)).bfloat16()), N, K)


@pytest.mark.parametrize("threads", [1, 2])
def test_no_bit_depends_on_the_number_of_streams(ops: LinearOps, threads: int) -> None:
    torch.set_num_threads(threads)
    weight, n, k = matrix()
    for isa in range(len(ops.isas) + 1):
        for rows in (1, 2, 3):
            x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).bfloat16()
            found = []
            for chosen in range(1, 9):
                assert ops.choose_streams(chosen) == chosen
                found.append(
                    ops.packed_linear(x, weight, n, int(Format.BFLOAT16), None, None, 0.0, None, 0, False, isa)
                )
            assert all(torch.equal(found[0], each) for each in found)


def test_only_numbers_that_kernels_have_are_taken(ops: LinearOps) -> None:
    for bad in (0, 9, -1):
        with pytest.raises(RuntimeError, match="choose_streams"):
            ops.choose_streams(bad)


def timed_as(gb_per_s: Callable[[int], float], calls: list[int]) -> Callable[..., dict[int, float]]:
    def measured(_: LinearOps, matrices: list[Matrix]) -> dict[int, float]:
        calls.append(len(matrices))
        return {each: gb_per_s(each) for each in CANDIDATES}

    return measured


def test_the_fastest_is_taken_measured_once_and_kept(
    ops: LinearOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(streams, "LEAST_BYTES", 1)
    monkeypatch.setattr(streams, "measured", timed_as(lambda n: 10.0 - abs(n - 3), calls))
    assert [choose_streams(ops, [matrix()], tmp_path) for _ in range(3)] == [3, 3, 3]
    assert calls == [1]
    (file,) = (tmp_path / "linears").glob("streams-*.json")
    for damaged in ("", "{}", file.read_text().replace('"8"', '"9"')):
        file.write_text(damaged)
        choose_streams(ops, [matrix()], tmp_path)
    assert len(calls) == 4
    torch.set_num_threads(torch.get_num_threads() + 1)
    choose_streams(ops, [matrix()], tmp_path)
    assert len(calls) == 5, "another number of threads is another machine"


def test_small_models_measure_nothing_and_use_what_is_known(
    ops: LinearOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(streams, "measured", timed_as(float, calls))
    assert choose_streams(ops, [matrix()], tmp_path) == choose_streams(ops, [], tmp_path) == DEFAULT
    assert not calls
    monkeypatch.setattr(streams, "LEAST_BYTES", 1)
    assert choose_streams(ops, [matrix()], tmp_path) == 8
    monkeypatch.undo()
    assert choose_streams(ops, [], tmp_path) == 8


def test_a_measurement_asks_for_every_candidate_and_no_more_than_it_needs(
    ops: LinearOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def choose(chosen: int) -> int:
        asked.append(chosen)
        return ops.choose_streams(chosen)

    many: list[Any] = [matrix()] * 5
    size = many[0].weight.numel()
    monkeypatch.setattr(streams, "_MOST_BYTES", 2 * size)
    found = streams.measured(replace(ops, choose_streams=choose), many)
    assert set(found) == set(asked) == set(CANDIDATES)
    assert all(value > 0 for value in found.values())
