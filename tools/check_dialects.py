"""Real chat templates against the dialects: ``python tools/check_dialects.py FOLDER [--show NAME] [--count 50]``.

Each ``*.jinja`` in the folder that knows tools writes made-up calls; what it wrote as the assistant's part is read back
and held to the grammar of required calls. A line each: the dialect that was recognised, how many conversations came
back as they were, how many texts of calls the grammar takes. What a template refuses to write is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from llguidance import LLMatcher, LLTokenizer

from engine.dialects.answers import AnswerReader, read_whole, response_template
from engine.dialects.forms import Dialect
from engine.dialects.grammar import calls_grammar
from engine.dialects.resolve import dialect_of
from engine.errors import ConfigError, InvalidRequestError
from engine.frontend.chat_template import render
from engine.frontend.told_tools import knows_tools
from engine.grammars.language import WHITESPACE, grammar_of
from engine.grammars.marks import PLAIN
from engine.request import StructuredOutputsParams

_PLACE = {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}}
_PARAMETERS: dict[str, Any] = {
    "city": {"type": "string", "description": "where"},
    "days": {"type": "integer", "description": "how many"},
    "exact": {"type": "boolean", "description": "whether"},
    "tags": {"type": "array", "items": {"type": "string"}, "description": "which"},
    "place": {**_PLACE, "description": "what"},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "does it",
            "parameters": {"type": "object", "properties": properties, "required": list(properties)[:1]},
        },
    }
    for name, properties in (("get_weather", _PARAMETERS), ("now", {}))
]
_TEXTS = (
    "Tokyo",
    "größer 日本 😀",
    "x < y && y > z",
    'a "quoted" word, it\'s',
    "two\nlines\n\tand a tab",
    "back\\slash \\n {1} [0] {{x}}",
    "</tool_call> ] } <b>",
    "1",
    "true",
    "  padded  ",
    "a,b:c;d",
    "",
)
_TURN_END = re.compile(r"\s*(?:<[^<>\s]{2,40}>|\[e~\[|<\|start_header_id\|>assistant<\|end_header_id\|>)?\s*\Z")

Arguments = dict[str, Any]


class Conversation(NamedTuple):
    content: str
    reasoning: str
    calls: list[tuple[str, Arguments]]


class Tally:
    def __init__(self) -> None:
        self.written = self.read = self.taken = self.judged = 0
        self.wrong: list[str] = []
        self.refused = ""


def conversation(random_: random.Random, most: int) -> Conversation:
    def call() -> tuple[str, Arguments]:
        if random_.random() < 0.25:
            return "now", {}
        values: Arguments = {
            "city": random_.choice(_TEXTS),
            "days": random_.randint(-3, 300),
            "exact": random_.random() < 0.5,
            "tags": [random_.choice(_TEXTS) for _ in range(random_.randint(0, 2))],
            "place": {"lat": 1.5, "name": random_.choice(_TEXTS)},
        }
        return "get_weather", {k: v for k, v in values.items() if k == "city" or random_.random() < 0.5}

    said = random_.choice(("", "", "Let me see.\nOne < two.")), random_.choice(("", "", "So, what\ndid they say?"))
    return Conversation(*said, [call() for _ in range(random_.randint(1, most))])


def written(template: str, talk: Conversation, dialect: Dialect, *, texts: bool) -> tuple[str, str]:
    """(the prompt, what an assistant would write behind it). `texts`: arguments are given as JSON text."""
    calls = [
        {
            "id": f"functions.{name_}:{number}" if "argument_begin" in template else f"abcdef{number:03}",
            "type": "function",
            "function": {"name": name_, "arguments": json.dumps(a, ensure_ascii=False) if texts else a},
        }
        for number, (name_, a) in enumerate(talk.calls)
    ]
    said: dict[str, Any] = {"role": "assistant", "content": talk.content, "tool_calls": calls}
    if talk.reasoning:
        said["reasoning_content"] = talk.reasoning
    asked = [{"role": "user", "content": "Please."}]
    variables = {"bos_token": "", "eos_token": "</s>", "enable_thinking": True, "thinking": True}

    def rendered(messages: list[dict[str, Any]], prompt: bool) -> str:
        return render(
            template, messages, tools=TOOLS, add_generation_prompt=prompt, continue_final_message=False,
            variables=variables,
        )  # fmt: skip

    prompt, whole = rendered(asked, True), rendered([*asked, said], False)
    # What the prompt begins of thinking, and a history leaves out or has otherwise, is not the assistant's.
    shared = next((i for i, (a, b) in enumerate(zip(prompt, whole)) if a != b), min(len(prompt), len(whole)))
    if (mark := prompt.rfind("<", 0, shared)) > prompt.rfind(">", 0, shared) and "\n" not in prompt[mark:shared]:
        shared = mark
    return prompt, without_ends(whole[shared:], dialect)


def without_ends(text: str, dialect: Dialect) -> str:
    """Without what ends a turn: marks that say nothing of calls."""
    own = f"{dialect.fields} {dialect.form}"
    while True:
        cut = _TURN_END.sub("", text)
        mark = text[len(cut) :].strip()
        if cut == text or (mark and mark in own.replace("\\", "")):
            return text
        text = cut


def check(template: str, dialect: Dialect, count: int) -> Tally:
    tally = Tally()
    random_ = random.Random(0)
    form = dialect.form
    grammar = None
    if form is not None:
        lark = calls_grammar(form, TOOLS, PLAIN, required=True, parallel=True, whitespace=WHITESPACE)
        grammar = grammar_of(StructuredOutputsParams(grammar=lark))
    fields = response_template(dialect, with_calls=True)
    for _ in range(count):
        talk = conversation(random_, 3 if form is None or form.parallel else 1)
        text = prompt = None
        for texts in (False, True):
            try:
                prompt, text = written(template, talk, dialect, texts=texts)
                break
            except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
                tally.refused = f"{'texts' if texts else 'objects'}: {type(error).__name__}: {str(error)[:90]}"
        if text is None or prompt is None or not all(name in text for name, _ in talk.calls):
            tally.refused = tally.refused or "writes no calls"
            continue
        tally.written += 1
        if differs := difference(dialect, fields, prompt, text, talk):
            tally.wrong.append(f"{differs}\n    of {text!r}")
        else:
            tally.read += 1
        if grammar is not None and not talk.content and not talk.reasoning:
            tally.judged += 1
            begun = "" if dialect.thinking is None else dialect.thinking[1].strip()
            if takes(grammar, text.partition(begun)[2].strip() if begun and begun in text else text.strip()):
                tally.taken += 1
            else:
                tally.wrong.append(f"the grammar does not take {text!r}")
    return tally


def difference(dialect: Dialect, fields: Any, prompt: str, text: str, talk: Conversation) -> str:
    mark = dialect.thinking
    begun = mark is not None and prompt.rstrip().endswith(mark[0].strip()) and mark[1].strip() in text
    begun = begun and mark is not None and mark[0].strip() not in text
    reader = AnswerReader(dialect, fields, thinks=begun, tools=TOOLS)
    content, reasoning, calls = read_whole(reader, text)
    found = [(call.name, json.loads(call.arguments)) for call in calls]
    if found != talk.calls:
        return f"calls {found} instead of {talk.calls}"
    for kind, is_, given in (("content", content, talk.content), ("reasoning", reasoning, talk.reasoning)):
        if is_.strip() != given.strip() and (is_.strip() or given in text) and is_ + given != reasoning + content:
            return f"{kind} {is_!r} instead of {given!r}"
    return ""


def takes(grammar: str, text: str) -> bool:
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    tokens = tokenizer.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=50, help="conversations for each template")
    parser.add_argument("--show", default="", help="what differs, of templates whose file names hold this")
    options = parser.parse_args()
    known: Mapping[str, str] = {path.stem: path.read_text() for path in sorted(options.folder.glob("*.jinja"))}
    for name, template in known.items():
        if not knows_tools(template) or (options.show and options.show not in name):
            continue
        try:
            dialect = dialect_of(template)
            tally = check(template, dialect, options.count)
        except (ConfigError, InvalidRequestError) as error:
            print(f"{name[:48]:48} {error}")
            continue
        line = f"read {tally.read}/{tally.written}, grammar {tally.taken}/{tally.judged}"
        print(f"{name[:48]:48} {dialect.name:16} {line}" + (f"  ({tally.refused})" if not tally.written else ""))
        if options.show:
            print("\n".join("  " + each for each in tally.wrong[:6]), tally.refused)


if __name__ == "__main__":
    main()
