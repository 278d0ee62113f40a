"""Greedy continuations by transformers, one prompt at a time: what the engine must reproduce token for token."""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens after `prompt`, EOS ignored."""
    ids = torch.tensor([list(prompt)])
    past, tokens = None, []
    for _ in range(count):
        out = model(input_ids=ids, past_key_values=past, use_cache=True)
        past = out.past_key_values
        tokens.append(int(out.logits[0, -1].argmax()))
        ids = torch.tensor([[tokens[-1]]])
    return tokens


def first_difference(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> str:
    """Empty when equal, else where the first sequence departs."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if list(a) != list(b):
            at = next((j for j, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            return f"sequence {i} differs at token {at}: {list(a)[at : at + 4]} != {list(b)[at : at + 4]}"
    return ""
