"""Requests that choose xgrammar, where it is installed: random schemas, several samples, preempted and swapped, beside
llguidance's and those that ask for nothing."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from random_schemas import random_schema
from test_structured_outputs import args_of, ends_soon, prompts, valid
from tiny_families import save_tiny

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.errors import InvalidRequestError

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("xgrammar") / "model"
    save_tiny("Llama", path)
    return path


@pytest.mark.parametrize(("ahead", "preemption"), [(False, "recompute"), (True, "swap")])
def test_every_output_is_valid(model: Path, pytestconfig: pytest.Config, ahead: bool, preemption: str) -> None:
    rng = random.Random(5 + ahead)
    schemas = [random_schema(rng) for _ in range(400 if pytestconfig.getoption("exhaustive") else 40)]
    settings: Any = {
        "kv_cache_memory": 1 << 20, "swap_space": 8 << 20, "preemption": preemption, "async_scheduling": ahead,
    }  # fmt: skip
    with LLM.from_args(args_of(model, **settings)) as llm:
        asked: list[tuple[dict[str, Any] | None, SamplingParams]] = []
        for seed, schema in enumerate(schemas):
            backend: Any = "llguidance" if seed % 5 == 0 else "xgrammar"
            structured = StructuredOutputsParams(json=schema, backend=backend)
            try:
                llm._session.grammars.check(structured)
            except InvalidRequestError as error:
                assert backend == "xgrammar" and "xgrammar' does not know" in str(error)
                continue
            params = SamplingParams(
                n=3, seed=seed, max_tokens=200, logit_bias=ends_soon(llm), structured_outputs=structured
            )
            asked.append((schema, params))
            if seed % 8 == 0:
                asked.append((None, SamplingParams(seed=seed, max_tokens=200)))
        assert len(asked) > 0.8 * len(schemas)
        outputs = llm.generate(prompts(len(asked)), [params for _, params in asked], use_tqdm=False)  # type: ignore[arg-type]
        assert llm.stats().preemptions > 0, "the test must force preemption"
    samples = [(schema, one) for (schema, _), output in zip(asked, outputs, strict=True) for one in output.outputs]
    assert not [one for _, one in samples if one.finish_reason == "error"]
    ended = [(schema, one.text) for schema, one in samples if schema is not None and one.finish_reason == "stop"]
    assert len(ended) > 0.7 * 3 * sum(schema is not None for schema, _ in asked)
    # Its strings may hold bytes that are no UTF-8, which a random model tries: each shows as a character.
    ended = [(schema, text) for schema, text in ended if "\ufffd" not in text]
    assert len(ended) > len(asked)
    wrong = [(schema, text) for schema, text in ended if not valid(text, schema)]
    assert wrong == []


def test_each_kind_in_one_batch_and_beams(model: Path) -> None:
    person = {
        "type": "object",
        "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,8}$"}},
        "required": ["name"],
    }
    kinds: dict[str, dict[str, Any]] = {
        "[a-c]{2,4}[0-9]": {"regex": "[a-c]{2,4}[0-9]"},
        "yes|no|perhaps": {"choice": ["yes", "no", "perhaps"]},
        "x(ab)+y": {"grammar": 'root ::= "x" ("ab")+ "y"'},
        r"\{.*\}": {"json": person, "disable_additional_properties": True},
    }
    with LLM.from_args(args_of(model)) as llm:
        params = [
            SamplingParams(
                n=2,
                max_tokens=120,
                logit_bias=ends_soon(llm),
                structured_outputs=StructuredOutputsParams(**fields, backend="xgrammar"),
            )
            for fields in kinds.values()
        ]
        search = SamplingParams(
            use_beam_search=True,
            n=3,
            temperature=0,
            max_tokens=60,
            structured_outputs=StructuredOutputsParams(
                json=person,
                disable_additional_properties=True,
                disable_any_whitespace=True,
                backend="xgrammar",
            ),
        )
        *outputs, beams = llm.generate(prompts(5), [*params, search], use_tqdm=False)  # type: ignore[arg-type]
    for pattern, output in zip(kinds, outputs, strict=True):
        for one in output.outputs:
            assert one.finish_reason == "stop" and re.fullmatch(pattern, one.text, re.DOTALL)
    assert len({one.text for one in beams.outputs}) == 3
    assert all(set(json.loads(one.text)) == {"name"} for one in beams.outputs if one.finish_reason == "stop")
    assert any(one.finish_reason == "stop" for one in beams.outputs)
