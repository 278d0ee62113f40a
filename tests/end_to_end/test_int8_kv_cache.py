"""A bfloat16 model with an int8 KV cache: the same text within rounding, nearly twice the tokens in the same memory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from tiny_families import save_tiny

from attention_backends.cpu import CpuBackend
from attention_backends.interface import AttentionSpec
from engine import LLM, SamplingParams
from engine.errors import ConfigError
from engine.kv_budget import kv_bytes_per_token
from engine.models.description import describe
from engine.runner.paged_attention import PagedAttention, attention_layers

PROMPTS = [[3 + (i * 37 + j * j) % 400 for j in range(n)] for i, n in enumerate((5, 40, 300, 300, 17))]
"""the third and fourth share nothing; all are read in chunks and decoded together"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny("Llama", path)
    return path


def prompt_logprobs(path: Path, kv_cache_dtype: Literal["bf16", "int8"]) -> torch.Tensor:
    settings = {"max_model_len": 512, "kv_cache_memory": 1 << 22, "max_num_batched_tokens": 128}
    with LLM(str(path), device="cpu", compile="none", kv_cache_dtype=kv_cache_dtype, **settings) as llm:  # type: ignore[arg-type]  # ints all
        params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
    return torch.tensor(
        [
            at[token].logprob
            for prompt, output in zip(PROMPTS, outputs, strict=True)
            for token, at in zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=True)
            if at is not None
        ]
    )


def test_log_probabilities_stay_close_to_those_of_a_bf16_cache(model_path: Path) -> None:
    exact, small = prompt_logprobs(model_path, "bf16"), prompt_logprobs(model_path, "int8")
    assert small.shape == exact.shape == (sum(len(p) - 1 for p in PROMPTS),)
    assert not torch.equal(small, exact), "the cache was not quantised"
    assert (small - exact).abs().mean() < 0.1
    assert torch.corrcoef(torch.stack((small, exact)))[0, 1] > 0.995


def test_a_block_takes_what_the_ledger_is_told(model_path: Path) -> None:
    facts = describe(str(model_path)).facts
    heads = facts.layers[0]
    sizes = {}
    for dtype in (torch.bfloat16, torch.int8):
        backend = CpuBackend()
        backend.bind(AttentionSpec(torch.device("cpu"), torch.bfloat16, dtype, (heads.head_dim,)))
        attention = PagedAttention(backend, attention_layers(facts), dtype)
        attention.allocate(3, 0, 16, torch.device("cpu"))
        sizes[dtype] = attention.block_bytes(16)
        assert sizes[dtype] == 16 * kv_bytes_per_token(facts.layers, str(dtype).removeprefix("torch."))
    assert sizes[torch.int8] == sizes[torch.bfloat16] // 2 + 2 * facts.num_layers * heads.num_kv_heads * 16 * 4


def test_a_float32_model_is_refused(model_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int8' needs dtype='bfloat16', got 'float32'"):
        LLM(str(model_path), device="cpu", dtype="float32", kv_cache_dtype="int8")
