"""How weights are read for one row: no bit depends on it, and the machine's choice is measured once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.cpu_kernels import reading
from engine.cpu_kernels.formats import Format
from engine.cpu_kernels.linear import LinearOps, pack_bf16
from engine.cpu_kernels.quantize import pack_int4, pack_int8
from engine.cpu_kernels.reading import CANDIDATES, DEFAULT, Reading, choose_reading

N, K = 32 * 21 + 5, 160
LARGE = 1 << 40
PACK = {Format.BFLOAT16: pack_bf16, Format.INT8: pack_int8, Format.Q4_1: pack_int4}


@pytest.fixture
def ops(linear_ops: LinearOps) -> Iterator[LinearOps]:
    yield linear_ops
    linear_ops.choose_reading(*DEFAULT)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("format", PACK)
def test_no_bit_depends_on_how_weights_are_read(ops: LinearOps, threads: int, format: Format) -> None:
    torch.set_num_threads(threads)
    weights = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed = PACK[format](weights)
    for isa in range(len(ops.isas) + 1):
        for rows in (1, 2, 13):
            x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).bfloat16()
            found = []
            for way in (Reading(streams, past) for streams in range(1, 9) for past in (False, True)):
                ops.choose_reading(*way)
                found.append(ops.packed_linear(x, packed, N, int(format), None, None, 0.0, None, 0, False, isa))
            assert all(torch.equal(found[0], each) for each in found)


def test_only_numbers_that_kernels_have_are_taken(ops: LinearOps) -> None:
    for bad in (0, 9, -1):
        with pytest.raises(RuntimeError, match="choose_reading"):
            ops.choose_reading(bad, False)


Timed = tuple[dict[int, float], dict[int, float], float]


def timed_as(
    through: Callable[[int], float], past: Callable[[int], float], calls: list[LinearOps], own: float = 1.0
) -> Callable[..., Timed]:
    def measured(ops: LinearOps) -> Timed:
        calls.append(ops)
        return {each: through(each) for each in CANDIDATES}, {each: past(each) for each in CANDIDATES}, own

    return measured


def test_the_fastest_is_taken_measured_once_and_kept(
    ops: LinearOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[LinearOps] = []
    monkeypatch.setattr(reading, "measured", timed_as(lambda n: 10.0 - abs(n - 3), lambda n: 8.0, calls))
    assert [choose_reading(ops, LARGE, tmp_path) for _ in range(3)] == [Reading(3, False)] * 3
    assert len(calls) == 1
    (file,) = (tmp_path / "linears").glob("reading-*.json")
    for damaged in ("", "{}", file.read_text().replace('"8"', '"9"', 1)):
        file.write_text(damaged)
        choose_reading(ops, LARGE, tmp_path)
    assert len(calls) == 4
    torch.set_num_threads(torch.get_num_threads() + 1)
    choose_reading(ops, LARGE, tmp_path)
    assert len(calls) == 5, "another number of threads is another machine"


@pytest.mark.parametrize(("speed", "past"), [(9.8, True), (9.5, False)])
def test_past_the_caches_is_taken_where_it_costs_next_to_nothing_and_weights_do_not_stay_there(
    ops: LinearOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: float, past: bool
) -> None:
    monkeypatch.setattr(reading, "measured", timed_as(lambda n: 10.0 - abs(n - 3), lambda n: speed - n / 100, []))
    monkeypatch.setattr(reading, "_last_level_bytes", lambda: 1 << 20)
    assert choose_reading(ops, LARGE, tmp_path) == (Reading(1, True) if past else Reading(3, False))
    assert choose_reading(ops, 2 << 20, tmp_path).past == past
    assert not choose_reading(ops, (2 << 20) - 1, tmp_path).past


def test_what_was_timed_beside_others_is_used_and_not_kept(
    ops: LinearOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[LinearOps] = []
    for own, expected in ((0.7, Reading(8, False)), (0.95, Reading(1, False))):
        better = float if own < 0.9 else (lambda n: 10.0 - n)
        monkeypatch.setattr(reading, "measured", timed_as(better, lambda n: 0.0, calls, own))
        assert choose_reading(ops, LARGE, tmp_path) == expected
    assert choose_reading(ops, LARGE, tmp_path) == Reading(1, False)
    assert len(calls) == 2


def test_a_cache_that_cannot_be_written_costs_a_timing_and_nothing_else(
    ops: LinearOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[LinearOps] = []
    monkeypatch.setattr(reading, "measured", timed_as(float, lambda n: 0.0, calls))

    def locked(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(reading, "locked", locked)
        assert choose_reading(ops, reading.LEAST_BYTES - 1, tmp_path) == DEFAULT
        assert choose_reading(ops, LARGE, tmp_path) == Reading(8, False)
        assert len(calls) == 1 and not list((tmp_path / "linears").iterdir())
    choose_reading(ops, LARGE, tmp_path)
    monkeypatch.setattr(reading, "locked", locked)
    assert choose_reading(ops, LARGE, tmp_path) == Reading(8, False)
    assert len(calls) == 2, "what is known is read without writing"


def test_small_models_measure_nothing_and_use_what_is_known(
    ops: LinearOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[LinearOps] = []
    monkeypatch.setattr(reading, "measured", timed_as(float, lambda n: 0.0, calls))
    assert choose_reading(ops, reading.LEAST_BYTES - 1, tmp_path) == DEFAULT
    assert not calls
    assert choose_reading(ops, reading.LEAST_BYTES, tmp_path) == Reading(8, False)
    assert choose_reading(ops, 1, tmp_path) == Reading(8, False)
    assert len(calls) == 1


def test_a_measurement_asks_for_every_way(ops: LinearOps, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Reading] = []

    def choose(streams: int, past: bool) -> None:
        asked.append(Reading(streams, past))
        ops.choose_reading(streams, past)

    monkeypatch.setattr(reading, "_SHAPES", ((64, 32), (32, 64)))
    monkeypatch.setattr(reading, "_last_level_bytes", lambda: 0)
    *speeds, own = reading.measured(replace(ops, choose_reading=choose))
    assert own > 0
    for found in speeds:
        assert set(found) == set(CANDIDATES)
        assert all(value > 0 for value in found.values())
    assert set(asked) == {Reading(streams, past) for streams in CANDIDATES for past in (False, True)}
