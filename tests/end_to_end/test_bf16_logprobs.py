"""bf16 log-probabilities are as close to float32's as transformers' own bf16 ones are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from smollm2 import smollm2_by_transformers, smollm2_path

from engine import LLM, SamplingParams

CHUNK = 500
"""tokens per prompt; four of them make the 2,000 tokens"""


@torch.inference_mode()
def hf_logprobs(model: torch.nn.Module, prompts: list[list[int]]) -> torch.Tensor:
    rows = []
    for prompt in prompts:
        logits = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
        rows.append(logits.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
    return torch.cat(rows)


@pytest.mark.slow
def test_bf16_error_is_no_larger_than_transformers(request: pytest.FixtureRequest) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    with LLM(smollm2_path(), dtype="bfloat16", device="cpu", max_model_len=1024, kv_cache_memory=1 << 28) as llm:
        ids = llm.get_tokenizer().encode(text)[: 4 * CHUNK]
        prompts = [ids[i : i + CHUNK] for i in range(0, 4 * CHUNK, CHUNK)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    ours = torch.tensor(
        [
            at[token].logprob
            for prompt, output in zip(prompts, outputs)
            for token, at in zip(prompt[1:], (output.prompt_logprobs or [])[1:])
            if at is not None
        ]
    )
    reference = smollm2_by_transformers()
    exact = hf_logprobs(reference, prompts)
    assert ours.shape == exact.shape
    our_error = (ours - exact).abs().mean().item()
    their_error = (hf_logprobs(reference.bfloat16(), prompts) - exact).abs().mean().item()
    print(f"mean |error|: ours {our_error:.5f}, transformers {their_error:.5f}, ratio {our_error / their_error:.3f}")
    assert our_error <= 1.25 * their_error
