"""Drafts of models whose layers keep states: the same tokens as without, whatever becomes of a row between steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from test_beam_search import open_llm
from test_state_layers import FAMILIES
from tiny_families import save_tiny

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.errors import UnsupportedModelError
from engine.step_costs import StepCosts

PIECE = [5 + (11 * i) % 90 for i in range(40)]
PROMPTS = [[*PIECE[: 7 * i % 41], *([17 + i, 30, 41, 30] * 3)[: 3 + i % 9]] for i in range(12)]
"""Some begin alike, all with something to repeat."""
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_k": 3},
    {"n": 4, "temperature": 0.7},
    {"structured_outputs": StructuredOutputsParams(regex=r"(yes|no)\|no answer\|[ab]{3,12}\|(yes|no)")},
    {"use_beam_search": True, "best_of": 2, "seed": None},
    {"n": 4},
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}
CROWDED = {"max_num_batched_tokens": 40, "swap_space": 1 << 24}


class Subject:
    def __init__(self, family: str, path: Path) -> None:
        save_tiny(family, path / "target", **FAMILIES[family])
        self.path, self.draft = path / "target", path / "draft"
        self.small = 3 << 16 if family == "GraniteMoeHybrid" else 1 << 17
        """bytes, for little more than one sequence"""
        self.expected, _ = self.run(num_speculative_tokens=0)

    def run(self, settings: dict[str, Any] | None = None, **drafts: Any) -> tuple[list[list[list[int]]], Any]:
        params = [
            SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "seed": index, "ignore_eos": True, **kind})
            for index, kind in zip(range(len(PROMPTS)), cycle(KINDS))
        ]
        with open_llm(self.path, speculative_config=drafts, **settings or {}) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
            stats = llm.stats()
        assert stats.kv_blocks_used == 0
        return [[one.token_ids for one in output.outputs] for output in outputs], stats


ONE = "Qwen3_5"
"""all have a row in `test_models_table.py`"""


@pytest.fixture(
    scope="module",
    params=[each if each == ONE else pytest.param(each, marks=pytest.mark.exhaustive) for each in FAMILIES],
)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine is busy with meanwhile."""
    monkeypatch.setattr(StepCosts, "relative", lambda self: (0.95, 0.05))


@pytest.fixture(params=["native", pytest.param("torch", marks=pytest.mark.exhaustive)])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "torch":
        monkeypatch.setattr("engine.runner.loading._compute_states_natively", lambda model, config: None)
    yield


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize(
    "preemption",
    ["swap", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (None, "recompute"))],
)
def test_the_same_tokens_with_drafts_by_prompt_lookup(subject: Subject, preemption: str | None) -> None:
    settings = {} if preemption is None else {**CROWDED, "preemption": preemption, "kv_cache_memory": subject.small}
    found, stats = subject.run(settings, **NGRAM)
    assert found == subject.expected
    assert stats.drafted_tokens > stats.accepted_tokens > 5
    assert (stats.preemptions > 0) == (preemption is not None)
    assert (stats.preemptions_swapped > 0) == (preemption == "swap")


@pytest.mark.usefixtures("computed_by")
@pytest.mark.exhaustive
@pytest.mark.parametrize("preemption", [None, "swap"])
def test_the_same_tokens_with_a_draft_model(subject: Subject, preemption: str | None) -> None:
    save_tiny("Llama", subject.draft, num_hidden_layers=1)
    settings = {} if preemption is None else {**CROWDED, "preemption": preemption, "kv_cache_memory": 1 << 18}
    found, stats = subject.run(settings, method="draft_model", model=str(subject.draft), num_speculative_tokens=3)
    assert found == subject.expected
    assert stats.drafted_tokens > 30 and (stats.preemptions_swapped > 0) == (preemption == "swap")


def test_what_a_grammar_forces_is_computed_at_once(subject: Subject) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex="the answer is (yes|no), ok")
    )
    with open_llm(subject.path) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PIECE}], params, use_tqdm=False)
        stats = llm.stats()
    assert output.outputs[0].text in ("the answer is yes, ok", "the answer is no, ok")
    assert stats.accepted_tokens > 10


def test_drafts_that_are_not_served_yet_are_refused_by_name(subject: Subject, tmp_path: Path) -> None:
    save_tiny("Llama", tmp_path)
    for target, method, draft in (
        (subject.path, "eagle3", tmp_path),
        (tmp_path, "draft_model", subject.path),
    ):
        with pytest.raises(UnsupportedModelError, match=r"speculative_config.*keep states"):
            LLM(str(target), device="cpu", speculative_config={"method": method, "model": str(draft)})
