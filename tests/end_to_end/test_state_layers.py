"""Models whose layers keep states, by the whole engine: many at once in little memory, forks, beams, compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oracle import GreedyOracle, first_difference
from test_beam_search import PROMPTS, by_transformers, open_llm, params
from tiny_families import STATE_FAMILIES as FAMILIES
from tiny_families import save_tiny

from engine import LLM, SamplingParams
from engine.errors import UnsupportedModelError

EXHAUSTIVE = ("FalconH1", "KimiLinear")
TOKENS = 20
HEAD = [5 + (11 * i) % 90 for i in range(70)]
CROWD = [HEAD[: 7 * i % 71] + PROMPTS[i % 20][: 1 + i % 30] for i in range(64)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)


class Subject:
    def __init__(self, family: str, path: Path) -> None:
        self.path = path
        self.oracle = GreedyOracle(save_tiny(family, path, **FAMILIES[family]), CROWD, TOKENS)

    def check(self, ours: list[list[int]]) -> None:
        """What follows the first of the crowd, or all of it."""
        theirs = self.oracle.tokens(guesses=[*ours, *[[]] * (len(CROWD) - len(ours))])
        assert first_difference(ours, theirs[: len(ours)]) == ""


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.exhaustive) if each in EXHAUSTIVE else each for each in FAMILIES],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(request.param, tmp_path_factory.mktemp(request.param))


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[list[int]]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert llm.stats().kv_blocks_used == 0
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_64_at_once_in_little_memory_share_heads_and_equal_each_alone(subject: Subject, preemption: str) -> None:
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 80, "kv_cache_memory": 1 << 18, "swap_space": 1 << 24}
    with open_llm(subject.path, preemption=preemption, **settings) as llm:
        ours = run(llm, CROWD, GREEDY)
        stats = llm.stats()
    subject.check([one for (one,) in ours])
    assert stats.preemptions > 0 and stats.prefix_hit_tokens > 16 * len(CROWD)
    assert (stats.preemptions_swapped > 0) == (preemption == "swap")


def test_samples_of_one_prompt_go_on_from_one_state(subject: Subject) -> None:
    greedy = SamplingParams(n=4, temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    drawn = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    with open_llm(subject.path) as llm:
        ours = run(llm, CROWD[:12], greedy)
        ample = run(llm, CROWD[:12], drawn)
    with open_llm(subject.path, max_num_batched_tokens=16, max_num_seqs=8, enable_prefix_caching=False) as llm:
        assert run(llm, CROWD[:12], drawn) == ample
    for each in zip(*ours, strict=True):
        subject.check(list(each))


def test_beams_are_those_of_transformers(subject: Subject) -> None:
    with open_llm(subject.path, max_num_batched_tokens=32) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params(4), use_tqdm=False)
        assert llm.stats().kv_blocks_used == 0
    got = [[(one.token_ids, one.score or 0.0) for one in output.outputs] for output in outputs]
    for ours, theirs in zip(got, by_transformers(subject.path, 4, 1.0, False), strict=True):
        for (ids, score), (expected, its_score) in zip(ours, theirs, strict=True):
            assert score == pytest.approx(its_score, abs=5e-4)  # recurrences carry what roundings differ by
            assert ids == expected or score == pytest.approx(its_score, abs=1e-6), "others are as likely"


@pytest.mark.exhaustive
def test_compiled_pieces_give_the_same_tokens(subject: Subject) -> None:
    with open_llm(subject.path, compile="pieces") as llm:
        llm.wait_compiled()
        subject.check([one for (one,) in run(llm, CROWD, GREEDY)])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("decode_context_parallel_size", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
        ("kv_transfer_config", {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}),
    ],
)
def test_what_is_not_served_yet_is_refused_by_name(subject: Subject, name: str, settings: dict[str, Any]) -> None:
    not_divided = "|tensor_parallel_size: .* not divided yet" if name == "decode_context_parallel_size" else ""
    with pytest.raises(UnsupportedModelError, match=f"{name}.*keep states{not_divided}"):
        open_llm(subject.path, **settings)
