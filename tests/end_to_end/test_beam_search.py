"""Beam search by the whole engine: the sequences and scores of transformers' beam search, alone or among others."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from tiny_families import save_tiny

from engine import LLM, SamplingParams
from engine.errors import InvalidRequestError

STOP = list(range(40, 52))
PROMPTS = [[5 + (7 * i * j + i) % 90 for j in range(3 + 9 * i % 41)] for i in range(20)]
Found = list[tuple[list[int], float]]
"""what each returned sequence generated, and its score"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama-beams")
    save_tiny("Llama", path)
    return path


def open_llm(model: Path, **options: object) -> LLM:
    settings: dict[str, object] = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 128,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 64,
        "kv_cache_memory": 1 << 26,
        "compile": "none",
    }
    return LLM(str(model), **{**settings, **options})  # type: ignore[arg-type]


def params(
    width: int, penalty: float = 1.0, stopping: bool | Literal["never"] = False, n: int | None = None
) -> SamplingParams:
    return SamplingParams(
        n=n or width,
        best_of=width,
        use_beam_search=True,
        length_penalty=penalty,
        early_stopping=stopping,
        max_tokens=20,
        ignore_eos=True,
        stop_token_ids=STOP,
        detokenize=False,
    )


def by_transformers(model: Path, width: int, penalty: float, stopping: bool | Literal["never"]) -> list[Found]:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    every = []
    for prompt in PROMPTS:
        out = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=STOP,
            pad_token_id=0,
            length_penalty=penalty,
            early_stopping=stopping,
            return_dict_in_generate=True,
            output_scores=True,
        )
        found: Found = []
        for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(row) if token in STOP), 20)
            found.append((row[:end], score))
        every.append(found)
    return every


def assert_same(got: list[Found], want: list[Found]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert [ids for ids, _ in ours] == [ids for ids, _ in theirs]
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-4, rel=3e-6)


SEARCHES: list[tuple[int, float, bool | Literal["never"]]] = [
    (2, 1.0, False),
    (4, 1.0, False),
    (6, 1.0, False),
    (4, 1.0, True),
    (4, 2.0, "never"),
    (4, 0.0, "never"),
    (3, -1.0, False),
]


@pytest.mark.parametrize(
    ("width", "penalty", "stopping", "ahead"),
    [
        pytest.param(*search, ahead, marks=pytest.mark.exhaustive if ahead and search[0] != 6 else ())
        for search in SEARCHES
        for ahead in (False, True)
    ],
)
def test_sequences_and_scores_are_those_of_transformers(
    model: Path, width: int, penalty: float, stopping: bool | Literal["never"], ahead: bool
) -> None:
    want = by_transformers(model, width, penalty, stopping)
    assert {ids[-1] in STOP for found in want for ids, _ in found} == {True, False}, "some stop, some reach the limit"
    with open_llm(model, async_scheduling=ahead) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params(width, penalty, stopping), use_tqdm=False)
        assert llm.stats().kv_blocks_used == 0
    got = [[(o.token_ids, o.score or 0.0) for o in output.outputs] for output in outputs]
    assert_same(got, want)
    for output in outputs:
        for each in output.outputs:
            assert each.finish_reason == ("stop" if each.token_ids[-1] in STOP else "length")
            assert each.score == pytest.approx((each.cumulative_logprob or 0) / len(each.token_ids) ** penalty)


def test_searches_among_samples_and_greedy_requests_whatever_the_memory(model: Path) -> None:
    prompts = [{"prompt_token_ids": PROMPTS[i % 20] + PROMPTS[(3 * i) % 20]} for i in range(30)]
    plain = {"max_tokens": 20, "ignore_eos": True, "detokenize": False}
    kinds = [
        params(2 + i % 5, n=2)
        if i % 3 == 0
        else SamplingParams(n=1 + 2 * (i % 2), temperature=0.0 if i % 3 == 1 else 1.0, seed=i, **plain)  # type: ignore[arg-type]
        for i in range(30)
    ]

    def serve(**options: object) -> tuple[list[list[list[int]]], int]:
        with open_llm(model, **options) as llm:
            outputs = llm.generate(prompts, kinds, use_tqdm=False)
            stats = llm.stats()
            assert stats.kv_blocks_used == 0
            return [[o.token_ids for o in output.outputs] for output in outputs], stats.preemptions

    ample, none = serve()
    small, some = serve(kv_cache_memory=1 << 18)
    assert none == 0 and some > 0
    assert small == ample


def test_what_a_search_has_no_use_for_is_refused() -> None:
    for field, value in [("top_p", 0.5), ("seed", 1), ("stop", "x"), ("logprobs", 1), ("presence_penalty", 0.5)]:
        with pytest.raises(InvalidRequestError, match=f"{field} cannot be combined with use_beam_search"):
            SamplingParams(use_beam_search=True, n=2, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="temperature must be 0 or 1"):
        SamplingParams(use_beam_search=True, n=2, temperature=0.7)
    with pytest.raises(InvalidRequestError, match="early_stopping has no effect without use_beam_search"):
        SamplingParams(n=2, early_stopping=True)
