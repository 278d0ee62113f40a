"""The hash is the documented one, and its numbers are uniform and independent over seed, position and token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_oracle import CPU, bits31, gumbel

from engine.sampling.noise import Noise, seed_words

SEEDS = [0, 1, 2, 42, -1, 2**63 - 1, -(2**63), 2**64 - 1, 123456789012345]


def keys(noise: Noise, seeds: list[int], positions: list[int]) -> torch.Tensor:
    words = torch.tensor([seed_words(s) for s in seeds], dtype=torch.int64)
    return noise.draw_keys(words, torch.tensor(positions, dtype=torch.int64))


@pytest.mark.parametrize("position", [0, 1, 77, 131071])
def test_bits_equal_the_documented_integer_arithmetic(position: int) -> None:
    noise = Noise(300_000, CPU)
    ids = torch.tensor([[0, 1, 2, 999, 262143, 299_999]] * len(SEEDS))
    got = noise.bits(keys(noise, SEEDS, [position] * len(SEEDS)), ids)
    want = [[bits31(seed, position, token) for token in row] for seed, row in zip(SEEDS, ids.tolist(), strict=True)]
    assert got.tolist() == want


def test_candidates_and_the_whole_vocabulary_get_the_same_noise() -> None:
    noise = Noise(1000, CPU)
    k = keys(noise, [5, 6], [3, 4])
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:333].repeat(2, 1)
    torch.testing.assert_close(
        noise.log_exponential(k, ids), noise.log_exponential(k).gather(1, ids), rtol=0, atol=1e-6
    )
    want = -gumbel(5, 3, 1000)
    winners = want < 0  # float32 cannot be as exact where E is large, and there nobody wins
    np.testing.assert_allclose(noise.log_exponential(k)[0].numpy()[winners], want[winners], atol=1e-6, rtol=1e-6)


def test_noise_is_finite_at_both_ends_of_the_integer_range() -> None:
    noise = Noise(4, CPU)
    noise.bits = lambda keys, ids: torch.tensor([[0, 2**31 - 1]], dtype=torch.int32)  # type: ignore[method-assign]
    low, high = noise.log_exponential(torch.zeros(1, 2, dtype=torch.int32))[0].tolist()
    assert low == pytest.approx(np.log(0.5 * 2.0**-31), rel=1e-5)
    assert high == pytest.approx(np.log(24 * np.log(2)), rel=1e-2)


def uniforms(noise: Noise, seeds: list[int], positions: list[int]) -> np.ndarray:
    return noise.bits(keys(noise, seeds, positions), None).numpy() / 2.0**31


def test_every_bit_is_fair_and_bytes_are_uniform() -> None:
    noise = Noise(49_152, CPU)
    bits = noise.bits(keys(noise, list(range(16)), [9] * 16), None).numpy().reshape(-1)
    for bit in range(31):
        ones = ((bits >> bit) & 1).sum()
        assert abs(ones - bits.size / 2) < 6 * np.sqrt(bits.size) / 2, bit
    for shift in (0, 8, 16, 23):
        counts = np.bincount((bits >> shift) & 255, minlength=256)
        chi = ((counts - bits.size / 256) ** 2 / (bits.size / 256)).sum()
        assert 255 - 6 * np.sqrt(510) < chi < 255 + 6 * np.sqrt(510)


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_neighbours_are_uncorrelated(axis: str) -> None:
    noise = Noise(16_384, CPU)
    n = 64
    if axis == "seed":
        u = uniforms(noise, list(range(n)), [5] * n)
    elif axis == "position":
        u = uniforms(noise, [5] * n, list(range(n)))
    else:
        u = uniforms(noise, list(range(n)), list(range(n))).reshape(-1, 128).T
    u = (u - u.mean(1, keepdims=True)) / u.std(1, keepdims=True)
    correlation = u @ u.T / u.shape[1]
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 6 / np.sqrt(u.shape[1])


def test_draws_of_neighbouring_seeds_and_positions_collide_as_often_as_chance() -> None:
    noise = Noise(1024, CPU)
    seeds = [s for s in range(64) for _ in range(64)]
    winners = noise.log_exponential(keys(noise, seeds, list(range(64)) * 64)).argmin(-1).numpy()
    counts = np.bincount(winners, minlength=1024)
    chi = ((counts - 4) ** 2 / 4).sum()
    assert 1023 - 6 * np.sqrt(2046) < chi < 1023 + 6 * np.sqrt(2046)
    grid = winners.reshape(64, 64)
    assert (grid[1:] == grid[:-1]).mean() < 6 / 1024
    assert (grid[:, 1:] == grid[:, :-1]).mean() < 6 / 1024
