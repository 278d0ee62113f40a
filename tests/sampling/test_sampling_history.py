"""What depends on the history is read on the device: penalties, bad words, minimum length; and preemption leaves no
trace."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_oracle import CPU, Table, apply_writes, assert_is_the_draw, process

from engine.errors import InvalidRequestError
from engine.sampling import Sampler
from engine.sampling.masks import BatchEdits, RowEdits, combine, row_edits
from engine.sampling.penalties import SeenTokens
from engine.step import RowParams

pytestmark = pytest.mark.usefixtures("each_implementation")

PENALISED = RowParams(
    seed=11, temperature=1.2, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, top_p=0.95,
    bad_words=[[3], [1, 2], [2, 2, 1]], min_tokens=9, stop_token_ids=[0, 5],
)  # fmt: skip


@given(st.integers(0, 2**31), st.lists(st.booleans(), min_size=12, max_size=12), st.sampled_from([8, 40]))
def test_a_row_preempted_and_resumed_continues_as_if_never_preempted(seed: int, cuts: list[bool], vocab: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, vocab, 4).tolist()
    steady, broken = Table(vocab), Table(vocab)
    steady.add(0, PENALISED, prompt)
    row = 3
    broken.add(row, PENALISED, prompt)
    for cut in cuts:
        if cut:
            known = broken.history(row)
            broken.sampler.release(row)
            row = (row + 5) % 16
            broken.add(row, PENALISED, known, len(prompt))
        logits = torch.from_numpy(rng.normal(0, 1, (1, vocab)).astype(np.float32))
        before = steady.history(0)
        assert steady.step(logits, [0]).token_ids.tolist() == broken.step(logits, [row]).token_ids.tolist()
        processed = process(logits[0].numpy(), PENALISED, before, len(prompt))
        assert_is_the_draw(steady.history(0)[-1], processed, PENALISED, len(before))


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 30))
def test_counts_follow_the_history_exactly(seed: int, vocab: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    seen = SeenTokens(8, vocab, 64, CPU)
    histories = [rng.integers(0, vocab, 3).tolist() for _ in range(3)]
    slots = [seen.acquire(h, 2) for h in histories]
    for _ in range(steps):
        who = sorted(rng.permutation(3)[: rng.integers(1, 4)].tolist())
        for w in who:
            histories[w].append(int(rng.integers(0, vocab)))
        used = torch.tensor([slots[w] for w in who])
        last = torch.tensor([histories[w][-1] for w in who])
        ends = torch.tensor([len(histories[w]) for w in who])
        for _ in range(2):  # a step seen twice counts once
            behind, width = seen.expect([slots[w] for w in who], [1] * len(who))
            assert behind == 1
            seen.count(used, last, ends, width)
        logits = torch.zeros(len(who), vocab)
        one, zero = torch.ones(len(who)), torch.zeros(len(who))
        seen.penalise(logits, torch.arange(len(who)), used, width, (one, zero, one))
        for at, w in enumerate(who):
            assert (-logits[at]).tolist() == [histories[w][2:].count(t) for t in range(vocab)]


def test_penalty_memory_is_the_stated_one_and_lazy() -> None:
    sampler = Sampler(8, 1000, CPU, 64)
    empty = sampler.workspace_bytes
    sampler.add(0, RowParams(seed=0, top_k=4), [1, 2], 2)
    assert sampler.workspace_bytes == empty
    for row in range(8):
        sampler.add(row, RowParams(seed=0, presence_penalty=1.0), [1, 2], 2)
    assert sampler.workspace_bytes == sampler.max_workspace_bytes == empty + 8 * (8 * 64 + 16)
    for _ in range(20):
        sampler.add(3, RowParams(seed=0, presence_penalty=1.0), [1, 2], 2)
    assert sampler.workspace_bytes == sampler.max_workspace_bytes


def test_a_row_without_penalties_is_untouched_by_one_that_had_the_slot() -> None:
    table = Table(6)
    table.add(0, RowParams(seed=0, temperature=0.0, presence_penalty=2.0), [5, 4, 4], 1)
    table.sampler.release(0)
    table.add(1, RowParams(seed=0, temperature=0.0, presence_penalty=2.0), [2], 1)
    assert table.step(torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0, 0.0]]), [1]).token_ids.tolist() == [4]


def test_tokens_outside_the_vocabulary_in_a_prompt_are_ignored_by_penalties() -> None:
    table = Table(4)
    table.add(0, RowParams(seed=0, temperature=0.0, repetition_penalty=2.0), [900, 901], 2)
    assert table.step(torch.tensor([[3.0, 2.0, 0.0, 0.0]]), [0]).token_ids.tolist() == [0]
    assert table.step(torch.tensor([[3.0, 2.0, 0.0, 0.0]]), [0]).token_ids.tolist() == [1]


def greedy(**fields: object) -> RowParams:
    return RowParams(seed=0, temperature=0.0, **fields)


def vars_of(edits: RowEdits | BatchEdits) -> list[torch.Tensor]:
    return [getattr(edits, name) for name in edits.__struct_fields__]


def run_greedy(params: RowParams, logits: list[float], steps: int, prompt: list[int]) -> list[int]:
    table = Table(len(logits))
    table.add(0, params, prompt)
    return [int(table.step(torch.tensor([logits]), [0]).token_ids[0]) for _ in range(steps)]


def test_bad_word_is_forbidden_only_after_its_own_beginning_was_generated() -> None:
    logits = [1.0, 2.0, 3.0, 4.0]
    assert run_greedy(greedy(bad_words=[[3]]), logits, 2, [0]) == [2, 2]
    assert run_greedy(greedy(bad_words=[[3, 3]]), logits, 4, [3, 3]) == [3, 2, 3, 2]
    assert run_greedy(greedy(bad_words=[[3, 3, 3]]), logits, 6, [3]) == [3, 3, 2, 3, 3, 2]
    assert run_greedy(greedy(bad_words=[[3, 3], [3, 2]]), logits, 4, [0]) == [3, 1, 3, 1]
    assert run_greedy(greedy(bad_words=[[99], [-1, 99], [77, 3]]), logits, 2, [0]) == [3, 3]


def test_stop_ids_are_forbidden_until_min_tokens_are_generated() -> None:
    params = greedy(min_tokens=3, stop_token_ids=[3, 2, 500])
    assert run_greedy(params, [1.0, 2.0, 3.0, 4.0], 5, [0, 0]) == [1, 1, 1, 3, 3]


def test_bias_reaches_allowed_tokens_only() -> None:
    logits = [1.0, 2.0, 3.0, 4.0]
    assert run_greedy(greedy(allowed_token_ids=[0, 1, 1]), logits, 1, [0]) == [1]
    assert run_greedy(greedy(allowed_token_ids=[0, 1], logit_bias={0: 1.5, 3: 100.0}), logits, 1, [0]) == [0]
    assert run_greedy(greedy(logit_bias={3: -100.0, 0: 1.9}), logits, 1, [0]) == [2]


def test_a_row_with_no_allowed_token_is_a_fault() -> None:
    table = Table(4)
    table.add(0, RowParams(seed=0, allowed_token_ids=[2], bad_words=[[2]]))
    table.add(1, RowParams(seed=0, allowed_token_ids=[2]))
    out = table.step(torch.zeros(2, 4), [0, 1])
    assert out.faults.tolist() == [True, False] and out.token_ids.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("fields", "field"), [({"logit_bias": {4: 1.0}}, "logit_bias"), ({"allowed_token_ids": [-1]}, "allowed_token_ids")]
)
def test_unknown_tokens_are_refused_and_leave_the_row_as_it_was(fields: dict[str, object], field: str) -> None:
    table = Table(4)
    table.add(0, greedy(logit_bias={1: 5.0}))
    with pytest.raises(InvalidRequestError) as caught:
        table.sampler.add(0, RowParams(seed=0, **fields), [1], 1)
    assert caught.value.field == field
    assert table.sampler.drain_writes() == []
    assert table.step(torch.zeros(1, 4), [0]).token_ids.tolist() == [1]


def test_writes_fit_the_tables_and_are_drained_once() -> None:
    sampler = Sampler(4, 10, CPU, 8)
    sampler.add(2, RowParams(seed=-5, temperature=0.5, min_p=0.25, top_k=3, top_p=0.75), [1, 2, 3], 2)
    apply_writes(sampler)
    floats, ints = sampler.tables()
    assert floats[2, :3].tolist() == pytest.approx([0.5, 0.75, math.log(0.25)])
    assert ints[2, 1:].tolist() == [3, 2, -1]
    assert floats[3].tolist() == [0.0] * 6
    assert sampler.drain_writes() == []
    with pytest.raises(ValueError, match="outside the table"):
        sampler.add(4, RowParams(seed=0), [1], 1)


def test_bad_words_cost_their_tokens_not_their_number_times_the_longest() -> None:
    words = [[token, 3] for token in range(200)] + [[5] * 500]
    edits = row_edits(greedy(bad_words=words), 600, CPU)
    assert edits is not None
    held = sum(values.numel() for values in vars_of(edits) if isinstance(values, torch.Tensor))
    assert held <= 4 * sum(map(len, words))
    batch = combine([(0, edits), (1, edits)], CPU)
    assert batch is not None
    assert sum(values.numel() for values in vars_of(batch.placed(None, CPU))) <= 3 * held
