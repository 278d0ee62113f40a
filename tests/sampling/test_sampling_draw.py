"""Draws follow the filtered distribution, equal the documented algorithm, and do not depend on the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_oracle import CPU, Table, assert_is_the_draw, draw_once, kept, process, scaled

import engine.sampling.draw as draw_room
from engine.sampling import Sampler
from engine.sampling.batch import classify
from engine.sampling.draw import DrawRows, Filters, draw_probed, draw_wide
from engine.sampling.noise import Noise, seed_words
from engine.step import RowParams

pytestmark = pytest.mark.usefixtures("each_implementation")

FILTERS = [
    RowParams(seed=0),
    RowParams(seed=0, temperature=0.5),
    RowParams(seed=0, temperature=2.0),
    RowParams(seed=0, top_k=5),
    RowParams(seed=0, top_p=0.8),
    RowParams(seed=0, min_p=0.2),
    RowParams(seed=0, top_k=6, top_p=0.7, min_p=0.05, temperature=1.5),
    RowParams(seed=0, top_p=0.9, min_p=0.1, temperature=1.3),
]


def noisy(vocab: int, seed: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("params", FILTERS, ids=range(len(FILTERS)))
def test_frequencies_fit_the_filtered_softmax(params: RowParams) -> None:
    vocab, draws = 24, 40_960
    logits = noisy(vocab, 1, 1.0)
    rows = 512
    counts = np.zeros(vocab)
    sampler_rows = range(rows)
    table = Table(vocab, rows=rows, max_len=draws // rows + 1)
    for row in sampler_rows:
        # draws differ in seed and in position, as those of a server do
        table.add(row, RowParams(**{f: getattr(params, f) for f in params.__struct_fields__} | {"seed": row}))
    for _ in range(draws // rows):
        out = table.step(logits.repeat(rows, 1), sampler_rows)
        counts += np.bincount(out.token_ids.numpy(), minlength=vocab)
    processed = process(logits.numpy(), params, [], 0)
    keep = kept(processed, params)
    weights = np.zeros(vocab)
    weights[keep] = np.exp(scaled(processed, params)[keep])
    expected = weights / weights.sum() * draws
    assert counts[expected == 0].sum() == 0
    cells = expected > 5
    chi = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = max(1, cells.sum() - 1)
    assert cells.sum() > 1
    assert chi < freedom + 6 * np.sqrt(2 * freedom) + 6


PARAMS = st.builds(
    RowParams,
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 10, 63, 64, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.6, -0.4]),
    logit_bias=st.dictionaries(st.integers(0, 63), st.floats(-5, 5, width=32), max_size=3),
    allowed_token_ids=st.one_of(st.none(), st.lists(st.integers(0, 63), min_size=4, max_size=60)),
    bad_words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3),
    min_tokens=st.sampled_from([0, 2, 5]),
    stop_token_ids=st.lists(st.integers(0, 63), max_size=2),
)


@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 2**31), st.data())
def test_every_row_of_a_mixed_batch_is_drawn_as_documented(
    batch: list[RowParams], seed: int, data: st.DataObject
) -> None:
    vocab = 64
    rng = np.random.default_rng(seed)
    table = Table(vocab)
    starts = []
    for row, params in enumerate(batch):
        history = rng.integers(0, 4 if seed % 2 else vocab, int(rng.integers(1, 8))).tolist()
        starts.append(int(rng.integers(1, len(history) + 1)))
        table.add(row, params, history, starts[-1])
    for _ in range(3):
        rows = data.draw(st.permutations(range(len(batch))))[: max(1, len(batch) - 1)]
        logits = torch.from_numpy(rng.normal(0, 3, (len(rows), vocab)).astype(np.float32))
        before = [table.history(r) for r in rows]
        out = table.step(logits, rows)
        for at, row in enumerate(rows):
            processed = process(logits[at].numpy(), batch[row], before[at], starts[row])
            if not np.isfinite(processed.max()):
                assert bool(out.faults[at])
                table.tokens[row, table.lengths[row] - 1] = 0
                continue
            assert not bool(out.faults[at])
            assert_is_the_draw(int(out.token_ids[at]), processed, batch[row], len(before[at]))


@given(st.lists(PARAMS, min_size=2, max_size=8), st.integers(0, 2**31))
def test_a_row_in_a_mixed_batch_equals_the_row_alone(batch: list[RowParams], seed: int) -> None:
    vocab = 64
    together, alone = Table(vocab), Table(vocab)
    for row, params in enumerate(batch):
        together.add(row, params, [1, 2, 3], 2)
        alone.add(15 - row, params, [1, 2, 3], 2)
    for step in range(3):
        logits = torch.stack([noisy(vocab, seed + 31 * step + r, 3.0) for r in range(len(batch))])
        out = together.step(logits, range(len(batch)))
        for row in range(len(batch)):
            single = alone.step(logits[row : row + 1], [15 - row])
            assert single.token_ids.tolist() == out.token_ids[row : row + 1].tolist()
            assert single.faults.tolist() == out.faults[row : row + 1].tolist()


@pytest.mark.parametrize("params", FILTERS, ids=range(len(FILTERS)))
@pytest.mark.parametrize("vocab", [1000, 33_001])
def test_batch_row_and_neighbours_do_not_matter_at_real_sizes(params: RowParams, vocab: int) -> None:
    logits = noisy(vocab, 5, 1.0 if vocab < 2000 else 4.0)
    alone = draw_once(logits, params, position=9)
    table = Table(vocab, rows=12)
    others = [RowParams(seed=1), RowParams(seed=2, temperature=0.0), RowParams(seed=3, top_k=50, top_p=0.9)]
    for row in range(12):
        table.add(row, params if row in (3, 8) else others[row % 3], [0] * 9)
    rows = [8, 0, 1, 2, 4, 5, 6, 3, 7]
    batch = torch.stack([noisy(vocab, 50 + r) for r in rows])
    batch[0] = batch[7] = logits
    out = table.step(batch, rows).token_ids.tolist()
    assert out[0] == out[7] == alone


def test_another_position_or_seed_gives_another_draw() -> None:
    flat = torch.zeros(4096)
    tokens = {draw_once(flat, RowParams(seed=s), position=p) for s in range(12) for p in range(1, 9)}
    assert len(tokens) > 85


def draw_rows(logits: torch.Tensor, noise: Noise, params: RowParams, filters: Filters) -> DrawRows:
    m = logits.shape[0]
    words = torch.tensor([seed_words(s) for s in range(m)])
    return DrawRows(
        maxima=logits.amax(-1),
        temperature=torch.full((m,), params.temperature),
        log_min_p=torch.full((m,), params.min_p).log(),
        top_p=torch.full((m,), params.top_p),
        top_k=torch.full((m,), filters.top_k),
        keys=noise.draw_keys(words, torch.arange(m)),
    )


@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 8.0])
@pytest.mark.parametrize("params", [p for p in FILTERS if p.top_p < 1 or p.min_p > 0], ids=range(4))
def test_candidates_and_whole_vocabulary_draw_the_same_token(
    params: RowParams, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CPU and GPU do differently gives one answer, with ties and with prefixes longer than the probe."""
    vocab, m = 2500, 64
    monkeypatch.setattr(draw_room, "_PROBE", 200)
    logits = torch.stack([noisy(vocab, 100 + i, spread) for i in range(m)]).bfloat16().float()
    noise = Noise(vocab, CPU)
    _, filters = classify(params, vocab, look_is_free=False)
    rows = draw_rows(logits, noise, params, filters)
    wide = draw_wide(logits, rows, filters, noise)
    if filters.top_k:
        assert torch.equal(draw_room.draw_narrow(logits, rows, filters, noise), wide)
    else:
        assert torch.equal(draw_probed(logits, rows, filters, noise), wide)


def test_ties_at_the_border_are_cut_by_the_lower_id() -> None:
    flat = torch.zeros(300)
    for params, limit in (({"top_k": 7}, 7), ({"top_p": 0.25}, 75), ({"top_k": 40, "top_p": 0.5}, 20)):
        tokens = {draw_once(flat, RowParams(seed=s, **params)) for s in range(300)}
        assert tokens <= set(range(limit)) and len(tokens) > limit * 0.8


def test_greedy_and_top_k_one_take_the_lowest_id_among_the_largest() -> None:
    logits = noisy(500, 3).round()
    for params in (RowParams(seed=1, temperature=0.0), RowParams(seed=1, top_k=1), RowParams(seed=1, min_p=1.0)):
        token = draw_once(logits, params)
        assert logits[token] == logits.max()
        if params.min_p == 0.0:
            assert token == int(np.argmax(logits.numpy()))


@pytest.mark.parametrize("params", FILTERS[1:], ids=range(1, len(FILTERS)))
def test_tiny_temperature_and_huge_logits_do_not_overflow(params: RowParams) -> None:
    logits = torch.tensor([3e38, -3e38, 1e30, 2.9e38] + [0.0] * 60)
    cold = RowParams(seed=4, temperature=1e-4, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    assert draw_once(logits, cold) == 0


@pytest.mark.parametrize("params", [*FILTERS, RowParams(seed=0, temperature=0.0)], ids=range(9))
@pytest.mark.parametrize("bad", ["nan", "-nan", "inf", "all -inf"])
def test_a_faulty_row_is_flagged_and_harms_no_other(params: RowParams, bad: str) -> None:
    vocab = 1001
    good = noisy(vocab, 8)
    want = draw_once(good, params)
    table = Table(vocab)
    table.add(0, params)
    table.add(1, params)
    faulty = noisy(vocab, 9)
    faulty[500 if bad != "all -inf" else slice(None)] = {"nan": torch.nan, "-nan": -torch.nan, "inf": torch.inf}.get(
        bad, -torch.inf
    )
    out = table.step(torch.stack((faulty, good)), [0, 1])
    assert out.faults.tolist() == [True, False]
    assert out.token_ids.tolist() == [0, want]


@pytest.mark.parametrize(
    "extra", [{}, {"top_k": 30}, {"top_k": 3000, "top_p": 0.5}, {"temperature": 0.0}], ids=range(4)
)
def test_no_step_waits_for_the_device(extra: dict[str, float]) -> None:
    """On the meta device there is no data: whatever would look at it raises."""
    meta = torch.device("meta")
    sampler = Sampler(8, 5000, meta, 64)
    full = RowParams(
        seed=1, min_p=0.1, frequency_penalty=1.1, logit_bias={3: 1.0}, allowed_token_ids=[3, 4],
        bad_words=[[1], [5, 2]], min_tokens=3, stop_token_ids=[7], logprobs=2, **({"top_p": 0.9} | extra),
    )  # fmt: skip
    for row in range(8):
        sampler.add(row, full if row % 2 else RowParams(seed=2, **extra), [1, 2, 3], 2)
    tokens = torch.zeros(8, 64, dtype=torch.int32, device=meta)
    for rows in (list(range(8)), [1, 3], [0], [1], [1, 1, 1, 4, 4, 3]):
        index = torch.tensor(rows, device=meta)
        out = sampler.sample(torch.zeros(len(rows), 5000, device=meta), index, rows, index, tokens)
        assert out.token_ids.shape == out.faults.shape == (len(rows),)
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(out.faults[0])


def test_logits_of_another_shape_or_type_are_refused() -> None:
    sampler = Sampler(2, 10, CPU, 8)
    sampler.add(0, RowParams(seed=0), [1], 1)
    one = torch.tensor([0])
    for logits in (torch.zeros(1, 11), torch.zeros(2, 10), torch.zeros(1, 10).double(), torch.zeros(1, 20)[:, ::2]):
        with pytest.raises(ValueError, match="contiguous float32"):
            sampler.sample(logits, one, [0], one, torch.zeros(2, 8, dtype=torch.int32))
