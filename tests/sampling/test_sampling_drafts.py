"""Rows that are sampled at several positions, behind drafts that may be wrong: each token is what it would be if the
drafts before it had come, and nothing remembers a draft."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from sampling_oracle import CPU, Table, apply_writes, assert_is_the_draw, process

from engine.sampling import SampleOutput, Sampler, sampler
from engine.sampling.masks import combine, row_edits
from engine.step import RowParams

pytestmark = pytest.mark.usefixtures("each_implementation")

PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
EDITS = {"min_tokens": 7, "stop_token_ids": [0, 5], "bad_words": [[3], [1, 2], [2, 2, 1], [4, 4]]}
PARAMS = (
    RowParams(seed=1, temperature=0.0, **PENALTIES),
    RowParams(seed=2, temperature=1.1, top_p=0.9, **PENALTIES, **EDITS, logprobs=2),
    RowParams(seed=3, temperature=0.8, top_k=5, frequency_penalty=-0.4, logit_bias={1: 1.5, 6: -3.0}),
    RowParams(seed=4, temperature=0.0, **EDITS),
    RowParams(seed=5, temperature=1.0, allowed_token_ids=[1, 2, 4, 7], presence_penalty=1.5, logprobs=0),
    RowParams(seed=6, temperature=1.3),
    RowParams(seed=7, temperature=1.0, min_p=0.05, repetition_penalty=0.7, bad_words=[[6, 1]]),
)
VOCABS = (9, 40, 700)


def sample(table: Table, rows: Sequence[int], drafts: Sequence[Sequence[int]], logits: torch.Tensor) -> SampleOutput:
    """`logits` are changed in place. What stands behind a row's last draft in the table is of no meaning."""
    places, positions = [], []
    for row, drafted in zip(rows, drafts):
        known = table.lengths[row]
        table.tokens[row, known : known + len(drafted)] = torch.tensor(drafted, dtype=torch.int32)
        places += [row] * (1 + len(drafted))
        positions += range(known, known + len(drafted) + 1)
    return table.sampler.sample(logits, torch.tensor(places), places, torch.tensor(positions), table.tokens)


def alone(params: RowParams, history: Sequence[int], prompt_len: int, logits: torch.Tensor) -> SampleOutput:
    """What a sampler that sees the history for the first time draws."""
    table = Table(logits.shape[-1], rows=1, max_len=256)
    table.add(0, params, history, prompt_len)
    return table.step(logits.reshape(1, -1), [0])


def accept(rng: np.random.Generator, table: Table, row: int, drafted: Sequence[int], vocab: int) -> None:
    """Some of the drafts were right; the token behind them is anything, and rubbish follows."""
    right = int(rng.integers(0, len(drafted) + 1))
    known = table.lengths[row] + right
    table.tokens[row, known : known + 9] = torch.from_numpy(rng.integers(0, vocab, 9).astype(np.int32))
    table.lengths[row] = known + 1


def check_step(table: Table, rows: Sequence[int], drafts: Sequence[Sequence[int]], rng: np.random.Generator) -> None:
    vocab = table.sampler._vocab
    count = sum(1 + len(drafted) for drafted in drafts)
    logits = torch.from_numpy(rng.normal(0, 2, (count, vocab)).astype(np.float32))
    edited = logits.clone()
    out = sample(table, rows, drafts, edited)
    scored = None if out.logprobs is None else iter(out.logprobs.to_list())
    at = 0
    for row, drafted in zip(rows, drafts):
        params, prompt_len = PARAMS[row % len(PARAMS)], table.prompt_lens[row]
        for j in range(1 + len(drafted)):
            history = table.history(row) + list(drafted[:j])
            processed = process(logits[at].numpy(), params, history, prompt_len)
            np.testing.assert_allclose(edited[at].numpy(), processed, rtol=1e-5, atol=1e-5)
            token = int(out.token_ids[at])
            assert_is_the_draw(token, processed, params, len(history))
            single = alone(params, history, prompt_len, logits[at])
            assert token == int(single.token_ids[0])
            if params.logprobs is not None:
                assert scored is not None and single.logprobs is not None
                assert next(scored) == single.logprobs.to_list()[0]
            at += 1
    assert scored is None or not list(scored)


@pytest.mark.parametrize("seed", range(9))
def test_every_position_is_sampled_as_if_the_drafts_before_it_had_come(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = VOCABS[seed % len(VOCABS)]
    table = Table(vocab, rows=9, max_len=256)
    for row in range(9):
        history = rng.integers(0, vocab, int(rng.integers(1, 9))).tolist()
        table.add(row, PARAMS[row % len(PARAMS)], history, int(rng.integers(1, len(history) + 1)))
    for _ in range(6):
        rows = rng.permutation(9)[: rng.integers(1, 10)].tolist()
        drafts = [rng.integers(0, min(vocab, 8), rng.integers(0, 7)).tolist() for _ in rows]
        check_step(table, rows, drafts, rng)
        if rng.random() < 0.3:  # as if the step before had failed, row by row
            for row, drafted in zip(rows, drafts):
                check_step(table, [row], [drafted], rng)
        for row, drafted in zip(rows, drafts):
            accept(rng, table, row, drafted, vocab)
        if rng.random() < 0.3:  # preempted, and elsewhere meanwhile
            row = rows[0]
            known, prompt_len = table.history(row), table.prompt_lens[row]
            table.sampler.release(row)
            table.add(row, PARAMS[row % len(PARAMS)], known, prompt_len)


def test_a_draft_that_was_never_right_leaves_no_trace_in_the_lists() -> None:
    table = Table(10)
    table.add(0, RowParams(seed=0, temperature=0.0, frequency_penalty=1.0), [1, 2, 3], 1)
    seen = table.sampler._seen
    sample(table, [0], [[3, 9, 9, -1, 99]], torch.zeros(6, 10))
    ids, counts, sizes, counted = seen.tensors()
    slot = int(table.sampler.tables()[1][0, 3])
    assert ids[slot, : int(sizes[slot])].tolist() == [1, 2, 3] and counted[slot] == 3
    assert counts[slot, :3].tolist() == [0, 1, 1]
    table.tokens[0, 3:6] = torch.tensor([9, 3, 4])
    table.lengths[0] = 6
    logits = torch.zeros(1, 10)
    sample(table, [0], [[]], logits)
    assert (-logits[0]).tolist() == [0, 0, 1, 2, 1, 0, 0, 0, 0, 1]


def test_a_history_that_fills_the_table_is_counted_with_its_last_draft() -> None:
    vocab, length = 300, 16
    table = Table(vocab, rows=1, max_len=length, sampler=Sampler(1, vocab, CPU, length, Table(vocab).sampler._kernels))
    table.add(0, RowParams(seed=0, temperature=0.0, frequency_penalty=1.0), range(length - 4), 1)
    table.tokens[0, length - 4 :] = torch.tensor([200, 201, 202, 203])
    logits = torch.zeros(5, vocab)
    sample(table, [0], [[200, 201, 202, 203]], logits)
    assert [int(-row.sum()) for row in logits] == [11, 12, 13, 14, 15]


def test_a_row_that_comes_again_behind_another_one_is_refused() -> None:
    table = Table(10)
    for row in (0, 1):
        table.add(row, RowParams(seed=row))
    rows = [0, 1, 0]
    with pytest.raises(ValueError, match="behind the other"):
        table.sampler.sample(torch.zeros(3, 10), torch.tensor(rows), rows, torch.tensor([1, 1, 2]), table.tokens)


def test_rows_are_sorted_once_however_many_drafts_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = sampler.sort_rows
    monkeypatch.setattr(sampler, "sort_rows", lambda *args: (calls.append(1), real(*args))[1])
    table, rng = Table(20, rows=4), np.random.default_rng(0)
    for row in range(4):
        table.add(row, PARAMS[row])
    for _ in range(30):
        drafts = [[1] * int(rng.integers(0, 5)) for _ in range(4)]
        sample(table, [2, 0, 3, 1], drafts, torch.zeros(4 + sum(map(len, drafts)), 20))
    assert len(calls) == 1


@pytest.mark.parametrize("seed", range(20))
def test_repeated_edits_are_those_of_a_batch_that_holds_the_rows_so_often(seed: int) -> None:
    rng = np.random.default_rng(seed)
    edits = [row_edits(params, 40, CPU) for params in PARAMS]
    rows = [int(row) for row in rng.integers(0, len(PARAMS), rng.integers(1, 7))]
    each = rng.integers(1, 4, len(rows))
    joined = combine([(at, e) for at, row in enumerate(rows) if (e := edits[row]) is not None], CPU)
    again = [row for row, times in zip(rows, each) for _ in range(times)]
    written_out = combine([(at, e) for at, row in enumerate(again) if (e := edits[row]) is not None], CPU)
    assert (joined is None) == (written_out is None)
    if joined is not None and written_out is not None:
        ours, want = joined.placed(each, CPU), written_out.placed(None, CPU)
        for name in want.__struct_fields__:
            assert torch.equal(getattr(ours, name), getattr(want, name)), name


def test_tables_say_where_a_row_counts_its_tokens() -> None:
    one = Sampler(3, 10, CPU, 8)
    for row, fields in enumerate(({}, PENALTIES, {})):
        one.add(row, RowParams(seed=row, **fields), [1], 1)
    apply_writes(one)
    assert (one.tables()[1][:, 3] >= 0).tolist() == [False, True, False]
