"""Worlds from seeds (README.md): what must hold does in each, a seed replays, and bugs that are planted are found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import planted
import pytest
from planted import PLANTED, ROOT
from saturated import SaturatedWorld
from tiny_front import save_model
from world import Building, World, simulate

SEEDS = 200
MANY = 10_000
CHUNK = 100
ENOUGH = 1000
"""seeds within which a planted bug is to show"""


@pytest.fixture(scope="module")
def building(tmp_path_factory: pytest.TempPathFactory) -> Building:
    return Building(save_model(tmp_path_factory.mktemp("simulation") / "tiny", vocab_size=16384))


def test_in_every_world_what_must_hold_does(building: Building) -> None:
    happened = Counter[str]()
    for seed in range(SEEDS):
        happened += simulate(seed, building).happened
    ends = "whole refused late left aborted failed invalid died cut_off"
    befell = "deaths ranks_lost front_ends_killed slept scaled resumed convicted"
    counted = "preemptions preemptions_swapped prefix_hit_tokens accepted_tokens"
    assert not [name for name in f"{ends} {befell} {counted}".split() if not happened[name]], happened


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(SEEDS, MANY, CHUNK))
@pytest.mark.timeout(1500)
def test_in_many_more(building: Building, first: int) -> None:
    for seed in range(first, first + CHUNK):
        simulate(seed, building)


@pytest.mark.timeout(1500)
def test_nobody_thinks_that_a_busy_engine_hangs(building: Building, pytestconfig: pytest.Config) -> None:
    """24 hours with --exhaustive, in steps of two seconds."""
    seconds = 24 * 3600.0 if pytestconfig.getoption("exhaustive") else 1200.0

    def make(seed: int, building: Building) -> World:
        return SaturatedWorld(seed, building, seconds, step_s=2.0)

    world = simulate(1, building, make)
    assert isinstance(world, SaturatedWorld) and world.looks >= seconds / 5 - 1
    assert sum(core.core.turns for core in world.cores) > seconds / 4


def test_a_seed_replays(building: Building) -> None:
    """To the same digest of all that guests saw and all that befell cores, here and in another process."""
    seeds = (3, 14, 15)
    here = [simulate(seed, building).digest for seed in seeds]
    assert here == [simulate(seed, building).digest for seed in seeds] and len(set(here)) == len(seeds)
    script = "\n".join(
        [
            f"import sys; sys.path += {sys.path!r}",
            "from pathlib import Path",
            "from world import Building, simulate",
            f"building = Building(Path({str(building.path)!r}))",
            f"print(*(simulate(seed, building).digest for seed in {seeds}))",
        ]
    )
    environment = {**os.environ, "PYTHONHASHSEED": "11"}
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert there.stdout.split() == here


def test_planted_bugs_are_where_they_were() -> None:
    for bug in PLANTED:
        source = (ROOT / bug.module.replace(".", "/")).with_suffix(".py").read_text()
        assert source.count(bug.right) == 1, f"{bug.module} has {bug.right!r} not once"


@pytest.mark.parametrize("number", [0, 24, 36])
def test_a_planted_bug_is_found(number: int) -> None:
    assert _first_seed(number, 100) is not None, PLANTED[number]


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_planted_bugs_are_found() -> None:
    found = [_first_seed(number, ENOUGH) is not None for number in range(len(PLANTED))]
    missed = [bug for bug, was_found in zip(PLANTED, found, strict=True) if not was_found]
    assert len(PLANTED) == 47 and len(missed) <= 2, missed


def _first_seed(number: int, seeds: int) -> int | None:
    script = Path(planted.__file__)
    done = subprocess.run([sys.executable, script, str(number), str(seeds)], capture_output=True, text=True, check=True)
    first = done.stdout.split()[0]
    return None if first == "none" else int(first)
