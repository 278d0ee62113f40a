"""Tokens that another model's logits would have had drawn: the same where the logits are, and no trace is left."""

from __future__ import annotations

import torch

from engine.sampling import Sampler
from engine.step import RowParams

VOCABULARY, CONTEXT = 300, 12
PARAMS = (
    RowParams(seed=1, temperature=0.0),
    RowParams(seed=2, temperature=1.0),
    RowParams(seed=3, temperature=0.7, top_k=20, top_p=0.9, logprobs=2),
    RowParams(seed=4, temperature=1.3, min_p=0.05, logit_bias={7: 5.0}, bad_words=[[5], [6, 8]]),
    RowParams(seed=5, temperature=1.0, presence_penalty=2.0, repetition_penalty=1.5),
)
PENALISED = 4


def drawn(drafts_first: bool) -> list[list[int]]:
    torch.manual_seed(0)
    sampler = Sampler(len(PARAMS), VOCABULARY, torch.device("cpu"), CONTEXT)
    tokens = torch.randint(0, VOCABULARY, (len(PARAMS), CONTEXT), dtype=torch.int32)
    for row, params in enumerate(PARAMS):
        sampler.add(row, params, tokens[row, :4].tolist(), 4)
        for table, at, start, values in sampler.drain_writes():
            target = sampler.tables()[table]
            target[at, start : start + len(values)] = torch.tensor(values, dtype=target.dtype)
    rows, found = list(range(len(PARAMS))), []
    for position in range(4, CONTEXT):
        logits, positions = 3 * torch.randn(len(PARAMS), VOCABULARY), torch.full((len(PARAMS),), position)
        step = torch.tensor(rows), rows, positions, tokens
        drafts = sampler.draft(logits.clone(), *step) if drafts_first else None
        sampled = sampler.sample(logits.clone(), *step).token_ids
        if drafts is not None:
            assert drafts[:PENALISED].tolist() == sampled[:PENALISED].tolist()
        tokens[:, position] = sampled
        found.append(sampled.tolist())
    return found


def test_drafts_from_the_same_logits_are_what_is_sampled_and_leave_no_trace() -> None:
    assert drawn(drafts_first=True) == drawn(drafts_first=False)
