"""Workloads: the named ones are fixed for ever (peers were measured with them); random ones keep to their bounds."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from entrypoints.bench.workloads import FIRST_ID, random_workload, workload


@pytest.mark.parametrize(
    ("name", "repeat", "first_ids", "n_in", "n_out", "digest"),
    [
        ("W1", 0, [20934, 35600, 39718], 32, 128, "f6b6b80941095263"),
        ("W1", -1, [32325, 20092, 19731], 32, 128, "456d26d346f4976b"),
        ("W2", 0, [39180, 3324, 11547], 8192, 8192, "7ed563418f83ed76"),
        ("W2", 1, [38708, 20807, 12951], 8192, 8192, "81857bbde58a0b48"),
        ("W3", 0, [20203, 35809, 38189], 33107, 16864, "86fd72b1837ecd46"),
        ("W3", 1, [36761, 1403, 21516], 33107, 16864, "852745af2ba44dde"),
        ("W4", 0, [18079, 35334, 18573], 34816, 2048, "b681726655585e77"),
        ("W5", 0, [27886, 15347, 33282], 2048, 1, "e88b04c6492436b8"),
        ("W6", 0, [18096, 16542, 20745], 8192, 4096, "153afbeb138cec1f"),
        ("W6", 1, [38462, 33595, 19145], 8192, 4096, "fedaa264ae8fa9a5"),
        ("WARM", -1, [8908, 30347, 135], 192, 64, "60c21b054b0a45f8"),
    ],
)
def test_named_workloads_are_those_that_the_peers_ran(
    name: str, repeat: int, first_ids: list[int], n_in: int, n_out: int, digest: str
) -> None:
    requests = workload(name, repeat)
    assert requests[0].prompt_token_ids[:3] == first_ids
    assert sum(len(r.prompt_token_ids) for r in requests) == n_in
    assert sum(r.max_tokens for r in requests) == n_out
    plain = [[r.prompt_token_ids, r.max_tokens, round(r.arrival_s, 9)] for r in requests]
    assert hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()[:16] == digest


def test_an_unknown_workload_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"W9.*W1, W2, W3, W4, W5, W6, W7$"):
        workload("W9")


@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_random_lengths_ids_and_arrivals_keep_to_their_bounds_and_repeat(ratio: float) -> None:
    made = random_workload(200, 40, 20, 50.0, 300, 7, ratio)
    assert made == random_workload(200, 40, 20, 50.0, 300, 7, ratio)
    assert made != random_workload(200, 40, 20, 50.0, 300, 8, ratio)
    lengths = [len(r.prompt_token_ids) for r in made]
    assert min(lengths) >= 40 * (1 - ratio) and max(lengths) <= 40 * (1 + ratio)
    assert {20} == {r.max_tokens for r in made} if not ratio else len({r.max_tokens for r in made}) > 5
    ids = [i for r in made for i in r.prompt_token_ids]
    assert min(ids) >= FIRST_ID and max(ids) < 300
    arrivals = np.array([r.arrival_s for r in made])
    assert arrivals[0] == 0 and (np.diff(arrivals) > 0).all()
    assert 200 / arrivals[-1] == pytest.approx(50, rel=0.3)


def test_random_ids_fit_a_tiny_vocabulary() -> None:
    assert {i for r in random_workload(3, 9, 1, None, 50, 0) for i in r.prompt_token_ids} <= set(range(50))
