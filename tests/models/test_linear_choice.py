"""The choice of linear kernels: what is faster and right, the same at every start, and never a guess."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from compilation.errors import CompileError
from engine.models.kernels import BUCKETS, TILES, Plan, decode, encode
from engine.models.layers import Linear
from engine.models.linear_choice import choose_linears
from engine.models.linear_doubts import Measured, doubts

CPU = torch.device("cpu")
MATVEC, OTHER_MATVEC = Plan(TILES[0]), Plan(TILES[1])
MATMUL = Plan(next(tile for tile in TILES if tile.kind == "matmul" and tile.max_rows == 16), 2)
MATERIAL = {"device": "test"}


class CannotRunError(Exception):
    pass


class FakeKernels:
    """Computes what the library does, unless told otherwise."""

    failures: tuple[type[Exception], ...] = (CannotRunError,)

    def __init__(self) -> None:
        self.calls: list[tuple[Plan, int]] = []
        self.broken: dict[Plan, Callable[[torch.Tensor], torch.Tensor]] = {}

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Plan) -> torch.Tensor:
        self.calls.append((plan, x.shape[0]))
        y = F.linear(x, weight, bias)
        return self.broken[plan](y) if plan in self.broken else y


class FakeTimer:
    """Says what the script says: 100 µs for the library, 200 for a kernel that is not in it."""

    multiprocessors, l2_bytes = 132, 1 << 12

    def __init__(self, kernels: FakeKernels, script: dict[tuple[Plan, int], float]) -> None:
        self._kernels, self._script = kernels, script
        self.asked = 0
        self.most_copies = 0
        self.copies_gb_per_s = 1e6

    def median_us(self, call: Callable[[int], object], copies: int, size_bytes: int) -> float:
        self.asked += 1
        self.most_copies = max(self.most_copies, copies)
        before = len(self._kernels.calls)
        results = [call(i) for i in range(copies)]
        assert len({bytes(r.view(torch.uint8).numpy()) for r in results}) == copies  # other weights each time
        made = self._kernels.calls[before:]
        return self._script.get(made[0], 200.0) if made else 100.0

    def copy_gb_per_s(self) -> float:
        return self.copies_gb_per_s


def layers(
    count: int = 3, dtype: torch.dtype = torch.bfloat16, n: int = 64, k: int = 2048, bias: bool = False
) -> nn.ModuleList:
    generator = torch.Generator().manual_seed(0)
    made = nn.ModuleList(Linear(k, n, bias, dtype, CPU) for _ in range(count))
    for parameter in made.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


def choose(
    model: nn.Module, cache_dir: Path, script: dict[tuple[Plan, int], float], material: dict[str, str] = MATERIAL
) -> tuple[FakeKernels, FakeTimer]:
    kernels = FakeKernels()
    timer = FakeTimer(kernels, script)
    choose_linears(model, cache_dir, timer=timer, kernels=kernels, material=material, least_bytes=0)
    return kernels, timer


def test_the_fastest_kernel_is_chosen_for_each_bucket_and_for_all_layers_of_a_shape(tmp_path: Path) -> None:
    model = layers()
    script = {(MATVEC, 1): 80.0, (OTHER_MATVEC, 1): 70.0, (MATMUL, 8): 90.0, (MATMUL, 16): 99.0}
    choose(model, tmp_path, script)
    assert {linear.choice for linear in model} == {encode({1: OTHER_MATVEC, 8: MATMUL})}
    assert decode(model[0].choice)[5] == MATMUL and decode(model[0].choice)[9] is None


def test_a_gain_within_the_noise_leaves_the_library(tmp_path: Path) -> None:
    model = layers()
    choose(model, tmp_path, {(MATVEC, 1): 98.0})
    assert [linear.choice for linear in model] == [0, 0, 0]


@pytest.mark.parametrize("wrong", ["one row", "nan", "fails"])
def test_a_kernel_that_fails_or_computes_something_else_is_never_chosen(wrong: str, tmp_path: Path) -> None:
    def one_row(y: torch.Tensor) -> torch.Tensor:
        y[-1] *= 1.05
        return y

    def cannot(y: torch.Tensor) -> torch.Tensor:
        raise CannotRunError

    model, kernels = layers(), FakeKernels()
    kernels.broken[MATVEC] = {"one row": one_row, "nan": lambda y: y * float("nan"), "fails": cannot}[wrong]
    timer = FakeTimer(kernels, {(MATVEC, 1): 10.0, (OTHER_MATVEC, 1): 60.0})
    choose_linears(model, tmp_path, timer=timer, kernels=kernels, material=MATERIAL, least_bytes=0)
    assert model[0].choice == encode({1: OTHER_MATVEC})


def test_enough_layers_are_timed_to_exceed_the_cache_and_no_more(tmp_path: Path) -> None:
    kernels, model = FakeKernels(), layers(9, n=16, k=512)
    timer = FakeTimer(kernels, {})
    timer.l2_bytes = 5 * 16 * 512 * 2 // 4
    choose_linears(model, tmp_path, timer=timer, kernels=kernels, material=MATERIAL, least_bytes=0)
    assert timer.most_copies == 5


def test_the_next_start_chooses_the_same_without_measuring_and_loads_what_it_chose(tmp_path: Path) -> None:
    script = {(MATVEC, 1): 80.0, (MATMUL, 16): 60.0}
    first, second = layers(), layers()
    choose(first, tmp_path, script)
    kernels, timer = choose(second, tmp_path, {(OTHER_MATVEC, 1): 10.0})
    assert timer.asked == 0
    assert second[0].choice == first[0].choice == encode({1: MATVEC, 16: MATMUL})
    assert kernels.calls == [(MATVEC, 1), (MATMUL, 16)]


def test_another_model_measures_only_the_shapes_that_are_new(tmp_path: Path) -> None:
    choose(layers(), tmp_path, {(MATVEC, 1): 80.0})
    both = nn.ModuleList([layers(2), layers(2, bias=True)])
    _, timer = choose(both, tmp_path, {(MATVEC, 1): 90.0})
    assert timer.asked > 0 and timer.most_copies == 2
    assert {linear.choice for group in both for linear in group} == {encode({1: MATVEC})}
    _, timer = choose(both, tmp_path, {})
    assert timer.asked == 0


def damage(path: Path, how: str) -> None:
    text = path.read_text()
    if how == "cut":
        path.write_text(text[: len(text) // 2])
    elif how == "changed":
        path.write_text(text.replace('"splits": 1', '"splits": 2', 1))
    elif how == "other material":
        path.write_text(text.replace('"device": "test"', '"device": "other"'))
    else:
        table = json.loads(text)
        table["unknown"] = 1
        path.write_text(json.dumps(table))


@pytest.mark.parametrize("how", ["cut", "changed", "other material", "unknown field"])
def test_a_file_that_is_not_what_was_written_is_measured_again(how: str, tmp_path: Path) -> None:
    choose(layers(), tmp_path, {(MATVEC, 1): 80.0})
    (path,) = (tmp_path / "linears").glob("*.json")
    before = path.read_text()
    damage(path, how)
    assert path.read_text() != before
    model = layers()
    _, timer = choose(model, tmp_path, {(OTHER_MATVEC, 1): 80.0})
    assert timer.asked > len(BUCKETS)
    assert model[0].choice == encode({1: OTHER_MATVEC})


class UnsteadyTimer(FakeTimer):
    """As the script says, but for the calls (by number) that are disturbed."""

    def __init__(self, kernels: FakeKernels, disturbed: dict[int, float]) -> None:
        super().__init__(kernels, {(MATVEC, 1): 80.0})
        self._disturbed = disturbed

    def median_us(self, call: Callable[[int], object], copies: int, size_bytes: int) -> float:
        told = super().median_us(call, copies, size_bytes)
        return told * self._disturbed.get(self.asked, 1.0)


def choose_unsteadily(
    cache_dir: Path, disturbed: dict[int, float], copy_gb_per_s: float = 1e6
) -> tuple[nn.ModuleList, UnsteadyTimer]:
    model, kernels = layers(), FakeKernels()
    timer = UnsteadyTimer(kernels, disturbed)
    timer.copies_gb_per_s = copy_gb_per_s
    choose_linears(model, cache_dir, timer=timer, kernels=kernels, material=MATERIAL, least_bytes=0)
    return model, timer


def bandwidths(cache_dir: Path) -> list[float]:
    (path,) = (cache_dir / "linears").glob("*.json")
    shapes = json.loads(path.read_text())["shapes"]
    return [found["gb_per_s"] for rows in shapes.values() for found in rows.values()]


WEIGHTS_GB_PER_S = 64 * 2048 * 2 / 100 / 1e3
"""of the script's 100 µs"""


def test_the_bandwidth_that_was_seen_is_kept(tmp_path: Path) -> None:
    choose(layers(), tmp_path, {(MATVEC, 1): 80.0})
    assert bandwidths(tmp_path) == pytest.approx([WEIGHTS_GB_PER_S / 0.8, *[WEIGHTS_GB_PER_S] * 4], rel=1e-3)


@pytest.mark.parametrize("factor", [1e-3, 50.0], ids=["faster than memory", "disturbed"])
def test_an_implausible_timing_is_made_again_at_once(factor: float, tmp_path: Path) -> None:
    quiet = choose_unsteadily(tmp_path / "quiet", {}, 2 * WEIGHTS_GB_PER_S)[1].asked
    disturbed = dict.fromkeys(range(1, 30), factor)  # all of the first bucket's calls
    model, timer = choose_unsteadily(tmp_path / "loud", disturbed, 2 * WEIGHTS_GB_PER_S)
    assert timer.asked == 2 * quiet
    assert model[0].choice == encode({1: MATVEC})
    assert bandwidths(tmp_path / "loud") == bandwidths(tmp_path / "quiet")


def test_what_stays_implausible_serves_with_a_warning_and_is_timed_again_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    always = dict.fromkeys(range(1, 10_000), 1e-3)
    choose_unsteadily(tmp_path, always, 2 * WEIGHTS_GB_PER_S)
    assert "implausible" in caplog.text and bandwidths(tmp_path) == []
    model, timer = choose_unsteadily(tmp_path, {}, 2 * WEIGHTS_GB_PER_S)
    assert timer.asked > 0 and model[0].choice == encode({1: MATVEC})
    assert choose_unsteadily(tmp_path, {}, 2 * WEIGHTS_GB_PER_S)[1].asked == 0


def measured(*gb_per_s: float, size_bytes: int) -> dict[int, Measured]:
    us = [size_bytes / each / 1e3 for each in gb_per_s]
    return {
        rows: Measured(tile=None, us=t, library_us=t, gb_per_s=g)
        for rows, t, g in zip(BUCKETS, us, gb_per_s, strict=True)
    }


def test_bandwidths_check_each_other() -> None:
    large, small = 100 << 20, 1 << 20
    fine = measured(4000, 3900, 3900, 3800, 3000, size_bytes=large)
    launched = measured(*[500.0] * 5, size_bytes=small)
    assert doubts({"large": fine, "small": launched}, 4200.0) == {}
    assert "where a copy reaches 3000" in doubts({"large": fine}, 3000.0)["large"]
    one_slow = measured(4000, 3900, 900, 3800, 3000, size_bytes=large)
    assert "4 rows at 900 GB/s, where others reach 3800" in doubts({"large": one_slow}, 4200.0)["large"]
    all_slow = measured(*[900.0] * 5, size_bytes=2 * large)
    assert list(doubts({"huge": all_slow, "large": fine, "small": launched}, 4200.0)) == ["huge"]


def test_another_device_has_a_table_of_its_own(tmp_path: Path) -> None:
    choose(layers(), tmp_path, {(MATVEC, 1): 80.0})
    model = layers()
    choose(model, tmp_path, {(OTHER_MATVEC, 1): 80.0}, {"device": "another"})
    assert model[0].choice == encode({1: OTHER_MATVEC})
    assert len(list((tmp_path / "linears").glob("*.json"))) == 2


def test_what_the_kernels_cannot_read_is_left_to_the_library(tmp_path: Path) -> None:
    """float32, and weights that do not begin at a multiple of 16 bytes."""
    wide, shifted = layers(dtype=torch.float32), layers(2)
    storage = torch.zeros(64 * 2048 + 1, dtype=torch.bfloat16)
    shifted[1].weight = nn.Parameter(storage[1:].view(64, 2048), requires_grad=False)
    for model in (wide, shifted):
        _, timer = choose(model, tmp_path, {(MATVEC, 1): 10.0})
        assert timer.asked == 0 and all(linear.choice == 0 for linear in model)


def test_weights_that_are_read_in_no_time_are_left_to_the_library(tmp_path: Path) -> None:
    model = nn.ModuleList([*layers(2), *layers(2, n=256, k=2048)])
    kernels = FakeKernels()
    timer = FakeTimer(kernels, {(MATVEC, 1): 10.0})
    choose_linears(model, tmp_path, timer=timer, kernels=kernels, material=MATERIAL)
    assert [linear.choice for linear in model] == [0, 0, *[encode({1: MATVEC})] * 2]


def test_a_cache_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(CompileError, match="writable by others"):
        choose(layers(), tmp_path, {})


def test_the_log_says_what_was_chosen_and_how_fast_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "engine.models.linear_choice"):
        choose(layers(), tmp_path, {(MATVEC, 1): 50.0})
    (line,) = (r.getMessage() for r in caplog.records if "64x2048" in r.getMessage())
    gb_per_s = 64 * 2048 * 2 / 50e-6 / 1e9
    assert f"1 rows {MATVEC} {round(gb_per_s)} GB/s (library {round(gb_per_s / 2)})" in line
    assert "2 rows library" in line
