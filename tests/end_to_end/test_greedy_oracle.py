"""The oracle's tokens do not depend on the guess."""

from __future__ import annotations

import torch
from oracle import GreedyOracle
from tiny_families import save_tiny


@torch.inference_mode()
def token_by_token(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].argmax()))
    return tokens


def test_right_wrong_and_short_guesses_give_the_same_greedy_tokens(tmp_path):
    model = save_tiny("Llama", tmp_path)
    prompt = [7, 99, 300]
    truth = token_by_token(model, prompt, 12)
    wrong = [t if i != 5 else (t + 1) % 512 for i, t in enumerate(truth)]
    for guess in (truth, wrong, [], [0] * 12, truth[:4]):
        assert GreedyOracle(model, [prompt], 12).tokens([guess]) == [truth]
