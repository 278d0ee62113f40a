"""Ranks that divide a sequence's positions answer as one process that computes all parts, and as one that divides
nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from smollm2 import smollm2_path
from test_tensor_parallel import answers, args_of, greedy, mixed, prompts, save_gemma3, write_k_quants
from tiny_families import save_tiny

from attention_backends.toolchain import find_compiler
from engine import LLM, EngineArgs, SamplingParams
from engine.core.in_process_client import InProcessClient
from engine.runner.context import ContextGroup

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.timeout(300),
]


def divided(path: Path, ranks: int = 2, **settings: Any) -> Any:
    return args_of(path, ranks, decode_context_parallel_size=ranks, **settings)


@pytest.mark.parametrize(
    ("family", "count", "ranks"),
    [
        ("Gemma3", 4, 2),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("Gemma3", 64, 2), ("Llama", 64, 2), ("Qwen3", 64, 2), ("Qwen3Moe", 64, 2), ("Llama", 16, 4))
        ),
    ],
)
def test_tokens_have_the_bits_of_all_parts_in_one_process_and_the_logits_of_the_whole(
    family: str, count: int, ranks: int, tmp_path: Path
) -> None:
    save_gemma3(tmp_path) if family == "Gemma3" else save_tiny(family, tmp_path)
    args = divided(tmp_path, ranks)
    found = greedy(args, count)
    assert found == greedy(args, count, threads=True)
    alone = greedy(args_of(tmp_path, ranks=1), count)
    for (tokens, logprobs), (expected, of_expected) in zip(found, alone, strict=True):
        assert tokens == expected
        for step, of_step in zip(logprobs, of_expected, strict=True):
            assert step == pytest.approx(of_step, abs=1e-4)


@pytest.mark.exhaustive
def test_a_mixed_workload_gives_the_tokens_of_all_parts_in_one_process(tmp_path: Path) -> None:
    save_tiny("Llama", tmp_path)
    args = divided(
        tmp_path,
        dtype="bfloat16",
        max_num_seqs=16,
        max_num_batched_tokens=64,
        kv_cache_memory=16 * 3 * 2 * 2 * 16 * 2 * 40,
        swap_space="64MiB",
        preemption="swap",
        block_size=8,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    )
    assert mixed(args) == mixed(args, threads=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{"quantization": "auto"}, {"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_packed_weights_and_int8_keys_have_the_bits_of_all_parts_in_one_process(settings: dict[str, Any]) -> None:
    """Nine query heads and three of keys, which two ranks have six and three of. The file's own blocks, and int8."""
    args = divided(smollm2_path(), dtype="bfloat16", **settings)
    assert greedy(args, 64) == greedy(args, 64, threads=True)


@pytest.mark.exhaustive
def test_native_calls_of_layers_have_the_bits_of_all_parts_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    attended: list[int] = []
    attend = ContextGroup.attend

    def counted(self: ContextGroup, *given: Any) -> None:
        attended.append(len(given))
        attend(self, *given)

    args = divided(smollm2_path(), dtype="bfloat16", compile="pieces")
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)
    with LLM.from_args(args, client_factory=InProcessClient) as llm:
        monkeypatch.setattr(ContextGroup, "attend", counted)
        found = answers(llm.generate(prompts(64), params, use_tqdm=False))
    assert not attended, "a layer of rank 0 was called one by one"
    assert found == greedy(replace(args, compile="none"), 64, threads=True)
    assert attended


@pytest.mark.exhaustive
def test_blocks_of_k_quants_have_the_bits_of_all_parts_in_one_process(tmp_path: Path) -> None:
    args = divided(write_k_quants(tmp_path), tokenizer=str(tmp_path), dtype="bfloat16")
    assert greedy(args, 64) == greedy(args, 64, threads=True)


@pytest.mark.exhaustive
def test_long_prompts_in_pieces_are_divided_as_short_ones_are(tmp_path: Path) -> None:
    save_gemma3(tmp_path)
    args = divided(tmp_path, max_num_batched_tokens=64, max_model_len=1024)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)
    asked = [{"prompt_token_ids": [3 + (7 * i * i + n) % 247 for i in range(n)]} for n in (700, 65, 901, 2, 333)]

    def found(of: EngineArgs) -> list[Any]:
        with LLM.from_args(of) as llm:
            return answers(llm.generate(asked, params, use_tqdm=False))

    for (tokens, steps), (expected, of_expected) in zip(
        found(args), found(replace(args, tensor_parallel_size=1, decode_context_parallel_size=1)), strict=True
    ):
        assert tokens == expected
        for step, of_step in zip(steps, of_expected, strict=True):
            assert step == pytest.approx(of_step, abs=1e-4)
