"""Drafts on real weights: the same tokens with and without them, whatever stands beside them in the batch."""

from __future__ import annotations

import random
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from smollm2 import smollm2_path

from engine import LLM, EngineArgs, RequestOutput, SamplingParams, StructuredOutputsParams
from engine.errors import ConfigError
from engine.step_costs import StepCosts

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name_of_the_animal": {"type": "string", "maxLength": 9},
        "number_of_legs": {"enum": [0, 2, 4, 6, 8]},
    },
    "required": ["name_of_the_animal", "number_of_legs"],
    "additionalProperties": False,
}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"logprobs": 2},
    {"temperature": 0.8, "top_p": 0.9, "n": 2},
    {"stop": ["the"]},
    {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"structured_outputs": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)},
    {"temperature": 1.0, "top_k": 20, "bad_words": ["cat", "the cat"]},
    {"use_beam_search": True, "best_of": 2, "seed": None},
    {"prompt_logprobs": 1},
    # It is over among right drafts, and behind them nothing is allowed.
    {"structured_outputs": StructuredOutputsParams(regex=r"no\|no\|no\|no"), "min_tokens": 20},
)
# With AMX, tiles multiply where 12 rows share a part of the KV cache, and round differently: with three heads for each
# KV head those of three drafts and the token before them.
DRAFTS = 2 if "amx_bf16" in Path("/proc/cpuinfo").read_text() else 8


def prompts(count: int) -> list[str]:
    """Texts with something to repeat."""
    rng, words = random.Random(3), ("one", "cat", "two", "dogs", "saw", "the", "red", "house", "and", "ran", "again")
    texts = [" ".join(rng.choice(words) for _ in range(rng.randint(3, 12))) for _ in range(count)]
    return [f"{text}. {text}. {text[: len(text) // 2]}" for text in texts]


def outputs(count: int, **settings: Any) -> list[RequestOutput]:
    params = [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "seed": index, **kind})
        for index, kind in zip(range(count), cycle(KINDS))
    ]
    args = EngineArgs(
        model=str(smollm2_path()), quantization="none", device="cpu", max_model_len=512, max_num_seqs=12, **settings
    )
    with LLM.from_args(args) as llm:
        found = llm.generate(prompts(count), params, use_tqdm=False)
        if "method" in args.speculative_config:
            stats = llm.stats()
            assert stats.drafted_tokens > stats.accepted_tokens > 100
            assert sum(output.num_accepted_tokens for output in found) >= stats.accepted_tokens - count
    return found


@pytest.fixture(autouse=True)
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is busy with meanwhile."""
    monkeypatch.setattr(StepCosts, "relative", lambda self: (0.95, 0.05))


SMALL: dict[str, Any] = {"kv_cache_memory": 24 << 20, "compile": "none"}


@pytest.fixture(scope="module")
def plain(pytestconfig: pytest.Config) -> list[RequestOutput]:
    count = 2000 if pytestconfig.getoption("exhaustive") else 24
    return outputs(count, **SMALL, speculative_config={"num_speculative_tokens": 0})


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("method", "ahead"),
    [pytest.param("ngram", False, marks=pytest.mark.exhaustive), ("ngram", True), ("suffix", False)],
)
def test_the_same_tokens_with_and_without_drafts(plain: list[RequestOutput], method: str, ahead: bool) -> None:
    speculation = {"method": method, "num_speculative_tokens": DRAFTS}
    drafted = outputs(len(plain), **SMALL, speculative_config=speculation, async_scheduling=ahead)
    for one, other in zip(plain, drafted, strict=True):
        assert [(o.text, o.token_ids, o.finish_reason) for o in one.outputs] == [
            (o.text, o.token_ids, o.finish_reason) for o in other.outputs
        ]
        assert [o.logprobs for o in one.outputs] == [o.logprobs for o in other.outputs]
        assert one.prompt_logprobs == other.prompt_logprobs
        assert one.num_accepted_tokens == 0


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"method": "eagle"}, "method"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 6}, "prompt_lookup_min .6. exceeds"),
        ({"tree": "x"}, "unknown field `tree`"),
        ({"model": "x"}, "method None takes no model"),
        ({"method": "eagle3"}, "method .eagle3. takes a model"),
    ],
)
def test_what_cannot_be_is_refused_by_name(config: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config.*{says}"):
        LLM(str(smollm2_path()), speculative_config=config)
