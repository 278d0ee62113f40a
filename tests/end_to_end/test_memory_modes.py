"""64 mixed requests (greedy, sampled, n of a prompt, beams, shared prefixes) get the same tokens however short memory
is and however preempted sequences come back. Models: one with full attention, one with sliding layers beside it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tiny_families import save_tiny

from engine import LLM, SamplingParams
from engine.core.wire import CoreStats
from engine.kv_cache.kv_cache import KVCache

BLOCK, MAX_LEN = 16, 320
BLOCK_BYTES = {"Llama": 2 * BLOCK * 2 * 16 * 4 * 3, "Qwen2": 2 * BLOCK * 2 * 16 * 4}
"""keys and values of the layers of a group"""
AMPLE = 1 << 26
HYBRID = {
    "use_sliding_window": True,
    "sliding_window": 60,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}

Answer = list[list[int]]


def work() -> tuple[list[dict[str, list[int]]], list[SamplingParams]]:
    rng = random.Random(5)
    heads = [[rng.randrange(3, 500) for _ in range(n)] for n in (0, 0, 40, 96, 130)]
    prompts, params = [], []
    for i in range(64):
        prompts.append({"prompt_token_ids": rng.choice(heads) + [rng.randrange(3, 500) for _ in range(3 + i)]})
        kind = rng.choice(["greedy", "greedy", "sampled", "n", "beams"])
        options: dict[str, Any] = {"temperature": 0.0}
        if kind == "sampled":
            options = {"temperature": 0.8, "top_p": 0.9, "seed": i}
        elif kind == "n":
            options = {"temperature": 1.0, "n": 3, "seed": i}
        elif kind == "beams":
            options = {"temperature": 0.0, "n": 2, "best_of": 4, "use_beam_search": True}
        params.append(SamplingParams(max_tokens=rng.randrange(8, 48), ignore_eos=True, detokenize=False, **options))
    return prompts, params


def serve(path: Path, **options: Any) -> tuple[list[Answer], CoreStats]:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": MAX_LEN,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 128,
        "block_size": BLOCK,
        "compile": "none",
    }
    prompts, params = work()
    with LLM(str(path), **{**settings, **options}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    assert stats.kv_blocks_used == stats.host_blocks_used == stats.running == stats.waiting == 0
    return [[choice.token_ids for choice in output.outputs] for output in outputs], stats


@pytest.fixture(scope="module", params=["Llama", "Qwen2"])
def ample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer], int]:
    """The model, what it answers with ample memory, and 15 % of the bytes that it needed for that."""
    path = tmp_path_factory.mktemp(request.param)
    save_tiny(request.param, path, **(HYBRID if request.param == "Qwen2" else {}))
    most = 0
    append = KVCache.append

    def watched(self: KVCache, *args: Any) -> object:
        nonlocal most
        growth = append(self, *args)
        most = max(most, self.pool.num_used)
        return growth

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "append", watched)
        answers, stats = serve(path, kv_cache_memory=AMPLE)
    assert stats.preemptions == 0
    return path, answers, int(0.15 * most) * BLOCK_BYTES[request.param]


@pytest.mark.pairwise
@pytest.mark.parametrize("ahead", [False, True], ids=["lockstep", "ahead"])
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
def test_tokens_do_not_depend_on_memory(ample: tuple[Path, list[Answer], int], preemption: str, ahead: bool) -> None:
    path, answers, pool = ample
    swap_space = 0 if preemption == "recompute" else AMPLE
    found, stats = serve(
        path, kv_cache_memory=pool, swap_space=swap_space, preemption=preemption, async_scheduling=ahead
    )
    assert stats.preemptions > 0
    if preemption == "recompute":
        assert stats.preemptions_swapped == 0
    elif preemption == "swap":
        assert stats.preemptions_swapped >= 0.5 * stats.preemptions and stats.blocks_swapped_in > 0
    assert found == answers
