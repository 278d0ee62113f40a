"""`batch_invariant`: the bits of an answer are its own. Tokens and log-probabilities of a request alone are those that
it has beside others, in chunks, behind cached prefixes, with drafts, preempted and computed again, swapped out and in;
of every family, of weights in 16, 8 and 4 bits."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import save_tiny, save_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "models"))
from tiny_models import CASE_OF, SHAPE, make_model
from transformers import AutoModelForCausalLM, LlamaConfig

from attention_backends.toolchain import default_cache_dir, find_compiler
from engine import LLM, SamplingParams
from engine.cpu_kernels.linear import load
from engine.errors import ConfigError
from engine.models.families.registry import FAMILIES

pytestmark = [
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.timeout(300),
]

QUICK = {
    ("llama", "none"),
    ("gemma3_text", "int8"),
    ("gpt_oss", "int4"),
    ("deepseek_v3", "none"),
    ("qwen3_5_moe_text", "int8"),
    ("gpt2", "none"),
}
"""others with --exhaustive"""
LENGTH, TOKENS = 160, 20
_RANDOM = random.Random(3)
PROMPTS = [[_RANDOM.randrange(5, 199) for _ in range(length)] for length in (3, 17, 40, 110, 64, 33, 1, 75)]
PARAMS = [
    SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=3)
    for i in range(len(PROMPTS))
]
Answer = list[tuple[int, list[tuple[int, float]]]]
"""of each token: it, and the log-probabilities of the likeliest"""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def serve(path: Path, batches: Sequence[Sequence[int]], rounds: int = 1, **settings: Any) -> tuple[list[Answer], Any]:
    """Answers to the prompts at the places of each batch, which are asked together; and statistics."""
    options: dict[str, Any] = {"device": "cpu", "compile": "none", "dtype": "bfloat16", "max_model_len": LENGTH}
    options |= {"kv_cache_memory": 1 << 26, "enable_prefix_caching": False, "batch_invariant": True, "threads": 2}
    with LLM(str(path), **(options | settings)) as llm:
        for _ in range(rounds):
            found = []
            for batch in batches:
                prompts: list[Any] = [{"prompt_token_ids": PROMPTS[i]} for i in batch]
                for output in llm.generate(prompts, [PARAMS[i] for i in batch], use_tqdm=False):
                    answer = output.outputs[0]
                    likeliest = [sorted((i, one.logprob) for i, one in each.items()) for each in answer.logprobs or ()]
                    found.append(list(zip(answer.token_ids, likeliest, strict=True)))
        return found, llm.stats()


def small_pool(path: Path, **settings: Any) -> int:
    """Bytes for little more than one sequence of full length."""
    with pytest.raises(ConfigError) as refused:
        serve(path, [], kv_cache_memory=1, **settings)
    found = re.search(r"kv_cache_memory to at least (\d+)", str(refused.value))
    assert found is not None
    return int(1.3 * int(found[1]))


def assert_invariant(path: Path, **settings: Any) -> None:
    alone, _ = serve(path, [[i] for i in range(len(PROMPTS))], **settings)
    assert all(len(answer) == TOKENS for answer in alone)
    everyone = [list(range(len(PROMPTS)))]

    def same(rounds: int = 1, **changed: Any) -> Any:
        found, stats = serve(path, everyone, rounds, **(settings | changed))
        wrong = [i for i, (one, other) in enumerate(zip(found, alone, strict=True)) if one != other]
        assert not wrong, f"{changed}: other bits in answers {wrong}"
        return stats

    same()
    same(max_num_batched_tokens=16)
    same(2, enable_prefix_caching=True)
    assert same(speculative_config=DRAFTS).drafted_tokens > 0
    pool = small_pool(path, **settings)
    same(kv_cache_memory=pool, preemption="recompute")
    same(kv_cache_memory=pool, preemption="swap", swap_space=1 << 26)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            plain = "nemotron_h" if name == "nemotron_h" else CASE_OF.get(name, name)  # whose experts are the library's
            make_model(plain).save_pretrained(made[name])
            config = json.loads((made[name] / "config.json").read_text())
            [family] = [family for family in FAMILIES if family.name == name]
            config["architectures"] = [family.architecture]
            (made[name] / "config.json").write_text(json.dumps(config))
            save_tokenizer(made[name])
        return made[name]

    return path


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        pytest.param(f.name, q, marks=() if (f.name, q) in QUICK else pytest.mark.exhaustive)
        for f in FAMILIES
        if f.causal
        for q in ("none", "int8", "int4")
    ],
)
def test_an_answers_bits_are_its_own(path_of: Callable[[str], Path], name: str, quantization: str) -> None:
    if quantization == "int4" and "amx" in load(default_cache_dir()).isas:
        with pytest.raises(ConfigError, match="batch_invariant: with AMX, weights as q4_1"):
            serve(path_of(name), [], quantization=quantization)
        return
    assert_invariant(path_of(name), quantization=quantization)


def test_compiled_and_with_an_int8_cache(path_of: Callable[[str], Path]) -> None:
    """Pieces are there before the first step: what comes before them might round otherwise."""
    assert_invariant(path_of("llama"), compile="pieces", kv_cache_dtype="int8")
    _, stats = serve(path_of("llama"), [[6]], compile="pieces", kv_cache_dtype="int8")
    assert not stats.compiling and not stats.compile_failed and stats.compiles_after_ready == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_on_a_gpu(tmp_path: Path, quantization: str) -> None:
    """As on a CPU, by graphs and compiled pieces."""
    AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, "head_dim": 64})).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert_invariant(tmp_path, device="cuda", compile="pieces", quantization=quantization)


def test_what_would_depend_on_others_is_refused(path_of: Callable[[str], Path], tmp_path: Path) -> None:
    path = path_of("llama")
    with pytest.raises(ConfigError, match=r"batch_invariant needs dtype='bfloat16'.*float32"):
        serve(path, [], dtype="float32")
    with pytest.raises(ConfigError, match=r"'reference' cannot serve.*\n.*has no sums that do not depend on the batch"):
        serve(path, [], attention_backend="reference")
    save_tiny("FlexOlmo", tmp_path / "library")
    with pytest.raises(ConfigError, match=r"batch_invariant needs a model that runs natively"):
        serve(tmp_path / "library", [])
    odd = LlamaConfig(**{**SHAPE, "intermediate_size": 95})  # which no packed matrix takes
    AutoModelForCausalLM.from_config(odd).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"batch_invariant: .* is computed by the library"):
        serve(tmp_path, [])
