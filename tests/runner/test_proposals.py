"""Drafts from a row's own tokens against the definition, written out."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from ngram_oracle import expected_ngram, expected_suffix
from plan_driver import tiny_runner

from engine.runner.kernels.ngram_host import HostDraftKernels
from engine.runner.proposals import NgramProposer, Proposer, SuffixProposer
from engine.runner.request_table import RequestTable
from engine.speculation_config import SpeculationConfig
from engine.step import NewRow, RowParams, StepPlan


def a_table() -> RequestTable:
    table = RequestTable(8, 39, 4, 1, torch.device("cpu"))
    table.tokens.fill_(1)  # stale tokens behind what is known
    return table


def know(table: RequestTable, row: int, tokens: list[int], start: int = 0) -> None:
    table.tokens[row, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    table.lengths[row] = start + len(tokens)


def drafts_of(proposer: Proposer, table: RequestTable, rows: list[int], most: list[int]) -> list[list[int]]:
    counts = proposer.propose(rows, most)
    starts = table.lengths[rows].tolist()
    return [table.tokens[row, start : start + count].tolist() for row, start, count in zip(rows, starts, counts)]


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=4),
    bounds=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    most=st.lists(st.integers(1, 10), min_size=4, max_size=4),
)
def test_the_longest_and_latest_match_goes_on(rows: list[list[int]], bounds: tuple[int, int], most: list[int]) -> None:
    shortest, longest = sorted(bounds)
    config = SpeculationConfig(method="ngram", prompt_lookup_min=shortest, prompt_lookup_max=longest)
    table, numbers = a_table(), [7 - index for index in range(len(rows))]
    for number, tokens in zip(numbers, rows):
        know(table, number, tokens)
    found = drafts_of(NgramProposer(config, table, HostDraftKernels()), table, numbers, most[: len(rows)])
    assert found == [expected_ngram(tokens, longest, shortest, count) for tokens, count in zip(rows, most)]


@given(
    outputs=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=3),
    own=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    depth=st.integers(1, 6),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    least=st.sampled_from([0.0, 0.1, 0.4]),
    most=st.integers(1, 12),
)
def test_what_came_most_often_after_the_same_tokens(
    outputs: list[list[int]], own: list[int], depth: int, factor: float, least: float, most: int
) -> None:
    config = SpeculationConfig(
        method="suffix",
        suffix_decoding_max_tree_depth=depth,
        suffix_decoding_max_spec_factor=factor,
        suffix_decoding_min_token_prob=least,
    )
    table = a_table()
    proposer = SuffixProposer(config, table, HostDraftKernels())
    for output in outputs:  # each behind a prompt of two tokens, which is nobody's output
        table.prompt_len[0] = 2
        know(table, 0, output, start=2)
        proposer.end(0)
    know(table, 1, own)
    texts = [output for output in outputs if len(output) > 1]
    assert drafts_of(proposer, table, [1], [most]) == [expected_suffix(texts, own, config, most)]


def test_drafts_come_only_of_outputs_with_the_same_salt() -> None:
    """How many tokens a step brings is seen by who waits for them: it tells nothing of what others were answered."""
    table = a_table()
    proposer = SuffixProposer(SpeculationConfig(method="suffix"), table, HostDraftKernels())
    for row, salt in enumerate((None, "a", "b")):
        if salt is not None:
            table.cache_salts[row] = salt
        table.prompt_len[row] = 0
        know(table, row, [1, 2, 3 + row, 6, 7])
        proposer.end(row)
    for row, salt in enumerate(("b", None, "a", "c")):
        table.cache_salts.pop(row, None)
        if salt is not None:
            table.cache_salts[row] = salt
        know(table, row, [1, 2])
    found = drafts_of(proposer, table, [0, 1, 2, 3], [2, 2, 2, 2])
    assert found == [[5, 6], [3, 6], [4, 6], []]


def test_who_leaves_before_the_first_token_leaves_nothing_of_those_before(tmp_path: Path) -> None:
    """A row that was another's: neither its prompt nor its output counts again."""
    runner = tiny_runner(tmp_path)
    table = runner._table
    new = NewRow(row=1, token_ids=[5] * 20, prompt_len=20, params=RowParams(seed=0, temperature=0.0))
    runner.execute(StepPlan(step_id=0, added=[new])).wait()
    assert table.lengths[1] == 20
    new = NewRow(row=1, token_ids=[7] * 4, prompt_len=4, params=RowParams(seed=0, temperature=0.0))
    runner.execute(StepPlan(step_id=1, released=[1], added=[new])).wait()
    proposer = SuffixProposer(SpeculationConfig(method="suffix"), table, HostDraftKernels())
    proposer.end(1)
    assert table.lengths[1] == 4 and not proposer._recent
