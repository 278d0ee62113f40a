"""n samples of one prompt, served by the whole engine: the tokens of n separate requests, for the KV of one prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_families import save_tiny

from engine import LLM, SamplingParams
from engine.errors import InvalidRequestError
from engine.kv_cache.kv_cache import KVCache

N = 6
SEED = 1234
GENERATED = 40
BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama-samples")
    save_tiny("Llama", path)
    return path


def open_llm(model: Path, **options: object) -> LLM:
    settings: dict[str, object] = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 800,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "kv_cache_memory": 1 << 28,
        "block_size": BLOCK,
        "compile": "none",
        "enable_prefix_caching": False,
    }
    return LLM(str(model), **{**settings, **options})  # type: ignore[arg-type]


def params(
    seed: int | None = SEED,
    n: int = 1,
    temperature: float = 1.0,
    best_of: int | None = None,
    logprobs: int | None = None,
) -> SamplingParams:
    return SamplingParams(
        n=n,
        best_of=best_of,
        seed=seed,
        temperature=temperature,
        top_p=0.95,
        max_tokens=GENERATED,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
    )


@pytest.mark.parametrize("prompt_len", [500, 512])
@pytest.mark.parametrize("ahead", [False, True])
def test_six_samples_are_six_requests_with_the_derived_seeds(
    model: Path, prompt_len: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = {"prompt_token_ids": [5 + (7 * i * i) % 90 for i in range(prompt_len)]}
    used: list[int] = []
    append = KVCache.append

    def watched(self: KVCache, *args: object) -> object:
        growth = append(self, *args)  # type: ignore[arg-type]
        used.append(self.pool.num_used)
        return growth

    monkeypatch.setattr(KVCache, "append", watched)
    with open_llm(model, async_scheduling=ahead) as llm:
        [output] = llm.generate([prompt], params(n=N), use_tqdm=False)
        stats = llm.stats()
        assert (stats.prompt_tokens, stats.generated_tokens) == (prompt_len, N * GENERATED)
        assert used, "the core is in this process"
        one, generated = -(-(prompt_len + GENERATED - 1) // BLOCK), -(-GENERATED // BLOCK)
        assert max(used) <= one + (N - 1) * (generated + 1)
        if prompt_len == 500:
            assert max(used) == 34 + 5 * 3, "the example in engine/kv_cache/README.md"
        alone = llm.generate([prompt] * N, [params(SEED + i) for i in range(N)], use_tqdm=False)
        assert [o.token_ids for o in output.outputs] == [o.outputs[0].token_ids for o in alone]
        assert len({tuple(o.token_ids) for o in output.outputs}) == N
        assert llm.stats().kv_blocks_used == 0


def test_samples_mix_with_greedy_requests_and_survive_preemption(model: Path) -> None:
    prompts = [{"prompt_token_ids": [5 + (i * j + j) % 90 for j in range(20 + 13 * i)]} for i in range(12)]
    kinds = [params(n=1 + 3 * (i % 2), seed=i, temperature=0.0 if i % 3 == 0 else 1.0) for i in range(12)]

    def serve(**options: object) -> tuple[list[list[list[int]]], int]:
        with open_llm(model, max_model_len=320, **options) as llm:
            outputs = llm.generate(prompts, kinds, use_tqdm=False)
            stats = llm.stats()
            assert stats.kv_blocks_used == 0
            return [[o.token_ids for o in output.outputs] for output in outputs], stats.preemptions

    ample, none = serve()
    small, some = serve(kv_cache_memory=1 << 18)
    assert none == 0 and some > 0
    assert small == ample


def test_the_best_of_six_samples_by_log_probability(model: Path) -> None:
    prompt = {"prompt_token_ids": [7, 11, 13, 17]}
    with open_llm(model) as llm:
        [every] = llm.generate([prompt], params(n=N, logprobs=0), use_tqdm=False)
        [best] = llm.generate([prompt], params(n=2, best_of=N), use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda output: -(output.cumulative_logprob or 0))
    assert [output.token_ids for output in best.outputs] == [output.token_ids for output in ranked[:2]]
    assert [output.index for output in best.outputs] == [0, 1]
    assert all(output.logprobs is None for output in best.outputs)
    with pytest.raises(InvalidRequestError, match="at least n"):
        params(n=3, best_of=2)
