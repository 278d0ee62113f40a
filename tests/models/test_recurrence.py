"""Tokens of a chunk solved for at once, beside one after the other."""

from __future__ import annotations

import pytest
import torch

from engine.models.recurrence import many_tokens, one_token


@pytest.mark.parametrize("tokens", [1, 63, 64, 200])
@pytest.mark.parametrize(("delta", "each"), [(True, False), (True, True), (False, False)])
def test_many_tokens_at_once_are_what_one_after_the_other_is(tokens: int, delta: bool, each: bool) -> None:
    """`each`: numbers of a key are kept in parts of their own."""
    generator = torch.Generator().manual_seed(tokens)
    heads, groups, keys, values = 6, 3, 8, 5

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(drawn(tokens, groups, keys), dim=-1) for _ in range(2))
    v, beta = drawn(tokens, heads, values), drawn(tokens, heads).sigmoid()
    log_decay = -drawn(tokens, heads, keys if each else 1).exp() / 5
    rule = beta if delta else None
    state = first = drawn(heads, keys, values)
    expected = torch.empty_like(v)
    for at in range(tokens):
        given = (one[at][None] for one in (q, k, v, log_decay))
        made, after = one_token(*given, None if rule is None else rule[at][None], state[None])
        expected[at], state = made[0], after[0]
    made, last = many_tokens(q, k, v, log_decay, rule, first)
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(last, state)
