"""A runner that is fed hand-made plans generates what a dense loop over one sequence does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from plan_driver import BLOCK_SIZE, MAX_LEN, MIXER, NUM_BLOCKS, SPEC, PlanDriver, Sequence, tiny_decoder, tiny_runner

from engine.errors import EngineError
from engine.models.decoder import Decoder
from engine.runner import model_runner as room
from engine.runner.streams import HostStreams
from engine.step import NewRow, RowParams, Rows, ScheduledRow, StepPlan, Write, Writes

GREEDY = RowParams(seed=0, temperature=0.0)


def dense_logits(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """float32 [tokens, vocab]: the whole sequence at once, attention written out."""
    n = len(tokens)
    at = torch.arange(n)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        window = SPEC.layers[layer].mixer.window or n
        hidden = (at[None] > at[:, None]) | (at[None] <= at[:, None] - window)
        heads = MIXER.num_heads // MIXER.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(heads, 1)) * MIXER.scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(heads, 1)))

    model.set_attention(attend)
    with torch.inference_mode():
        return model.compute_logits(model(torch.tensor(tokens), at))


def dense_greedy(prompt: list[int], num_tokens: int) -> list[int]:
    model, tokens = tiny_decoder(), list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(dense_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def sequences(rng: random.Random, count: int, params: RowParams = GREEDY) -> list[Sequence]:
    made = []
    for _ in range(count):
        prompt = [rng.randrange(SPEC.vocab_size) for _ in range(rng.choice([1, 3, BLOCK_SIZE, 2 * BLOCK_SIZE + 1, 30]))]
        made.append(Sequence(prompt, rng.randint(1, min(20, MAX_LEN - len(prompt))), params))
    return made


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("preempt", [0.0, 0.2])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_chunked_mixed_preempted_rows_generate_the_dense_tokens(
    tmp_path: Path, seed: int, preempt: float, lag: bool
) -> None:
    rng = random.Random(seed)
    work = sequences(rng, 9)
    driver = PlanDriver(tiny_runner(tmp_path), rng, preempt, lag)
    driver.run(work)
    assert bool(driver.preemptions) == (preempt > 0)
    for s in work:
        assert s.generated == dense_greedy(s.prompt, s.num_tokens)


class Queued(HostStreams):
    """The host does not know where an unsure row starts."""

    queued = True


@pytest.mark.parametrize(("lag", "streams"), [(False, HostStreams), (True, HostStreams), (True, Queued)])
@pytest.mark.parametrize("params", [GREEDY, RowParams(seed=3, temperature=0.8, top_p=0.95, logprobs=2)])
def test_drafts_change_no_token_and_no_log_probability(
    tmp_path: Path, params: RowParams, lag: bool, streams: type[HostStreams]
) -> None:
    """Right ones, wrong ones and both, also behind a prompt's last chunk, beside rows without any, and steps behind
    them that are planned before it is known which were right."""
    rng, plain = random.Random(7), sequences(random.Random(1), 7, params)
    PlanDriver(tiny_runner(tmp_path), random.Random(2), 0.0, False).run(plain)
    work = sequences(random.Random(1), 7, params)
    right = {tuple(s.prompt): s.generated for s in plain}

    def guess(s: Sequence) -> list[int]:
        drafts = right[tuple(s.prompt)][len(s.generated) :][: rng.randrange(3)]
        return [token if rng.random() < 0.8 else rng.randrange(SPEC.vocab_size) for token in drafts]

    driver = PlanDriver(tiny_runner(tmp_path, streams=streams()), rng, 0.1, lag, guess)
    driver.run(work)
    assert 10 < driver.accepted < driver.drafted
    for one, other in zip(work, plain):
        assert one.generated == other.generated
        assert [entry.token_ids for entry in one.logprobs] == [entry.token_ids for entry in other.logprobs]
        for entry, expected in zip(one.logprobs, other.logprobs, strict=True):
            assert entry.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_a_full_context_is_generated_to_its_last_token(tmp_path: Path) -> None:
    prompt = list(range(20))
    s = Sequence(prompt, MAX_LEN - len(prompt), GREEDY)
    PlanDriver(tiny_runner(tmp_path), random.Random(0), 0.0, True).run([s])
    assert s.generated == dense_greedy(prompt, s.num_tokens)


@pytest.mark.parametrize("piece_bytes", [64 << 20, 3 * 4 * SPEC.vocab_size])
def test_log_probabilities_of_prompt_and_tokens_equal_the_dense_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    monkeypatch.setattr("engine.runner.step_sampler._PROMPT_LOGITS_BYTES", piece_bytes)
    rng = random.Random(5)
    asked = sequences(rng, 4, RowParams(seed=0, temperature=0.0, logprobs=2, prompt_logprobs=3))
    work = [*asked, *sequences(rng, 3)]
    PlanDriver(tiny_runner(tmp_path), rng, 0.0, False).run(work)
    model = tiny_decoder()
    for s in asked:
        tokens = s.prompt + s.generated
        expected = dense_logits(model, tokens).log_softmax(-1)
        entries = s.prompt_logprobs + s.logprobs
        assert len(entries) == len(tokens) - 1
        for position, entry in enumerate(entries, start=1):
            row = expected[position - 1]
            assert entry.token_ids[0] == tokens[position]
            top = row.topk(len(entry.token_ids) - 1)
            torch.testing.assert_close(torch.tensor(entry.logprobs), row[entry.token_ids], rtol=0, atol=1e-4)
            torch.testing.assert_close(torch.tensor(entry.logprobs[1:]), top.values, rtol=0, atol=1e-4)
            assert entry.rank == 1 + int((row > row[tokens[position]]).sum())
    assert not any(s.logprobs or s.prompt_logprobs for s in work[4:])


def test_drawn_tokens_do_not_depend_on_batch_chunks_or_preemption(tmp_path: Path) -> None:
    outcomes = []
    for seed, preempt in ((0, 0.0), (1, 0.15)):
        params = RowParams(seed=11, temperature=1.3, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3)
        work = sequences(random.Random(7), 6, params)
        PlanDriver(tiny_runner(tmp_path), random.Random(seed), preempt, False).run(work)
        outcomes.append([s.generated for s in work])
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] != [dense_greedy(s.prompt, s.num_tokens) for s in work]


def appends(row: int, blocks: list[int], start: int = 0) -> Writes:
    """Both layer groups have tables of their own: the second one's blocks are the other half."""
    half = NUM_BLOCKS // 2
    return Writes.of(Write(group, row, start, [block + group * half for block in blocks]) for group in range(2))


def start(runner: room.ModelRunner, prompt: list[int], blocks: list[int], row: int = 0) -> StepPlan:
    return StepPlan(
        step_id=1,
        added=[NewRow(row=row, token_ids=prompt, prompt_len=len(prompt), params=GREEDY)],
        block_appends=appends(row, blocks),
        rows=Rows.of([ScheduledRow(row=row, computed=0, query_len=len(prompt), samples=True)]),
    )


def test_a_copied_block_serves_in_the_place_of_its_source(tmp_path: Path) -> None:
    runner, prompt = tiny_runner(tmp_path), [5, 6, 7, 8, 9, 10]
    first = runner.execute(start(runner, prompt, [3, 9])).wait().token_ids
    plan = StepPlan(
        step_id=2,
        block_copies=[(9, 20), (9 + NUM_BLOCKS // 2, 20 + NUM_BLOCKS // 2)],
        block_appends=appends(0, [20], start=1),
        rows=Rows.of([ScheduledRow(row=0, computed=6, query_len=1, samples=True)]),
    )
    assert first + runner.execute(plan).wait().token_ids == dense_greedy(prompt, 2)


def test_a_nan_row_is_a_fault_and_its_neighbours_are_not(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    with torch.no_grad():
        runner._model.embed_tokens.weight[42] = torch.nan
    good = [1, 2, 3]
    poisoned = start(runner, [42, 1], [4], row=1)
    plan = start(runner, good, [3])
    both = StepPlan(
        step_id=1,
        added=plan.added + poisoned.added,
        block_appends=Writes.of(plan.block_appends.each() + poisoned.block_appends.each()),
        rows=Rows.of(plan.rows.each() + poisoned.rows.each()),
    )
    result = runner.execute(both).wait()
    assert result.faults == [1]
    assert result.token_ids[0] == dense_greedy(good, 1)[0]


def test_plans_that_break_the_rows_are_refused(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    runner.execute(start(runner, [1, 2], [0])).wait()
    with pytest.raises(ValueError, match="row 0 was added, but is taken"):
        runner.execute(start(runner, [1, 2], [0]))
    with pytest.raises(ValueError, match="row 3 was released, but holds nothing"):
        runner.execute(StepPlan(step_id=2, released=[3]))
    with pytest.raises(ValueError, match="exceeds max_num_batched_tokens"):
        runner.execute(
            StepPlan(step_id=3, rows=Rows.of([ScheduledRow(row=0, computed=0, query_len=25, samples=False)]))
        )
    with pytest.raises(EngineError, match="without host blocks"):
        runner.execute(StepPlan(step_id=4, swap_out=[(0, 0)]))


def test_warm_up_leaves_every_row_free_and_changes_no_token(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    assert runner.warm_up().distinct_pieces == 0
    prompt = [9, 8, 7]
    assert runner.execute(start(runner, prompt, [0])).wait().token_ids == dense_greedy(prompt, 1)
    for rows, budget in ((1, 24), (4, 1), (1, 1)):
        tiny_runner(tmp_path, rows=rows, budget=budget).warm_up()


def test_the_report_counts_one_block_over_the_layers_of_a_group(tmp_path: Path) -> None:
    runner = tiny_runner(tmp_path)
    assert runner.report.windows == (None, 9)
    expected = 2 * BLOCK_SIZE * MIXER.num_kv_heads * MIXER.head_dim * 4
    assert runner.report.block_bytes == expected
    assert sum(c.nbytes for c in runner._attention._kv_caches) == NUM_BLOCKS * expected
    assert 0 < runner.report.device_bytes_free <= runner.report.device_bytes_total
    assert runner.report.activation_bytes > 0 and runner.report.workspace_bytes > 0
