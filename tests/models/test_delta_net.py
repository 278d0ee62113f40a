"""Tokens of a chunk solved for at once, beside one after the other."""

from __future__ import annotations

import pytest
import torch

from engine.models.delta_net import many_tokens, one_token


@pytest.mark.parametrize("tokens", [1, 63, 64, 200])
def test_many_tokens_at_once_are_what_one_after_the_other_is(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    heads, keys, values = 3, 8, 5

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(drawn(tokens, heads, keys), dim=-1) for _ in range(2))
    v, log_decay, beta = drawn(tokens, heads, values), -drawn(tokens, heads).exp() / 5, drawn(tokens, heads).sigmoid()
    state = first = drawn(heads, keys, values)
    expected = torch.empty_like(v)
    for at in range(tokens):
        each = (one[at][None] for one in (q, k, v, log_decay, beta))
        made, after = one_token(*each, state[None])
        expected[at], state = made[0], after[0]
    made, last = many_tokens(q, k, v, log_decay, beta, first)
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(last, state)
