"""Log-probabilities describe the unmodified logits, in the documented order, for the rows that asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_oracle import CPU, Table

from engine.sampling import Sampler
from engine.step import RowParams, TokenLogprobs

pytestmark = pytest.mark.usefixtures("each_implementation")


def check(entry: TokenLogprobs, logits: np.ndarray, token: int, k: int) -> None:
    exact = logits.astype(np.float64)
    exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    order = np.argsort(-logits, kind="stable")[:k].tolist()
    assert entry.token_ids == [token, *order]
    assert entry.logprobs == pytest.approx(exact[entry.token_ids].tolist(), abs=1e-5)
    assert entry.rank == 1 + int((logits > logits[token]).sum())


@pytest.mark.parametrize("all_ask", [True, False])
@pytest.mark.parametrize("vocab", [50, 3001])
def test_sampled_logprobs_ignore_every_modification(all_ask: bool, vocab: int) -> None:
    table = Table(vocab)
    asked = {0: 3, 2: 0, 3: 20, 5: 10_000}
    for row in range(6):
        table.add(
            row,
            RowParams(
                seed=row, temperature=0.7 * (row % 2), repetition_penalty=1.5, presence_penalty=1.0, top_k=row,
                logit_bias={1: 9.0}, bad_words=[[2]], logprobs=asked.get(row, 1 if all_ask else None),
            ),
            [1, 2, 3, 4], 2,
        )  # fmt: skip
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(2)).round(decimals=1)
    rows = [3, 0, 1, 2, 5, 4]
    out = table.step(logits, rows)
    assert out.logprobs is not None
    host = out.logprobs.start_copy().to_host().by_row()
    assert set(host) == (set(rows) if all_ask else set(asked))
    for at, row in enumerate(rows):
        if row in host:
            k = min(asked.get(row, 1), vocab)
            check(host[row][0], logits[at].numpy(), int(out.token_ids[at]), k)


def test_nobody_asks_nothing_is_computed() -> None:
    table = Table(10)
    table.add(0, RowParams(seed=0))
    assert table.step(torch.zeros(1, 10), [0]).logprobs is None


@pytest.mark.parametrize(("m", "k"), [(0, 4), (1, 0), (7, 5), (300, 2)])
def test_prompt_logprobs_score_the_given_tokens(m: int, k: int) -> None:
    vocab = 2000
    sampler = Sampler(2, vocab, CPU, 8)
    logits = torch.randn(m, vocab, generator=torch.Generator().manual_seed(m)).mul(4).round(decimals=1)
    logits[:, 7] = -torch.inf
    targets = torch.arange(m) * 13 % vocab
    entries = sampler.prompt_logprobs(logits, targets, k).to_list()
    assert len(entries) == m
    for at, entry in enumerate(entries):
        check(entry, logits[at].numpy(), int(targets[at]), k)
