"""What engines on a pretend GPU are asked, and what a CPU answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from dense_eagle import DenseEagle
from shared_natives import cache_with_natives
from tiny_families import save_tiny, save_tokenizer

from engine import LLM, SamplingParams
from engine.request import RequestOutput

VOCAB = 300
TIE_NATS = 0.06
"""log-probabilities that bf16 may put in either order: activations are rounded to 8 bits after every operation"""
HALF_TIE_NATS = 0.02
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=4)
Outputs = list[RequestOutput]


def save_models(path: Path) -> None:
    """Two layers in the smallest shape that the GPU kernels serve. In `deep` three of them, and a model and a head that
    draft for those, badly. In `experts` a mixture of them, in `chunks` a Llama 4, in `states` layers that keep
    them, in `latents` a DeepSeek V3."""
    save_model(path, layers=2, seed=3)
    deep = path / "deep"
    save_model(deep, layers=3, seed=3)
    save_model(deep / "model", layers=1, seed=4)
    config = {
        "hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "num_hidden_layers": 1, "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }  # fmt: skip
    save_experts(path / "experts")
    save_chunks(path / "chunks")
    save_states(path / "states")
    save_tiny("DeepseekV3", path / "latents", vocab_size=VOCAB)
    DenseEagle(config, torch.arange(0, VOCAB, 2)).save(deep / "head")


def save_model(path: Path, layers: int, seed: int) -> None:
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=192, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, initializer_range=0.15,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.Qwen3ForCausalLM(config).float().eval().save_pretrained(path)
    save_tokenizer(path)


def save_experts(path: Path) -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=96, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=5, num_experts_per_tok=2,
        max_position_embeddings=512, initializer_range=0.15, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.Qwen3MoeForCausalLM(config).float().eval().save_pretrained(path)
    save_tokenizer(path)


def save_chunks(path: Path) -> None:
    import transformers

    config = transformers.Llama4TextConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=64, intermediate_size_mlp=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_local_experts=3, interleave_moe_layer_step=2,
        no_rope_layers=[1, 0, 1], attention_chunk_size=24, floor_scale=8, attn_scale=0.5, max_position_embeddings=512,
        initializer_range=0.15, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.Llama4ForCausalLM(config).float().eval().save_pretrained(path)
    save_tokenizer(path)


def save_states(path: Path) -> None:
    import transformers

    config = transformers.Qwen3_5TextConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention", "linear_attention"],
        max_position_embeddings=512, initializer_range=0.15, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.Qwen3_5ForCausalLM(config).float().eval().save_pretrained(path)
    save_tokenizer(path)


def ids(seed: int, count: int) -> list[int]:
    return torch.randint(5, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [ids(i, n) for i, n in enumerate((3, 1, 16, 40, 90))]


@contextmanager
def loaded(folder: Path, **options: Any) -> Iterator[LLM]:
    settings: dict[str, Any] = {
        "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory": 1 << 20,
        "cache_dir": str(cache_with_natives(folder / "cache")),
        "dtype": "bfloat16", "compile": "none", "max_logprobs": 40, **options,
    }  # fmt: skip
    with LLM(str(folder), **settings) as llm:
        yield llm


def generate(llm: LLM, prompts: Sequence[list[int]], params: Any) -> Outputs:
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for output in outputs:
        for sample in output.outputs:
            assert sample.finish_reason in ("length", "stop"), sample.stop_reason
    assert llm.stats().kv_blocks_used == 0
    assert llm.stats().compiles_after_ready == 0
    return outputs


def tokens(outputs: Outputs) -> list[list[int]]:
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


class Oracles:
    """What a CPU says, by torch's own operations; computed once for each dtype, before a GPU is pretended."""

    def __init__(self, folder: Path, layers: float = 2) -> None:
        self._folder, self._layers = folder, layers
        self._greedy: dict[str, Outputs] = {}
        self._mixed: tuple[Outputs, Outputs] | None = None
        self._samples: Outputs | None = None

    def greedy(self, dtype: str) -> Outputs:
        if dtype not in self._greedy:
            with loaded(self._folder, device="cpu", attention_backend="reference", dtype=dtype) as llm:
                self._greedy[dtype] = generate(llm, PROMPTS, SCORED)
        return self._greedy[dtype]

    def mixed(self) -> tuple[Outputs, Outputs]:
        if self._mixed is None:
            options = exact(small_pool(self._layers))
            with loaded(self._folder, device="cpu", attention_backend="reference", **options) as llm:
                self._mixed = run_mixed(llm)
        return self._mixed

    def samples(self) -> Outputs:
        if self._samples is None:
            with loaded(self._folder, device="cpu", attention_backend="reference", **ROOMY, dtype="float32") as llm:
                self._samples = run_samples(llm)
        return self._samples


def same_but_for_ties(ours: Outputs, theirs: Outputs, tolerance: float) -> int:
    """Up to the first token that differs, log-probabilities are near (where ours are there); at it, the oracle thinks
    nearly as much of our token as of its own. Returns how many sequences differ."""
    differing = 0
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        mine, wanted = a.outputs[0], b.outputs[0]
        for at, (x, y) in enumerate(zip(mine.token_ids, wanted.token_ids, strict=True)):
            candidates = (wanted.logprobs or [])[at]
            assert x in candidates, f"sequence {i}, token {at}: {x} is not among the oracle's best, {list(candidates)}"
            gap = candidates[y].logprob - candidates[x].logprob
            assert gap <= 2 * tolerance, f"sequence {i}, token {at}: {x} is {gap:.3f} nats behind {y}"
            if mine.logprobs is not None:
                off = abs(mine.logprobs[at][x].logprob - candidates[x].logprob)
                assert off <= 3 * tolerance, f"sequence {i}, token {at}: log-probability is {off:.3f} off"
            if x != y:
                differing += 1
                break
    return differing


def small_pool(layers: float) -> dict[str, Any]:
    """16 blocks of 16 tokens."""
    return {"kv_cache_memory": int(16 * 16 * layers * 2 * 2 * 64 * 2), "max_num_batched_tokens": 32}


def exact(pool: dict[str, Any]) -> dict[str, Any]:
    """The same in float32, where matrix products of other batch sizes round alike as far as tokens can tell."""
    return pool | {"kv_cache_memory": 2 * pool["kv_cache_memory"], "dtype": "float32"}


def mixed_params() -> tuple[list[list[int]], list[SamplingParams]]:
    shared = ids(99, 33)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.9, "seed": 2, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.1, "seed": 3, "top_p": 0.8, "min_p": 0.02, "logprobs": 2},
        {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 0},
        {"temperature": 1.0, "seed": 5, "logit_bias": {7: 4.0, 9: -50.0}, "allowed_token_ids": list(range(5, 60))},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 0.9, "seed": 6, "n": 2, "top_k": 5},
        {"temperature": 1.2, "seed": 8, "min_tokens": 4, "stop_token_ids": list(range(5, 150)), "logprobs": 40},
    ]
    prompts = [[*shared[: 33 - 3 * (i % 3)], *ids(200 + i, 2 + 3 * i)] for i in range(len(kinds))]
    return prompts, [SamplingParams(**{"max_tokens": 9, "ignore_eos": True, **kind}) for kind in kinds]


def run_mixed(llm: LLM) -> tuple[Outputs, Outputs]:
    """Everything at once in too little memory, twice."""
    prompts, params = mixed_params()
    first = generate(llm, prompts, params)
    assert llm.stats().preemptions > 0 or llm.stats().drafts > 0  # who waits for what drafts hold preempts nobody
    second = generate(llm, prompts[::3], params[::3])
    assert sum(output.num_cached_tokens or 0 for output in second) > 0
    return first, second


ROOMY: dict[str, Any] = {"kv_cache_memory": 3 << 20, "max_num_seqs": 16}
"""prompts stay cached"""
SAMPLED_PROMPTS = [ids(300 + i, n) for i, n in enumerate((1, 4, 16, 17, 33, 48, 49, 70))]


def run_samples(llm: LLM) -> Outputs:
    """40 requests of 1 to 6 samples at once, whose prompts are cached but for their ends, or short: first steps have
    fewer tokens than sequences. Each kind with each prompt and each number of samples."""
    generate(llm, SAMPLED_PROMPTS, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 0.0},
        {"temperature": 1.1, "min_p": 0.02, "logit_bias": {7: 4.0}},
    ]
    prompts = [SAMPLED_PROMPTS[i % 8] for i in range(40)]
    params = [
        SamplingParams(n=1 + i // 7 % 6, seed=100 * i, max_tokens=1 + i % 3, ignore_eos=True, **kinds[i % 5])
        for i in range(40)
    ]
    outputs = generate(llm, prompts, params)
    assert [len(output.outputs) for output in outputs] == [one.n for one in params]
    cached = [output.num_cached_tokens or 0 for output in outputs]
    assert all((found > 0) == (len(prompt) > 16) for found, prompt in zip(cached, prompts, strict=True)), cached
    return outputs


def check_graphs(machine: Any, llm: LLM, graphs: str) -> None:
    assert machine.late_copies > 0
    assert (machine.captures > 0) == (machine.replays > 0) == (graphs != "none")


def check_closed(machine: Any) -> None:
    assert machine.recording is None
    assert machine.sync_debug_mode == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "runner"]
