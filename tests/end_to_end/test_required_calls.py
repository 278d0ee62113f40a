"""Calls that are required of a model that knows nothing of tools, at temperature 1: each is one that can be made."""

from __future__ import annotations

import json
from collections import Counter

import jsonschema
import pytest
from smollm2 import smollm2_path

from engine import LLM, SamplingParams
from engine.dialects.answers import AnswerReader, read_whole, response_template
from engine.dialects.families import DIALECTS
from engine.dialects.grammar import calls_grammar
from engine.grammars.language import WHITESPACE
from engine.grammars.marks import PLAIN
from engine.request import StructuredOutputsParams

PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "zone": {"type": "integer", "minimum": -12, "maximum": 14},
    },
    "required": ["name"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"enum": ["metric", "imperial"]},
        "hourly": {"type": "boolean"},
        "near": {"type": "array", "items": PLACE, "maxItems": 2},
    },
    "required": ["city", "units"],
    "additionalProperties": False,
}
NOTE = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "lines": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["title", "lines"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in (("get_weather", WEATHER), ("write_note", NOTE))
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
TOKENS = 500


@pytest.mark.parametrize("choice", ["required", pytest.param("named", marks=pytest.mark.exhaustive)])
def test_required_calls_are_valid(choice: str, request: pytest.FixtureRequest) -> None:
    samples, together = (1_000, 50) if request.config.getoption("--exhaustive") else (16, 16)
    tools = TOOLS if choice == "required" else TOOLS[:1]
    dialect = DIALECTS["hermes"]
    assert dialect.form is not None
    grammar = calls_grammar(dialect.form, tools, PLAIN, required=True, parallel=False, whitespace=WHITESPACE)
    llm = LLM(smollm2_path(), compile="none", max_model_len=1024)
    found: Counter[str] = Counter()
    try:
        for first in range(0, samples, together):
            params = SamplingParams(
                temperature=1.0,
                seed=first,
                n=together,
                max_tokens=TOKENS,
                structured_outputs=StructuredOutputsParams(grammar=grammar),
            )
            chat = [{"role": "user", "content": f"Note {first}: what is the weather in Paris? Write it down."}]
            (output,) = llm.chat([chat], params, tools=TOOLS, use_tqdm=False)
            for sample in output.outputs:
                assert sample.finish_reason == "stop", sample.text
                reader = AnswerReader(dialect, response_template(dialect, with_calls=True), tools=TOOLS)
                content, _, calls = read_whole(reader, sample.text)
                assert content == "" and len(calls) == 1, sample.text
                jsonschema.validate(json.loads(calls[0].arguments), SCHEMAS[calls[0].name])
                found[calls[0].name] += 1
    finally:
        llm.shutdown()
    assert sum(found.values()) == samples and set(found) == {tool["function"]["name"] for tool in tools}
