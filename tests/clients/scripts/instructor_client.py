"""instructor in every mode that its OpenAI and Anthropic providers know for these routes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Literal

import anthropic
import instructor
import openai
from checks import Checks
from instructor import Mode
from pydantic import BaseModel

checks = Checks()
client = openai.OpenAI(base_url=f"{checks.base}/v1", api_key="none", max_retries=0)
of_anthropics = anthropic.Anthropic(base_url=checks.base, api_key="none", max_retries=0)
QUESTION = 'Which city is the capital of France? Answer with JSON like {"city": "Paris", "sunny": true}'
ASKED = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200, "max_retries": 0}
OPENAIS = ("TOOLS", "TOOLS_STRICT", "FUNCTIONS", "PARALLEL_TOOLS", "JSON", "MD_JSON", "JSON_SCHEMA", "JSON_O1")
RESPONSES = ("RESPONSES_TOOLS",)
ANTHROPICS = ("ANTHROPIC_TOOLS", "ANTHROPIC_REASONING_TOOLS", "ANTHROPIC_JSON")


BLOCK = r'```json\n\{"city": "(Paris|Rome)", "sunny": (true|false)\}\n```'
"""What a small model would not write by itself: these modes only ask for it."""


class Place(BaseModel):
    """A city to go to."""

    city: Literal["Paris", "Rome"]
    sunny: bool


FORM = {"type": "json_schema", "schema": Place.model_json_schema()}
ONE_CALL = {"tool_choice": "required", "parallel_tool_calls": False}
"""a small model would go on calling"""
HELD = {
    "MD_JSON": {"extra_body": {"guided_regex": BLOCK}},
    "ANTHROPIC_JSON": {"extra_body": {"output_config": {"format": FORM}}},
}


def in_mode(name: str) -> Callable[[], None]:
    def check() -> None:
        mode = Mode[name]
        if name in ANTHROPICS:
            made = instructor.from_anthropic(of_anthropics, mode=mode).create(
                model=checks.model, response_model=Place, **ASKED, **HELD.get(name, {})
            )
        elif name == "PARALLEL_TOOLS":
            made = next(
                iter(
                    instructor.from_openai(client, mode=mode).create(
                        model=checks.model, response_model=Iterable[Place], extra_body=ONE_CALL, **ASKED
                    )
                )
            )
        else:
            made = instructor.from_openai(client, mode=mode).create(
                model=checks.model, response_model=Place, **ASKED, **HELD.get(name, {})
            )
        assert isinstance(made, Place), made

    check.__name__ = name.lower()
    return check


def partial() -> None:
    """Streamed: the object grows."""
    stream = instructor.from_openai(client, mode=Mode.TOOLS).create_partial(
        model=checks.model, response_model=Place, **ASKED
    )
    assert list(stream)[-1].city in ("Paris", "Rome")


checks.run(*(in_mode(name) for name in (*OPENAIS, *RESPONSES, *ANTHROPICS) if name in Mode.__members__), partial)
checks.tell(version("instructor"))
