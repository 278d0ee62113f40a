"""Drafts that are found where the tokens are, by every implementation: against the definition, and the proposers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ngram_oracle import Case, check_ngram, expected_suffix, random_case

from engine import draft_sources
from engine.runner.kernels.ngram import SuffixKernels, cpu_draft_kernels, select_draft_kernels
from engine.runner.kernels.ngram_host import END, HostDraftKernels
from engine.runner.kernels.ngram_native import ISAS, NativeDraftKernels
from engine.speculation_config import SpeculationConfig

HERE = Path(__file__).parent


@pytest.fixture(params=["numpy", *ISAS[1:]])
def kernels(request: pytest.FixtureRequest) -> SuffixKernels:
    if request.param == "numpy":
        return HostDraftKernels()
    cache: Path = request.getfixturevalue("native_cache")
    if request.param not in NativeDraftKernels(cache, "portable").supported_isas:
        pytest.skip(f"this CPU has no {request.param}")
    return NativeDraftKernels(cache, request.param)


def test_the_longest_and_latest_match_goes_on_to_the_end_of_the_table(kernels: SuffixKernels) -> None:
    rng = np.random.default_rng(0)
    assert sum(check_ngram(kernels, random_case(rng)) for _ in range(300)) > 5000


def test_rows_longer_than_what_is_looked_at_together_are_searched_to_their_beginning(kernels: SuffixKernels) -> None:
    rng = np.random.default_rng(1)
    for longest, columns in ((1, 700), (3, 1025), (64, 2000), (5, 129), (400, 900)):
        tokens = torch.from_numpy(rng.integers(9, 1 << 20, (6, columns)).astype(np.int32))
        lengths = torch.from_numpy(rng.integers(columns // 2, columns - 3, 6).astype(np.int32))
        for row, n in enumerate(lengths.tolist()):  # one match, of any length, anywhere
            length, end = int(rng.integers(1, 8)), int(rng.integers(8, n - 20))
            tokens[row, end : end + length] = tokens[row, n - length : n].clone()
            if row == 0:  # and right at the beginning
                tokens[row, :2] = tokens[row, n - 2 : n].clone()
        case = Case(tokens, torch.arange(6), lengths, torch.full((6,), 9, dtype=torch.int32), longest, 1)
        assert check_ngram(kernels, case) == sum(min(9, columns - n) for n in lengths.tolist())


def by_row(case: Case, tokens: torch.Tensor, counts: torch.Tensor) -> dict[int, list[int]]:
    drafts = {}
    for row, count in zip(case.rows.tolist(), counts.tolist()):
        n = int(case.lengths[row])
        drafts[row] = tokens[row, n : n + count].tolist()
    return {row: found for row, found in drafts.items() if found}


@pytest.mark.parametrize("size", [0, 40, 500])
def test_what_came_most_often_after_the_same_tokens(kernels: SuffixKernels, size: int) -> None:
    rng = np.random.default_rng(size)
    drafted = 0
    for _ in range(100):
        case = random_case(rng, columns=60)
        case.lengths.clamp_(min=1, max=50)
        most = int(rng.integers(1, 10))
        case.most.fill_(most)
        config = SpeculationConfig(
            method="suffix",
            suffix_decoding_max_tree_depth=case.longest,
            suffix_decoding_max_spec_factor=float(rng.choice([0.3, 1.0, 1.7, 4.0])),
            suffix_decoding_min_token_prob=float(rng.choice([0.0, 0.1, 0.5])),
        )
        outputs: list[list[int]] = []
        while sum(map(len, outputs)) < size:
            outputs.append(rng.integers(0, rng.choice([2, 3, 50]), rng.integers(2, 40)).tolist())
        recent = torch.tensor([token for output in outputs for token in (*output, END)], dtype=torch.int32)
        want = {row: expected_suffix(outputs, case.own(row), config, most) for row in case.rows.tolist()}
        tokens = case.tokens.clone()
        counts = kernels.propose_suffix(
            tokens, case.rows, case.lengths, case.most, recent, config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob,
        )  # fmt: skip
        found = by_row(case, tokens, counts)
        assert found == {row: drafts for row, drafts in want.items() if drafts}
        drafted += sum(map(len, found.values()))
    assert drafted > 500


def test_threads_share_rows_and_change_nothing(native_cache: Path) -> None:
    rng = np.random.default_rng(4)
    tokens = torch.from_numpy(rng.integers(0, 30, (16, 20_000)).astype(np.int32))
    lengths, most = torch.full((16,), 19_990, dtype=torch.int32), torch.full((16,), 8, dtype=torch.int32)
    kernels, found = NativeDraftKernels(native_cache), []
    before = torch.get_num_threads()
    for threads in (1, 4):
        torch.set_num_threads(threads)
        table = tokens.clone()
        counts = kernels.propose_ngram(table, torch.arange(16), lengths, most, 5, 2)
        found.append((table, counts))
    torch.set_num_threads(before)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1]) and found[0][1].all()


def test_what_does_not_fit_is_refused(native_cache: Path) -> None:
    kernels = NativeDraftKernels(native_cache)
    tokens, one = torch.zeros((2, 8), dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    lengths, row = torch.tensor([3, 9], dtype=torch.int32), torch.tensor([0])
    for arguments, message in (
        ((tokens, torch.tensor([2]), lengths, one, 3, 1), "row 2 of 2"),
        ((tokens, torch.tensor([1]), lengths, one, 3, 1), "9 tokens of 8"),
        ((tokens, row, lengths, one, 1, 2), "matches of 2 to 1"),
        ((tokens, row.to(torch.int32), lengths, one, 3, 1), "rows must be"),
        ((tokens, row, lengths, one[:0], 3, 1), "those asked for"),
    ):
        with pytest.raises(RuntimeError, match=message):
            kernels.propose_ngram(*arguments)
    with pytest.raises(RuntimeError, match="no end"):
        kernels.propose_suffix(tokens, row, lengths, one, one, 3, 1.0, 0.1)


def test_a_cpu_without_a_compiler_searches_in_numpy(
    native_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu = torch.device("cpu")
    assert isinstance(select_draft_kernels(cpu, native_cache), NativeDraftKernels)
    assert isinstance(select_draft_kernels(cpu), HostDraftKernels)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("attention_backends.native_build.PREBUILT", tmp_path / "prebuilt")
    assert isinstance(cpu_draft_kernels(tmp_path), HostDraftKernels)
    assert "no C++ compiler" in caplog.text


def test_the_build_key_covers_every_source() -> None:
    described = draft_sources.sources()
    named = {unit.source for unit in described.units} | set(described.headers)
    assert set(draft_sources.CSRC.iterdir()) <= named


def test_triton_finds_what_the_definition_says() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "interpret_ngram.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[1]) > 200


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device_finds_what_the_definition_says() -> None:
    device, rng = torch.device("cuda"), np.random.default_rng(5)
    kernels = select_draft_kernels(device)
    assert sum(check_ngram(kernels, random_case(rng, columns=columns), device) for columns in [90, 3000] * 20) > 1000
