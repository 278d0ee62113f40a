"""Grammars of required calls take what each family writes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from conversations import TOOLS, Arguments, written
from llguidance import LLMatcher, LLTokenizer

from engine.dialects.families import DIALECTS
from engine.dialects.forms import CallForm, Dialect
from engine.dialects.grammar import MOST_CALLS, calls_grammar
from engine.errors import InvalidRequestError
from engine.grammars.language import WHITESPACE, grammar_of
from engine.grammars.marks import PLAIN
from engine.request import StructuredOutputsParams, Thinking

TOKENIZER = LLTokenizer("byte")
WEATHER, NOW, EDIT = TOOLS
FORMS = [each for each in DIALECTS.values() if each.form is not None]


def takes(lark: str) -> Callable[[str], bool]:
    grammar = grammar_of(StructuredOutputsParams(grammar=lark))
    return lambda text: _takes(grammar, text)


def _takes(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = TOKENIZER.tokenize_str(text)
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


def lark_of(
    form: CallForm, tools: list[dict[str, Any]] = TOOLS, *, required: bool = True, parallel: bool = True
) -> str:
    return calls_grammar(form, tools, PLAIN, required=required, parallel=parallel, whitespace=WHITESPACE)


def form_of(dialect: Dialect) -> CallForm:
    assert dialect.form is not None
    return dialect.form


def weathers(seed: int, count: int) -> list[Arguments]:
    """In the schema's order."""
    random_ = random.Random(seed)
    texts = ["Tokyo", "a b", "日本", "it's", "x < y"]
    values: Arguments = {
        "city": texts,
        "days": [1, -2],
        "share": [0.5, 2],
        "exact": [True, False],
        "tags": [[], ["a", "b"]],
        "place": [{"lat": 1.5}, {"lat": 2, "name": "x"}],
        "unit": ["c", "f"],
        "note": ["so"],
    }
    return [
        {key: random_.choice(some) for key, some in values.items() if key == "city" or random_.random() < 0.5}
        for _ in range(count)
    ]


@pytest.mark.parametrize("dialect", FORMS, ids=lambda each: each.name)
def test_what_the_family_writes_is_taken(dialect: Dialect) -> None:
    form = form_of(dialect)
    ok = takes(lark_of(form))
    for arguments in weathers(3, 30):
        assert ok(written(form, [("weather", arguments)])), written(form, [("weather", arguments)])
    assert ok(written(form, [("now", {})]))
    assert ok(written(form, [("edit_file", {"path": "a.py", "text": "x = 1\ny = [2]"})]))


@pytest.mark.parametrize("dialect", FORMS, ids=lambda each: each.name)
def test_nothing_else_is_taken(dialect: Dialect) -> None:
    form = form_of(dialect)
    ok = takes(lark_of(form))
    assert not ok("")
    assert not ok("Sure." + written(form, [("now", {})]))
    assert not ok(written(form, [("nowhere", {})]))
    assert not ok(written(form, [("weather", {"days": 1})])), "city is required"
    assert not ok(written(form, [("weather", {"city": "x", "unit": "k"})])), "unit is c or f"
    assert not ok(written(form, [("weather", {"city": "x", "exact": 1})])), "exact is a boolean"


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        (
            "gemma4",
            [
                '{city:<|"|>x<|"|>,place:{lat:1.5,name:<|"|>"y"<|"|>}}',
                '{city:<|"|>x<|"|>,tags:[<|"|>a<|"|>,<|"|>b<|"|>],unit:<|"|>c<|"|>}',
                '{city:<|"|>x<|"|>,place:{"lat": 1.5}}',
            ],
            [
                '{city:<|"|>x<|"|>,place:{lat:<|"|>y<|"|>}}',
                '{city:<|"|>x<|"|>,exact:True}',
                '{city:<|"|>x<|"|>,unit:<|"|>k<|"|>}',
            ],
        ),
        (
            "lfm2",
            [
                "city='x', tags=['a', \"b\"]",
                "city=\"x\", exact=True, place={'lat': 1.5, 'name': 'y'}",
                "city='x', unit='c'",
            ],
            ["city='x', exact=true", "city='x', unit='k'", "city='x', place={'lat': 'y'}"],
        ),
    ],
)
def test_what_stands_within_arguments_is_written_as_the_family_does(
    name: str, taken: list[str], refused: list[str]
) -> None:
    form = form_of(DIALECTS[name])
    ok = takes(lark_of(form))
    around = "{before}weather{0}<tool_call|>" if name == "gemma4" else "{before}weather({0}){end}"

    def text(arguments: str) -> str:
        return around.format(arguments, before=form.begin + form.call[0], end=form.end)

    assert all(ok(text(each)) for each in taken)
    assert not any(ok(text(each)) for each in refused)


def test_whitespace_that_checkpoints_have_differently() -> None:
    for dialect in FORMS:
        ok = takes(lark_of(form_of(dialect)))
        for space in ("", "\n", "\n    "):
            assert ok(written(form_of(dialect), [("edit_file", {"path": "a", "text": "b"})], space)), (
                dialect.name,
                space,
            )


@pytest.mark.parametrize("dialect", FORMS, ids=lambda each: each.name)
def test_several_calls_where_they_are_allowed(dialect: Dialect) -> None:
    form = form_of(dialect)
    two = written(form, [("now", {}), ("now", {})])
    assert takes(lark_of(form))(two) is form.parallel
    assert not takes(lark_of(form, parallel=False))(two)
    if form.parallel:
        most, more = (written(form, [("now", {})] * count) for count in (MOST_CALLS, MOST_CALLS + 1))
        assert takes(lark_of(form))(most) and not takes(lark_of(form))(more)


@pytest.mark.parametrize("dialect", FORMS, ids=lambda each: each.name)
def test_calls_that_are_not_required_stand_behind_any_text(dialect: Dialect) -> None:
    form = form_of(dialect)
    ok = takes(lark_of(form, required=False, parallel=False))
    call = written(form, [("now", {})])
    assert ok("") and ok("Just text, {1} [2].") and ok(call)
    assert not ok(written(form, [("nowhere", {})]))
    if dialect.name not in ("pythonic", "llama3_json"):
        assert ok("Sure.\n" + call)
        assert not ok("Sure.\n" + call + call)


def test_special_tokens_are_named_by_their_id() -> None:
    from tokenizers import AddedToken, Tokenizer, models

    from engine.grammars.marks import Marks

    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<c>", special=True), AddedToken("<cc>", special=True)])
    tokenizer.add_tokens([AddedToken("</t>", special=False)])
    marks = Marks(tokenizer)
    assert marks.lark("x<cc>y<c>") == '"x" <[2]> "y" <[1]>'
    assert marks.lark("</t>") == '"</t>"' and marks.lark("") == ""
    assert marks.begins_special("<c>x") and not marks.begins_special("x<c>")
    assert marks.split_before_special("ab<c>d") == ("ab", "<c>d")


def test_strict_tools_keep_what_others_pass_over() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    }
    form = form_of(DIALECTS["hermes"])

    def error_of(strict: bool) -> str:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
        return str(
            LLMatcher(
                TOKENIZER, grammar_of(StructuredOutputsParams(grammar=lark_of(form, [tool]))), log_level=0
            ).get_error()
        )

    assert "uniqueItems" in error_of(True) and not error_of(False)


def test_parameters_that_are_no_object_are_refused() -> None:
    form = form_of(DIALECTS["hermes"])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    with pytest.raises(InvalidRequestError, match="schema of an object"):
        lark_of(form, [tool])


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("thinking", "taken", "refused"),
    [
        (Thinking(close="</think>"), ["x</think>\n\n{A}", "</think>{A}"], ["{A}", "<think>x{A}", "x</think>no"]),
        (Thinking(open="<think>", close="</think>"), ["{A}", "<think>x</think>\n{A}"], ["x</think>{A}", "<think>{A}"]),
        (Thinking(open="<a>", close="</a>go", required=True), ["<a>x</a>go{A}"], ["{A}", "<a>x</a>{A}"]),
    ],
)
def test_thinking_stands_before_an_answer_of_any_kind(thinking: Thinking, taken: list[str], refused: list[str]) -> None:
    kinds: list[tuple[dict[str, Any], str]] = [
        ({"json": SCHEMA}, '{"a": 1}'),
        ({"regex": "[0-9]+"}, "12"),
        ({"choice": ["yes", "no way"]}, "yes"),
        ({"grammar": 'start: "a" b\nb: "c"+'}, "acc"),
        ({"grammar": 'root ::= "a" "b"'}, "ab"),
        ({"json_object": True}, '{"a": 1}'),
    ]
    for params, answer in kinds:
        grammar = grammar_of(StructuredOutputsParams(**params, thinking=thinking))
        for text in taken:
            assert _takes(grammar, text.replace("{A}", answer)), (params, text)
        for text in refused:
            assert not _takes(grammar, text.replace("{A}", answer)), (params, text)


def test_thinking_ends_with_its_budget() -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from engine.grammars.marks import Marks

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.add_tokens([AddedToken("</t>", special=False)])
    known = LLTokenizer(tokenizer.to_str(), eos_token=[tokenizer.token_to_id("<eos>")])

    def taken(thinking: Thinking, text: str) -> bool:
        grammar = grammar_of(StructuredOutputsParams(choice=["yes"], thinking=thinking), Marks(tokenizer))
        matcher = LLMatcher(known, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        return (
            matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
        )

    begun, free = Thinking(close="</t>", budget=3), Thinking(open="<t>", close="</t>", budget=3)
    assert all(taken(begun, f"{text}</t>yes") for text in ("", "a", "abc")) and taken(begun, "abc</t>\n\nyes")
    assert not taken(begun, "abcd</t>yes") and not taken(begun, "yes")
    assert taken(free, "yes") and taken(free, "<t>abc</t>yes") and not taken(free, "<t>abcd</t>yes")
    with pytest.raises(InvalidRequestError, match="no token '</x>'"):
        grammar_of(StructuredOutputsParams(choice=["yes"], thinking=Thinking(close="</x>", budget=3)), Marks(tokenizer))
    with pytest.raises(InvalidRequestError, match="at least 1"):
        Thinking(close="</t>", budget=0)


def test_an_alternative_may_stand_in_the_answers_place() -> None:
    calls = lark_of(form_of(DIALECTS["hermes"]), [NOW])
    both = StructuredOutputsParams(json=SCHEMA, alternative=calls, thinking=Thinking(close="</t>"))
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for text in ('x</t>{"a": 1}', f"x</t>\n{call}"):
        assert _takes(grammar_of(both), text)
    assert not _takes(grammar_of(both), f'x</t>{{"a": 1}}{call}')


def test_what_follows_thinking_is_what_a_schema_is_for() -> None:
    begun, optional = Thinking(close="</t>"), Thinking(open="<t>", close="</t>")
    assert begun.behind("x</t>\n{}</t>") == "{}</t>" and begun.behind("x") == ""
    assert optional.behind("<t>x</t> {}") == "{}" and optional.behind("{}") == "{}"
