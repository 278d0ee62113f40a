"""The C++ sampler: the torch path's tokens, on every instruction set, however rows and threads share the work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from device_parity import FAULTS, KINDS, Parity, check, check_drafts, logits_of
from hypothesis import given
from hypothesis import strategies as st
from sampling_oracle import CPU, MakeNative, Table, apply_writes

from engine.sampling import Sampler
from engine.sampling.kernels import StepTensors, select_kernels
from engine.sampling.kernels import native as native_room
from engine.sampling.kernels.host import HostKernels
from engine.sampling.kernels.native import ISAS, MAX_COLUMNS, MAX_VOCAB, Isa, NativeKernels
from engine.sampling.logprobs import score
from engine.step import RowParams

PARAMS = st.builds(
    RowParams,
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.0, 1e-4, 0.3, 0.8, 1.0, 2.0, 100.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 50, 700, 3000]),
    top_p=st.sampled_from([1.0, 1.0, 0.999999, 0.9, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.6, -0.4]),
    logprobs=st.sampled_from([None, None, 0, 5]),
)
VOCABS = (1, 2, 3, 5, 15, 16, 17, 63, 64, 65, 127, 130, 1000, 2047, 2048, 2049, 2113, 4999, 9000)
MORE_KINDS = ("subnormal", "infinite tail", "bf16", "two values", *KINDS, *FAULTS)


def adversarial(kind: str, rng: np.random.Generator, vocab: int) -> np.ndarray:
    x = logits_of("normal" if kind not in (*KINDS, *FAULTS) else kind, rng, vocab)
    if kind == "subnormal":
        x = (x * np.float32(1e-39)).astype(np.float32)
    elif kind == "infinite tail":
        x[rng.integers(0, vocab) :] = -np.inf
        x[0] = 1.0
    elif kind == "bf16":
        x = torch.from_numpy(x).bfloat16().float().numpy()
    elif kind == "two values":
        x = np.where(rng.random(vocab) < 0.5, np.float32(2.0), np.nextafter(np.float32(2.0), np.float32(3.0)))
    return x


def pair(
    kernels: NativeKernels, vocab: int, params: Sequence[RowParams], history: Sequence[int]
) -> tuple[Table, Table]:
    tables = []
    for chosen in (None, kernels):
        table = Table(vocab, len(params), sampler=Sampler(len(params), vocab, CPU, 64, chosen))
        for row, p in enumerate(params):
            table.add(row, p, history, max(1, len(history) // 2))
        tables.append(table)
    return tables[0], tables[1]


@pytest.mark.parametrize("isa", ISAS[1:])
def test_every_instruction_set_draws_the_tokens_of_the_torch_path(native: MakeNative, isa: Isa) -> None:
    native(1, isa)
    found = check(CPU, vocabs=(200, 2049, 32_001), draws=128, copies=1, steps=3, make=lambda v: native(v, isa))
    assert sum(part["draws"] for part in found.values()) > 500


@given(st.lists(PARAMS, min_size=1, max_size=6), st.sampled_from(VOCABS), st.integers(0, 2**31), st.data())
def test_adversarial_rows_of_any_mix_and_size_equal_the_torch_path(
    native: MakeNative, batch: list[RowParams], vocab: int, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    cpu, other = pair(native(vocab), vocab, batch, rng.integers(0, vocab, 5).tolist())
    params, parity = dict(enumerate(batch)), Parity()
    for _ in range(2):
        kinds = data.draw(st.lists(st.sampled_from(MORE_KINDS), min_size=len(batch), max_size=len(batch)))
        logits = np.stack([adversarial(kind, rng, vocab) for kind in kinds])
        parity.step(cpu, other, logits, range(len(batch)), params)
    assert parity.differing <= 1


@pytest.mark.parametrize("vocab", [262_144, 300_001])
def test_large_odd_vocabularies_and_flat_rows_equal_the_torch_path(native: MakeNative, vocab: int) -> None:
    filters = [{"temperature": 0.0}, {}, {"top_k": 50}, {"top_k": 5000}, {"top_p": 0.9}, {"min_p": 0.05}]
    batch = [RowParams(seed=i, **fields) for i, fields in enumerate(filters * 2)]
    rng = np.random.default_rng(vocab)
    cpu, other = pair(native(vocab), vocab, batch, [1, 2])
    logits = np.stack([adversarial(kind, rng, vocab) for kind in ["peaked"] * 6 + ["flat", "ties"] * 3])
    parity = Parity()
    parity.step(cpu, other, logits, range(len(batch)), dict(enumerate(batch)))
    assert parity.differing == 0


@pytest.mark.parametrize("plateau", [2049, 6000])
@pytest.mark.parametrize("fields", [{"top_k": 50}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 3000, "top_p": 0.5}])
def test_a_plateau_longer_than_the_list_is_cut_at_the_right_id(
    native: MakeNative, plateau: int, fields: dict[str, float]
) -> None:
    """Of many equal logits each that is kept is drawn by some seed, and none behind the border."""
    vocab, rows = 7000, 400
    logits = np.full((rows, vocab), -5.0, np.float32)
    places = np.random.default_rng(plateau).permutation(vocab)[:plateau]
    logits[:, places] = 3.0
    cpu, other = pair(native(vocab), vocab, [RowParams(seed=s, **fields) for s in range(rows)], [1])
    want = cpu.step(torch.from_numpy(logits), range(rows)).token_ids
    got = other.step(torch.from_numpy(logits), range(rows)).token_ids
    assert torch.equal(got, want)
    assert len(set(got.tolist())) > min(40, plateau)


@pytest.mark.parametrize("vocab", [49_153, 300_001])
def test_a_token_depends_neither_on_the_batch_nor_on_threads(
    native: MakeNative, vocab: int, threads: Callable[[int], None]
) -> None:
    batch = [RowParams(seed=9), RowParams(seed=8, top_p=0.9, logprobs=3), RowParams(seed=7, top_k=50, min_p=0.01)]
    batch += [RowParams(seed=6, temperature=0.0, presence_penalty=1.0), RowParams(seed=5, top_p=0.97, temperature=3.0)]
    logits = torch.randn(len(batch), vocab, generator=torch.Generator().manual_seed(3)) * 3
    seen = set()
    for count in (1, 2, 3, 8):
        threads(count)
        for alone in (False, True):
            table = pair(native(vocab), vocab, batch, [4, 5])[1]
            groups = [[row] for row in range(len(batch))] if alone else [[3, 1, 4, 0, 2]]
            tokens: dict[int, int] = {}
            for rows in groups:
                tokens |= dict(zip(rows, table.step(logits[rows], rows).token_ids.tolist()))
            seen.add(tuple(tokens[row] for row in range(len(batch))))
    assert len(seen) == 1


@pytest.mark.parametrize("isa", ISAS[1:])
def test_a_nan_at_any_place_is_a_fault_of_its_row_alone(native: MakeNative, isa: Isa) -> None:
    for vocab in (1, 7, 64, 131):
        sampler = Sampler(1, vocab, CPU, 8, native(vocab, isa))
        sampler.add(0, RowParams(seed=0, temperature=0.0), [0], 1)
        kernels, (floats, ints) = native(vocab, isa), sampler.tables()
        m = vocab + 1
        logits = torch.randn(m, vocab, generator=torch.Generator().manual_seed(1))
        logits[torch.arange(vocab), torch.arange(vocab)] = torch.tensor([torch.nan, -torch.nan]).repeat(m)[:vocab]
        zeros = torch.zeros(m, dtype=torch.int64)
        step = StepTensors(logits, zeros, zeros, torch.zeros((1, 8), dtype=torch.int32), floats, ints)
        tokens, faults = kernels.draw(step, sampler._plan([0]))
        assert faults.tolist() == [True] * vocab + [False]
        assert tokens.tolist() == [0] * vocab + [int(logits[-1].argmax())]


def test_penalties_change_logits_and_lists_exactly_as_the_torch_path_does(native: MakeNative) -> None:
    vocab, rng = 400, np.random.default_rng(4)
    fields = {"repetition_penalty": 1.7, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    tables = [Table(vocab, 4, 256, sampler=Sampler(4, vocab, CPU, 256, k)) for k in (None, native(vocab))]
    for row, length in enumerate((1, 64, 200)):
        history = rng.integers(-2, vocab + 5, length).tolist()
        for table in tables:
            table.add(row, RowParams(seed=0, temperature=0.0, **fields), history, max(1, length // 2))
    rows = [2, 0, 1]
    for step in range(6):
        logits = torch.from_numpy(rng.normal(0, 1, (3, vocab)).astype(np.float32))
        changed = []
        for table in tables:
            positions = torch.tensor([table.lengths[r] for r in rows])
            for _ in range(1 + (step == 3)):  # as if the step had been launched twice
                changed.append(logits.clone())
                table.sampler.sample(changed[-1], torch.tensor(rows), rows, positions, table.tokens)
        assert all(torch.equal(changed[0], other) for other in changed[1:])
        assert tables[0].step(logits, rows).token_ids.tolist() == tables[1].step(logits, rows).token_ids.tolist()
        (ids, counts, sizes, counted), want = (table.sampler._seen.tensors() for table in tables)
        assert torch.equal(sizes, want[2]) and torch.equal(counted, want[3])
        for slot, size in enumerate(sizes.tolist()):
            assert torch.equal(ids[slot, :size], want[0][slot, :size])
            assert torch.equal(counts[slot, :size], want[1][slot, :size])


@pytest.mark.parametrize("isa", ISAS[1:])
def test_drafts_change_logits_and_lists_exactly_as_on_the_torch_path(native: MakeNative, isa: Isa) -> None:
    for vocab in (5, 64, 90, 3000):
        assert check_drafts(CPU, vocab, 30, lambda v: native(v, isa)) > 300


@pytest.mark.parametrize("vocab", [3, 1999, 5001])
@pytest.mark.parametrize("kind", ["ties", "masked", "flat", "huge", "normal"])
def test_scores_of_any_width_equal_the_torch_path(native: MakeNative, vocab: int, kind: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(np.stack([logits_of(kind, rng, vocab) for _ in range(3)]))
    logits[:, 1] = 0.5  # never a row without any token
    targets = torch.from_numpy(rng.integers(0, vocab, 3))
    for k in (0, 1, 70, 1000, MAX_COLUMNS, MAX_COLUMNS + 1):
        want = score(logits, targets, range(3), [k, 0, k])
        got = native(vocab).score(logits, targets, range(3), [k, 0, k])
        assert got.widths == want.widths and torch.equal(got.ranks, want.ranks)
        assert torch.equal(got.token_ids, want.token_ids)
        torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-6, atol=1e-5)
    assert native(vocab).score(logits[:0], targets[:0], (), ()).token_ids.shape == (0, 1)


def test_a_cpu_sampler_is_native_where_it_may_build_and_torch_where_it_cannot(
    native_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(select_kernels(CPU, 100, native_cache), NativeKernels)
    assert isinstance(select_kernels(CPU, MAX_VOCAB + 1, native_cache), HostKernels)
    assert isinstance(select_kernels(CPU, 100), HostKernels)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("attention_backends.native_build.PREBUILT", tmp_path / "prebuilt")
    assert isinstance(select_kernels(CPU, 100, tmp_path), HostKernels)
    assert "no C++ compiler" in caplog.text
    with pytest.raises(ValueError, match="vocabularies of 1 to"):
        NativeKernels(MAX_VOCAB + 1, native_cache)


def test_what_does_not_fit_is_refused(native: MakeNative) -> None:
    sampler = Sampler(2, 10, CPU, 8, native(10))
    sampler.add(1, RowParams(seed=0, presence_penalty=1.0), [1], 1)
    apply_writes(sampler)
    tokens, one = torch.zeros((2, 8), dtype=torch.int32), torch.tensor([1])
    for rows, positions, message in (
        (torch.tensor([2]), one, "row 2 of 2"),
        (one.to(torch.int32), one, "rows must be"),
        (one, torch.tensor([9]), "position 9"),
        (one, torch.tensor([1, 1]), "rows and positions"),
    ):
        with pytest.raises(RuntimeError, match=message):
            sampler.sample(torch.zeros(1, 10), rows, [1], positions, tokens)
    with pytest.raises(RuntimeError, match="must be consecutive"):
        sampler.sample(torch.zeros(2, 10), torch.tensor([1, 1]), [1, 1], torch.tensor([1, 3]), tokens)
    with pytest.raises(RuntimeError, match="target 10"):
        native(10).score(torch.zeros(1, 10), torch.tensor([10]), [0], [1])
    assert sampler.sample(torch.zeros(0, 10), one[:0], [], one[:0], tokens).token_ids.shape == (0,)


def test_the_build_key_covers_every_source() -> None:
    described = native_room.sources()
    folder = Path(native_room.__file__).parents[1] / "csrc"
    named = {unit.source for unit in described.units} | set(described.headers)
    assert {path for path in folder.iterdir() if path.suffix in (".cpp", ".h")} <= named
