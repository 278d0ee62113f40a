"""A model with full and sliding layers, served by the whole engine: transformers' tokens, for the KV that is seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import save_tiny

from engine import LLM, SamplingParams
from engine.kv_cache.kv_cache import KVCache

WINDOW, BLOCK, STEP, COUNT = 40, 8, 64, 24
LENGTHS = (5, 39, 40, 41, 64, 150, 333, 420)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    path = tmp_path_factory.mktemp("hybrid")
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    return path, save_tiny(
        "Qwen2", path, num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, layer_types=kinds
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [[3 + (11 * n + 7 * i * i) % 500 for i in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(model: tuple[Path, torch.nn.Module], prompts: list[list[int]]) -> list[list[int]]:
    _, module = model
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            output = module.generate(ids, max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False)  # type: ignore[operator]
            found.append(output[0, len(prompt) :].tolist())
    return found


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Blocks in use after every append."""
    used: list[int] = []
    append = KVCache.append

    def watched(self: KVCache, *args: Any) -> object:
        growth = append(self, *args)
        used.append(self.pool.num_used)
        return growth

    monkeypatch.setattr(KVCache, "append", watched)
    yield used


def open_llm(path: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": STEP,
        "kv_cache_memory": 1 << 24,
        "block_size": BLOCK,
        "compile": "none",
    }
    return LLM(str(path), **{**settings, **options})


GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, min_tokens=COUNT, ignore_eos=True, detokenize=False)


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "options",
    [{}, {"async_scheduling": True}, {"compile": "pieces"}, {"attention_backend": "reference"}],
    ids=["plain", "ahead", "pieces", "reference"],
)
def test_tokens_are_those_of_transformers(
    model: tuple[Path, torch.nn.Module], prompts: list[list[int]], expected: list[list[int]], options: dict[str, Any]
) -> None:
    with open_llm(model[0], **options) as llm:
        assert tokens_of(llm, prompts) == expected
        assert tokens_of(llm, prompts) == expected, "prefixes are found in every group"
        assert llm.stats().prefix_hit_tokens > sum(LENGTHS) / 2
        assert llm.stats().kv_blocks_used == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_they_are_the_same(
    model: tuple[Path, torch.nn.Module], prompts: list[list[int]], expected: list[list[int]], preemption: str
) -> None:
    block_bytes = 2 * BLOCK * 2 * 16 * 4
    options = {"preemption": preemption, "swap_space": 200 * block_bytes if preemption == "swap" else 0}
    short = sum(n < 160 for n in LENGTHS)
    with open_llm(model[0], max_model_len=200, max_num_seqs=32, kv_cache_memory=70 * block_bytes, **options) as llm:
        assert tokens_of(llm, prompts[:short] * 3) == expected[:short] * 3
        stats = llm.stats()
        assert stats.preemptions > 0
        # What is swapped holds together no more than the device has (paper, §4.5); beyond that it is computed again.
        least, most = (stats.preemptions // 2, stats.preemptions) if preemption == "swap" else (0, 0)
        assert least <= stats.preemptions_swapped <= most
        assert stats.host_blocks_used == stats.kv_blocks_used == 0


def test_a_sequence_holds_one_whole_table_and_three_windows(
    model: tuple[Path, torch.nn.Module], held: list[int]
) -> None:
    with open_llm(model[0]) as llm:
        tokens_of(llm, [[7 + i % 90 for i in range(400)]])
    window = -(-(WINDOW - 1) // BLOCK) + 1
    chunk = -(-(WINDOW - 1 + STEP) // BLOCK) + 1
    assert max(held) <= -(-(400 + COUNT) // BLOCK) + 3 * chunk
    assert held[-1] <= -(-(400 + COUNT) // BLOCK) + 3 * window
