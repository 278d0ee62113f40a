"""Answers as models of each dialect write them, made up at random: text, thinking, and calls."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

from engine.dialects.forms import CallForm, Dialect, Tagged

Arguments = dict[str, Any]

SCHEMAS: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "exact": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}},
    "unit": {"type": "string", "enum": ["c", "f"]},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a place",
            "parameters": {"type": "object", "properties": SCHEMAS, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    {
        "type": "function",
        "function": {
            "name": "edit_file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
                "required": ["path", "text"],
            },
        },
    },
]
_WORDS = (
    "Tokyo", "größer", "日本", "a b", "x < y", "{1}", "\"quoted\"", "it's", "back\\slash", "two\nlines", "😀", "[0]",
    "</tool_call>", "<think>", "</think>", '{"name": "now", "arguments": {}}', "[now()]", "a\\nb\tc", "1", "null",
    ", ; : =", "```json", "{{x}}", "%s \\u0041",
)  # fmt: skip


class Written(NamedTuple):
    """An answer, and what is to be read of it."""

    text: str
    content: str
    reasoning: str
    calls: list[tuple[str, Arguments]]


def answers(dialect: Dialect, count: int, seed: int) -> list[Written]:
    random_ = random.Random(f"{dialect.name} {seed}")
    return [_answer(dialect, random_) for _ in range(count)]


def _answer(dialect: Dialect, random_: random.Random) -> Written:
    form = dialect.form
    assert form is not None
    most = 3 if form.parallel else 1
    calls = [_call(random_) for _ in range(random_.randint(0, most))]
    reasoning = _prose(random_) if random_.random() < 0.5 else ""
    marked = form.begin + form.call[0]
    alone = dialect.name in ("pythonic", "llama3_json") and bool(calls)
    content = _prose(random_) if not calls or (random_.random() < 0.5 and not alone and marked) else ""
    if dialect.name == "harmony":
        return Written(_as_harmony(form, content, reasoning, calls), content, reasoning, calls)
    text = ""
    if dialect.thinking is not None and reasoning:
        text = f"{dialect.thinking[0]}\n{reasoning}\n{dialect.thinking[1]}\n\n"
    elif dialect.thinking is None:
        reasoning = ""
    if dialect.name == "pythonic":
        text = reasoning = ""
    if "response" in dialect.fields and content:
        text += f"<|START_RESPONSE|>{content}<|END_RESPONSE|>"
    else:
        text += content
    if calls:
        text += ("\n" if content else "") + written(form, calls)
    return Written(text, content, reasoning, calls)


def _as_harmony(form: CallForm, content: str, reasoning: str, calls: list[tuple[str, Arguments]]) -> str:
    parts = [f"<|channel|>analysis<|message|>{reasoning}"] if reasoning else []
    parts += [f"<|channel|>{'commentary' if calls else 'final'}<|message|>{content}"] if content else []
    parts += [written(form, calls)] if calls else []
    return "<|end|><|start|>assistant".join(parts)


def _prose(random_: random.Random) -> str:
    text = " ".join(
        random_.choice((*_WORDS[:5], "Let me see.", "1 < 2", "<b>", "a\n\nb")) for _ in range(random_.randint(1, 6))
    )
    return text.strip()


def _call(random_: random.Random) -> tuple[str, Arguments]:
    word = lambda: random_.choice(_WORDS)  # noqa: E731
    name = random_.choice(("weather", "now", "edit_file"))
    if name == "now":
        return name, {}
    if name == "edit_file":
        return name, {"path": word(), "text": " ".join(word() for _ in range(random_.randint(1, 4)))}
    values: Arguments = {
        "city": word(),
        "days": random_.randint(-3, 300),
        "share": random_.choice((0.5, -2.25, 1e-3)),
        "exact": random_.random() < 0.5,
        "tags": [word() for _ in range(random_.randint(0, 3))],
        "place": {"lat": 1.5, "name": word()},
        "unit": random_.choice("cf"),
        "note": random_.choice((None, "so")),
    }
    return name, {key: value for key, value in values.items() if key == "city" or random_.random() < 0.5}


def written(form: CallForm, calls: list[tuple[str, Arguments]], space: str = "\n") -> str:
    """`space`: what checkpoints write where the form leaves it open."""

    def filled(part: str, number: int = 0) -> str:
        places = {"{n}": str(number), "{id}": f"call{number:05}", "{and_id}": f', "id": "abc{number}"', "{s}": space}
        for place, text in places.items():
            part = part.replace(place, text)
        return part

    texts = []
    for number, (name, arguments) in enumerate(calls):
        before, middle, behind = (filled(part, number) for part in form.call)
        texts.append(before + name + middle + filled(written_arguments(form.arguments, arguments)) + behind)
    return filled(form.begin) + filled(form.between).join(texts) + filled(form.end)


def written_arguments(tagged: Tagged | None, arguments: Arguments) -> str:
    if tagged is None:
        return json.dumps(arguments, ensure_ascii=False)
    items = [
        tagged.item.replace("{key}", key)
        .replace("{text}", "true" if isinstance(value, str) else "false")
        .replace("{value}", _value(tagged, value))
        for key, value in (sorted(arguments.items()) if tagged.in_order else arguments.items())
    ]
    return tagged.joined.join(items)


def _value(tagged: Tagged, value: Any) -> str:
    if isinstance(value, str) and tagged.texts == "raw":
        return value
    if isinstance(value, str) and not isinstance(tagged.texts, str):
        return tagged.texts[0] + value + tagged.texts[0]
    if tagged.python and (value is None or isinstance(value, bool)):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
