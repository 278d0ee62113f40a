"""Real weights with windows: Gemma 3 270M's float32 greedy tokens equal transformers', for prompts past the window."""

from __future__ import annotations

from pathlib import Path

import pytest
from gemma3 import gemma3_by_transformers, gemma3_path
from oracle import GreedyOracle, first_difference

from engine import LLM, SamplingParams
from engine.models.description import describe

COUNT = 8
LENGTHS = (540, 40)


@pytest.mark.slow
def test_greedy_tokens_equal_transformers_past_the_window() -> None:
    """Chunks of 512 tokens and all prompts at once; which text it is does not matter, but that it is one does."""
    path = gemma3_path()
    windows = [layer.window for layer in describe(path).facts.layers]
    assert windows == ([512] * 5 + [None]) * 3
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    with LLM(path, dtype="float32", device="cpu", max_model_len=2048, kv_cache_memory=1 << 29, compile="none") as llm:
        ids = llm._tokenizer.encode(text)
        prompts = [ids[:length] for length in LENGTHS]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    ours = [output.outputs[0].token_ids for output in outputs]
    assert ids[0] == 2 and all(len(prompt) == length for prompt, length in zip(prompts, LENGTHS, strict=True))
    oracle = GreedyOracle(gemma3_by_transformers(), prompts, COUNT)
    assert first_difference(ours, oracle.tokens(guesses=ours)) == ""
