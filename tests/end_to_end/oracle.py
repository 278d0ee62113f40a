"""Greedy continuations by transformers, one prompt at a time: what the engine must reproduce token for token."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class GreedyOracle:
    """transformers' greedy tokens after each prompt, EOS ignored; computed once.

    A guess makes this quick without making it weaker: token t is greedy if it is the argmax after the prompt and the
    t - 1 greedy tokens before it, and one forward pass over prompt and guess shows that for all t. From the first wrong
    guess on, the tokens are computed one by one.
    """

    def __init__(self, model: torch.nn.Module, prompts: Sequence[Sequence[int]], count: int) -> None:
        self.prompts = prompts
        self._model = model
        self._count = count
        self._tokens: list[list[int]] | None = None

    def tokens(self, guesses: Sequence[Sequence[int]]) -> list[list[int]]:
        if self._tokens is None:
            self._tokens = [self._greedy(p, g) for p, g in zip(self.prompts, guesses, strict=True)]
        return self._tokens

    @torch.inference_mode()
    def _greedy(self, prompt: Sequence[int], guess: Sequence[int]) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < self._count:
            # One pass yields an argmax after the last known token and after each guessed one but the last.
            guessed = list(guess[len(tokens) : self._count - 1])
            ids = torch.tensor([[*prompt, *tokens, *guessed]])
            logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=len(guessed) + 1).logits[0]
            for i, token in enumerate(logits.argmax(-1).tolist()):
                tokens.append(token)
                if i < len(guessed) and token != guessed[i]:
                    guess = ()
                    break
        return tokens


def first_difference(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> str:
    """Empty when equal, else where the first sequence departs."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if list(a) != list(b):
            at = next((j for j, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            return f"sequence {i} differs at token {at}: {list(a)[at : at + 4]} != {list(b)[at : at + 4]}"
    return ""
