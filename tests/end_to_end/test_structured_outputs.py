"""What is asked for is what comes: random schemas, several samples, beams, preempted and swapped, one step ahead,
through a core in another process; beside requests that ask for nothing."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from random_schemas import random_schema
from tiny_families import save_tiny

from engine import LLM, AsyncEngine, EngineArgs, RequestOutput, SamplingParams, StructuredOutputsParams
from engine.errors import InvalidRequestError

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("structured") / "model"
    save_tiny("Llama", path)
    return path


def args_of(model: Path, **settings: Any) -> EngineArgs:
    few: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "max_num_seqs": 24}
    return EngineArgs(model=str(model), compile="none", **{"kv_cache_memory": 8 << 20, **few, **settings})


def ends_soon(llm: LLM) -> dict[int, float]:
    """The model is random: what ends a text is made likelier."""
    return {token: 3.0 for c in '"}],0' if (token := llm._tokenizer.backend.token_to_id(c)) is not None}


def prompts(count: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [3 + (i * j + j) % 250 for j in range(1, 12 + i % 40)]} for i in range(count)]


FORMATS = jsonschema.FormatChecker()


@FORMATS.checks("date")
def is_date(text: object) -> bool:
    """The year 0 is one of RFC 3339's, but not of Python's; it has a 29th of February, as 2000."""
    try:
        return not isinstance(text, str) or bool(date.fromisoformat(re.sub("^0000", "2000", text)))
    except ValueError:
        return False


def valid(text: str, schema: dict[str, Any]) -> bool:
    return not list(jsonschema.Draft202012Validator(schema, format_checker=FORMATS).iter_errors(json.loads(text)))


ENGINES = [
    pytest.param(1, False, "recompute", id="lockstep, recomputed"),
    pytest.param(2, True, "swap", id="ahead, swapped"),
    pytest.param(3, False, "swap", id="lockstep, swapped", marks=pytest.mark.exhaustive),
    pytest.param(4, True, "recompute", id="ahead, recomputed", marks=pytest.mark.exhaustive),
]
"""each has schemas of its own, by a seed: 1120 of them, if exhaustive"""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("seed", "ahead", "preemption"), ENGINES)
def test_every_output_is_valid(
    model: Path,
    pytestconfig: pytest.Config,
    record_testsuite_property: Callable[[str, object], None],
    seed: int,
    ahead: bool,
    preemption: str,
) -> None:
    count, rng = 320 if pytestconfig.getoption("exhaustive") else 40, random.Random(seed)
    schemas: list[dict[str, Any] | None] = [random_schema(rng) if i % 8 else None for i in range(count)]
    settings: Any = {
        "kv_cache_memory": 1 << 20, "swap_space": 8 << 20, "preemption": preemption, "async_scheduling": ahead,
    }  # fmt: skip
    with LLM.from_args(args_of(model, **settings)) as llm:
        bias = ends_soon(llm)
        params = [
            SamplingParams(
                n=3,
                seed=i,
                max_tokens=200,
                logit_bias=bias,
                structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
            )
            for i, schema in enumerate(schemas)
        ]
        outputs = llm.generate(prompts(count), params, use_tqdm=False)  # type: ignore[arg-type]
        stats = llm.stats()
        assert stats.preemptions > 0, "the test must force preemption"
        assert preemption == "recompute" or stats.preemptions_swapped > 0, "and swapping"
    ended = [
        (schema, sample.text)
        for schema, output in zip(schemas, outputs, strict=True)
        for sample in output.outputs
        if schema is not None and sample.finish_reason == "stop"
    ]
    assert len(ended) > 0.7 * 3 * sum(schema is not None for schema in schemas)
    assert not [o for output in outputs for o in output.outputs if o.finish_reason == "error"]
    assert [(schema, text) for schema, text in ended if not valid(text, schema)] == []
    record_testsuite_property(f"with seed {seed}", f"{len(ended)} outputs, {stats.preemptions} preemptions")


@pytest.mark.parametrize("in_process", [True, False])
def test_each_kind_in_one_batch(model: Path, in_process: bool) -> None:
    kinds = {
        "[a-c]{2,4}[0-9]": StructuredOutputsParams(regex="[a-c]{2,4}[0-9]"),
        "yes|no|perhaps": StructuredOutputsParams(choice=["yes", "no", "perhaps"]),
        "x(ab)+y": StructuredOutputsParams(grammar='root ::= "x" ("ab")+ "y"'),
        r"\{.*\}": StructuredOutputsParams(json=PERSON),
        ".*": None,
    }
    with LLM.from_args(args_of(model), in_process=in_process) as llm:
        bias = ends_soon(llm)
        params = [
            SamplingParams(n=2, max_tokens=120, logit_bias=bias, structured_outputs=s, logprobs=3)
            for s in kinds.values()
        ]
        outputs = llm.generate(prompts(len(kinds)), params, use_tqdm=False)  # type: ignore[arg-type]
        again = llm.generate(prompts(1), params[:1], use_tqdm=False)  # type: ignore[arg-type]
    for pattern, output in zip([*kinds, next(iter(kinds))], [*outputs, *again], strict=True):
        for sample in output.outputs:
            assert sample.logprobs is not None and all(at for at in sample.logprobs)
            assert all(one.logprob > float("-inf") for at in sample.logprobs for one in at.values())
            if pattern != ".*":
                assert sample.finish_reason == "stop" and re.fullmatch(pattern, sample.text, re.DOTALL)


@pytest.mark.parametrize("in_process", [True, False])
def test_the_end_of_a_grammar_is_the_end_whatever_else_is_asked_for(model: Path, in_process: bool) -> None:
    shown: Any = {"temperature": 0, "skip_special_tokens": False, "max_tokens": 40}
    with LLM.from_args(args_of(model), in_process=in_process) as llm:
        likely = dict.fromkeys((2,), 100.0)  # EOS, as soon as it may come
        params = [
            SamplingParams(**shown, **more, structured_outputs=StructuredOutputsParams(regex=pattern))
            for pattern, more in [
                ("[ab]{3,30}", {"logit_bias": likely, "ignore_eos": True}),
                ("[ab]{3,30}", {"logit_bias": likely, "ignore_eos": True, "min_tokens": 12}),
                ("[ab]{3}", {"min_tokens": 20}),
                ("[ab]{3}", {"ignore_eos": True, "min_tokens": 20}),
            ]
        ]
        outputs = llm.generate(prompts(4), params, use_tqdm=False)  # type: ignore[arg-type]
    texts = [output.outputs[0].text for output in outputs]
    assert all(re.fullmatch("[ab]*", text) for text in texts), "EOS is not shown"
    assert [len(text) for text in texts] == [3, 12, 3, 3]
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


def test_grammars_may_name_tokens(model: Path) -> None:
    with LLM.from_args(args_of(model)) as llm:
        asked = StructuredOutputsParams(grammar='start: <s> "ab" <[10-12]> "c"')
        params = SamplingParams(max_tokens=9, structured_outputs=asked)
        [output] = llm.generate(prompts(1), params, use_tqdm=False)  # type: ignore[arg-type]
        [one] = output.outputs
        vocabulary = llm._tokenizer.backend.get_vocab()
        a, b, c = (vocabulary[letter] for letter in "abc")
        assert one.token_ids[:3] == [1, a, b] and one.token_ids[3] in (10, 11, 12) and one.token_ids[4:] == [c]
        assert one.finish_reason == "stop"


def test_beams_are_outputs_of_the_grammar_best_first(model: Path) -> None:
    with LLM.from_args(args_of(model)) as llm:
        params = SamplingParams(
            use_beam_search=True,
            n=3,
            temperature=0,
            max_tokens=60,
            structured_outputs=StructuredOutputsParams(json=PERSON),
        )
        free = SamplingParams(use_beam_search=True, n=3, temperature=0, max_tokens=60)
        constrained, _ = llm.generate(prompts(2), [params, free], use_tqdm=False)  # type: ignore[arg-type]
    scores = [one.score for one in constrained.outputs]
    assert scores == sorted(scores, key=lambda score: -(score or 0)) and len({o.text for o in constrained.outputs}) == 3
    for one in constrained.outputs:
        assert one.finish_reason == "stop"
        jsonschema.validate(json.loads(one.text), PERSON)


def test_ahead_and_in_lockstep_the_same_tokens(model: Path) -> None:
    def run(ahead: bool) -> list[list[list[int]]]:
        structured = [StructuredOutputsParams(json=PERSON), None, StructuredOutputsParams(regex="[a-z ]{5,30}")]
        with LLM.from_args(args_of(model, async_scheduling=ahead)) as llm:
            params = [
                SamplingParams(n=2, seed=i, max_tokens=50, structured_outputs=s) for i, s in enumerate(structured)
            ]
            outputs = llm.generate(prompts(3), params, use_tqdm=False)  # type: ignore[arg-type]
        return [[list(one.token_ids) for one in output.outputs] for output in outputs]

    assert run(True) == run(False)


def test_what_is_refused_is_refused_before_anything_runs(model: Path) -> None:
    with LLM.from_args(args_of(model)) as llm:
        wrong = SamplingParams(structured_outputs=StructuredOutputsParams(json={"not": {}}))
        with pytest.raises(InvalidRequestError, match="not"):
            llm.generate(["a", "b"], [SamplingParams(), wrong], use_tqdm=False)
        assert llm.stats().steps == 0


def test_streams_with_a_grammar_beside_others_and_those_who_leave(model: Path) -> None:
    async def go() -> tuple[RequestOutput, RequestOutput]:
        engine = AsyncEngine.from_args(args_of(model))

        async def last(structured: StructuredOutputsParams | None, stop_after: int = 0) -> RequestOutput:
            params = SamplingParams(max_tokens=100, seed=3, structured_outputs=structured)
            seen: list[RequestOutput] = []
            async for output in engine.generate(prompts(1)[0], params):
                seen.append(output)
                if len(seen) == stop_after:
                    break
            return seen[-1]

        try:
            leaving = [last(StructuredOutputsParams(json=PERSON), 2) for _ in range(3)]
            free, constrained, *_ = await asyncio.gather(
                last(None), last(StructuredOutputsParams(regex="[a-z]{9}")), *leaving
            )
            with pytest.raises(InvalidRequestError):
                await last(StructuredOutputsParams(regex="(("))
            return free, constrained
        finally:
            await engine.shutdown()

    free, constrained = asyncio.run(go())
    assert free.outputs[0].finish_reason == "length"
    assert re.fullmatch("[a-z]{9}", constrained.outputs[0].text)


def test_what_a_lenient_grammar_passes_over_is_validated(model: Path) -> None:
    """The schema cannot be kept: all three are the same, and are to differ."""
    schema = {"type": "array", "items": {"const": 7}, "minItems": 3, "maxItems": 3, "uniqueItems": True}
    params = SamplingParams(
        max_tokens=60, n=2, structured_outputs=StructuredOutputsParams(json=schema, strict=False), seed=1
    )
    with LLM.from_args(args_of(model)) as llm:
        with pytest.raises(InvalidRequestError, match="uniqueItems"):
            llm.generate(prompts(1), SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
        [output] = llm.generate(prompts(1), params, use_tqdm=False)
    assert ["non-unique" in (one.schema_error or "") for one in output.outputs] == [True, True]

    async def streamed(delta: bool) -> list[str]:
        async with AsyncEngine.from_args(args_of(model)) as engine:
            parts = [
                one async for output in engine.generate(prompts(1)[0], params, delta=delta) for one in output.outputs
            ]
        said = {(one.index, one.schema_error) for one in parts if one.finished}
        assert all(one.schema_error is None for one in parts if not one.finished)
        return [error or "" for _, error in sorted(said)]

    for delta in (True, False):
        assert asyncio.run(streamed(delta)) == [one.schema_error for one in output.outputs]
