"""Models whose layers keep latents, by the whole engine: in ranks, as drafts, and what they are not served with."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from oracle import GreedyOracle, first_difference
from test_beam_search import PROMPTS, open_llm
from tiny_families import save_tiny

from engine import LLM, SamplingParams
from engine.errors import UnsupportedModelError
from engine.kv_budget import kv_bytes_per_token
from engine.models.description import describe
from engine.models.sharding import Shard, divided_mixer

TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)


class Subject:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = save_tiny("DeepseekV3", path)

    @cached_property
    def oracle(self) -> GreedyOracle:
        return GreedyOracle(self.model, PROMPTS, TOKENS)

    def check(self, llm: LLM) -> None:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False)
        ours = [list(output.outputs[0].token_ids) for output in outputs]
        assert first_difference(ours, self.oracle.tokens(guesses=ours)) == ""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("latents"))


def test_a_token_keeps_one_row_in_each_layer_and_rank(subject: Subject) -> None:
    facts = describe(str(subject.path)).facts
    assert [kept.size for kept in facts.kept if kept is not None] == [16 + 8] * 2
    assert kv_bytes_per_token(facts.layers, "float32") == 2 * 24 * 4
    assert kv_bytes_per_token([divided_mixer(each, Shard(1, 2)) for each in facts.layers], "float32") == 2 * 24 * 4


@pytest.mark.exhaustive
def test_a_model_that_keeps_latents_drafts_for_itself(subject: Subject) -> None:
    drafts = {"method": "draft_model", "model": str(subject.path), "num_speculative_tokens": 3}
    with open_llm(subject.path, speculative_config=drafts) as llm:
        subject.check(llm)
        assert llm.stats().accepted_tokens > TOKENS


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_ranks_give_the_same_tokens(subject: Subject, settings: dict[str, Any]) -> None:
    with open_llm(subject.path, **settings) as llm:
        subject.check(llm)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("kv_cache_dtype", {"kv_cache_dtype": "int8", "dtype": "bfloat16"}),
        ("decode_context_parallel_size", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
    ],
)
def test_what_is_not_served_yet_is_refused_by_name(subject: Subject, name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name}.*keep latents"):
        open_llm(subject.path, **settings)
