"""Engines whose ranks are processes answer with the tokens, and the bits, of one process that computes all parts."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_models import write_gguf
from msgspec.structs import replace
from random_blocks import random_weights
from smollm2 import smollm2_path
from thread_ranks import ThreadRanks
from tiny_families import save_tiny, save_tokenizer
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from attention_backends.toolchain import find_compiler
from engine import LLM, EngineArgs, RequestOutput, SamplingParams, StructuredOutputsParams
from engine.core.in_process_client import InProcessClient

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.timeout(300),
]

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "n": 2},
    {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"structured_outputs": StructuredOutputsParams(regex="(ab|cd)+ef[0-9]{3,}")},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.01},
    {"use_beam_search": True, "best_of": 2, "seed": None},
    {"prompt_logprobs": 1},
)


def args_of(path: Path | str, ranks: int = 2, **settings: Any) -> EngineArgs:
    given = {"dtype": "float32", "max_model_len": 256, "compile": "none", "threads": 1, **settings}
    return EngineArgs(model=str(path), device="cpu", tensor_parallel_size=ranks, **given)


def answers(outputs: Sequence[RequestOutput]) -> list[Any]:
    """Tokens, and log-probabilities to the bit."""
    return [
        (list(each.token_ids), [{token: at.logprob for token, at in step.items()} for step in each.logprobs or []])
        for output in outputs
        for each in output.outputs
    ]


def prompts(count: int) -> list[dict[str, list[int]]]:
    rng = random.Random(5)
    return [{"prompt_token_ids": [rng.randrange(3, 250) for _ in range(rng.randrange(1, 60))]} for _ in range(count)]


def greedy(args: EngineArgs, count: int = 64, *, threads: bool = False) -> list[Any]:
    factory = functools.partial(InProcessClient, executor=ThreadRanks) if threads else None
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)
    with LLM.from_args(args, client_factory=factory) as llm:
        return answers(llm.generate(prompts(count), params, use_tqdm=False))


def save_gemma3(path: Path) -> None:
    config = Gemma3TextConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=16,
        query_pre_attn_scalar=24,
        initializer_range=0.2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(11)
    Gemma3ForCausalLM(config).float().save_pretrained(path)
    save_tokenizer(path)


FIVE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
"""experts, of which two ranks cannot have as many, and whose inner units they cannot divide"""
SHARED: dict[str, Any] = {**FIVE, "shared_expert_intermediate_size": 96}
WHOLE: dict[str, Any] = {"enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("family", "changes", "settings"),
    [
        ("Gemma3", {}, {}),
        ("Qwen3Moe", FIVE, WHOLE),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("Llama", {}, {}),
                ("Qwen3", {}, {}),
                ("Qwen3Moe", {}, {}),
                ("Qwen3Moe", {}, WHOLE),
                ("Qwen3Moe", FIVE, {**WHOLE, "ranks": 3}),
                ("Qwen2Moe", SHARED, WHOLE),
                ("GptOss", {"num_local_experts": 5}, WHOLE),
            )
        ),
    ],
)
def test_a_thousand_greedy_tokens_have_the_bits_of_all_parts_in_one_process(
    family: str, changes: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    save_gemma3(tmp_path) if family == "Gemma3" else save_tiny(family, tmp_path, **changes)
    args = args_of(tmp_path, **settings)
    found = greedy(args)
    assert sum(len(tokens) for tokens, _ in found) == 1024
    assert found == greedy(args, threads=True)
    alone = greedy(args_of(tmp_path, ranks=1))
    for (tokens, logprobs), (expected, of_expected) in zip(found, alone, strict=True):
        assert tokens == expected
        for step, of_step in zip(logprobs, of_expected, strict=True):
            assert step == pytest.approx(of_step, abs=1e-4)


@pytest.mark.parametrize("quantization", [pytest.param("auto", marks=pytest.mark.exhaustive), "int8"])
def test_packed_weights_have_the_same_bits_whoever_computes_the_parts(quantization: str) -> None:
    """Nine query heads and three of keys: two ranks have six and three. The file's own blocks, and int8."""
    args = args_of(smollm2_path(), dtype="bfloat16", quantization=quantization)
    assert greedy(args, 16) == greedy(args, 16, threads=True)


PACKED_EXPERTS = (
    ("Qwen2Moe", SHARED, "int8", {}),
    ("Qwen2Moe", SHARED, "auto", {"ranks": 3}),
    ("Qwen3Moe", {**FIVE, "moe_intermediate_size": 32}, "Q4_1", {"ranks": 3}),
    ("Qwen3Moe", FIVE, "int8", {"ranks": 3}),
    ("GptOss", {"num_local_experts": 5}, "MXFP4", {"ranks": 3}),
)


@pytest.mark.parametrize(
    ("family", "changes", "weights", "settings"),
    [pytest.param(*case, marks=[pytest.mark.exhaustive] * (index > 0)) for index, case in enumerate(PACKED_EXPERTS)],
)
def test_packed_experts_that_are_whole_have_the_bits_of_all_parts_in_one_process(
    family: str, changes: dict[str, Any], weights: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = save_tiny(family, tmp_path, **changes)
    path, given = tmp_path, {"quantization": weights}
    if weights in ("Q4_1", "MXFP4"):
        path, given = tmp_path / "model.gguf", {"tokenizer": str(tmp_path)}
        write_gguf(model, path, GGMLQuantizationType[weights])  # type: ignore[arg-type]  # transformers' module
    args = args_of(path, dtype="bfloat16", **WHOLE, **settings, **given)
    assert greedy(args, 16) == greedy(args, 16, threads=True)


def write_k_quants(directory: Path) -> Path:
    """Random blocks of 256, of which each of two ranks has one or more in every row that is divided."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = save_tiny("Llama", directory, **shape, head_dim=64, num_hidden_layers=2)
    write_gguf(model, directory / "model.gguf", GGMLQuantizationType.Q4_K, random_weights)  # type: ignore[arg-type]
    return directory / "model.gguf"


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_blocks_of_k_quants_have_the_same_bits_whoever_computes_the_parts(stages: int, tmp_path: Path) -> None:
    path, tokenizer = write_k_quants(tmp_path), str(tmp_path)
    args = args_of(path, tokenizer=tokenizer, dtype="bfloat16", pipeline_parallel_size=stages)
    assert greedy(args, 16) == greedy(args, 16, threads=True)


@pytest.mark.exhaustive
def test_compiled_ranks_skip_others_experts_as_they_do_uncompiled(tmp_path: Path) -> None:
    save_tiny("Qwen2Moe", tmp_path, **SHARED)
    args = args_of(tmp_path, dtype="bfloat16", **WHOLE)
    assert greedy(replace(args, compile="pieces"), 16) == greedy(args, 16, threads=True)


def mixed(args: EngineArgs, *, threads: bool = False) -> list[Any]:
    factory = functools.partial(InProcessClient, executor=ThreadRanks) if threads else None
    params = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "seed": index, **kind})
        for index, kind in zip(range(64), cycle(KINDS))
    ]
    with LLM.from_args(args, client_factory=factory) as llm:
        found = answers(llm.generate(prompts(64), params, use_tqdm=False))
        stats = llm.stats()
    assert stats.blocks_swapped_out > 0
    assert stats.drafted_tokens > 0
    return found


def test_a_mixed_workload_gives_the_tokens_of_all_parts_in_one_process(tmp_path: Path) -> None:
    """Samples, beams, penalties, grammars, drafts and swapping beside each other."""
    save_tiny("Llama", tmp_path)
    args = args_of(
        tmp_path,
        dtype="bfloat16",
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_cache_memory=16 * 3 * 2 * 2 * 16 * 2 * 40,
        swap_space="64MiB",
        preemption="swap",
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    )
    assert mixed(args) == mixed(args, threads=True)
