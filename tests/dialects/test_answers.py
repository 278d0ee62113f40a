"""What models of each dialect write is read back, whole and in any pieces."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator

import pytest
from conversations import TOOLS, Written, answers, written

from engine.dialects.answers import AnswerReader, read_whole, response_template
from engine.dialects.families import DIALECTS, PLAIN, THINKING_ONLY
from engine.dialects.forms import Dialect, Piece

EVERY = list(DIALECTS.values())
HERMES = DIALECTS["hermes"]
NAMES = {tool["function"]["name"] for tool in TOOLS}


def reader_of(
    dialect: Dialect, *, thinks: bool = False, with_calls: bool = True, streams: bool = False
) -> AnswerReader:
    template = response_template(dialect, with_calls=with_calls)
    names = NAMES if streams else ()
    return AnswerReader(dialect, template, thinks=thinks, tools=TOOLS if with_calls else (), streamed=names)


def read(reader: AnswerReader, pieces: Iterable[str]) -> tuple[str, str, list[tuple[str, object]]]:
    found: list[Piece] = []
    for piece in pieces:
        found += reader.feed(piece)
    found += reader.end()
    calls = [(p.call.name, json.loads(p.call.arguments)) for p in found if p.call is not None]
    return "".join(p.content for p in found), "".join(p.reasoning for p in found), calls


def streamed(reader: AnswerReader, pieces: Iterable[str]) -> tuple[str, str, list[tuple[str, str]], int]:
    """Calls with the text of their arguments, joined; and in how many parts they came."""
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    parts = 0
    for piece in [*(found for text in pieces for found in reader.feed(text)), *reader.end()]:
        content, reasoning = content + piece.content, reasoning + piece.reasoning
        if piece.call is not None:
            calls.append((piece.call.name, piece.call.arguments))
        elif piece.arguments:
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
            parts += 1
    return content, reasoning, calls, parts


def texts_of(reader: AnswerReader, text: str) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in read_whole(reader, text)[2]]


def expected(answer: Written) -> tuple[str, str, list[tuple[str, object]]]:
    return answer.content, answer.reasoning, list(answer.calls)


@pytest.mark.parametrize("dialect", EVERY, ids=lambda each: each.name)
def test_streamed_arguments_joined_are_those_of_the_whole_answer(dialect: Dialect, count: int) -> None:
    random_ = random.Random(dialect.name)
    for answer in answers(dialect, count, seed=3):
        whole = texts_of(reader_of(dialect), answer.text)
        for pieces in ([answer.text], list(answer.text), many_pieces(answer.text, random_)):
            content, reasoning, calls, parts = streamed(reader_of(dialect, streams=True), pieces)
            assert (content, reasoning, calls) == (answer.content, answer.reasoning, whole), pieces
            as_they_come = dialect.form is not None and dialect.form.arguments is None and dialect.name != "apertus"
            assert (parts >= len(calls)) if as_they_come else parts == 0


def test_what_breaks_off_within_streamed_arguments_ends_the_call() -> None:
    for text, arguments in (
        ('<tool_call>\n{"name": "now", "arguments": {"a": tru', '{"a": '),
        ('<tool_call>\n{"name": "now", "arguments": {"a" 1}}\n</tool_call>', '{"a" 1}'),
    ):
        for pieces in splits(text):
            assert streamed(reader_of(HERMES, streams=True), pieces)[:3] == ("", "", [("now", arguments)])
        assert read(reader_of(HERMES), text)[2] == []


MARKED = DIALECTS["mistral"]


@pytest.mark.parametrize(
    ("dialect", "text", "content"),
    [
        (HERMES, '<tool_call>\n{"name": "now", "arguments": {"a": 1}} and more\n</tool_call>', "and more"),
        (HERMES, '<tool_call>{"name": "now", "arguments": {"a": 1}}\n{"name": "x", "arguments": {}}</tool_call>', None),
        (DIALECTS["llama3_json"], '{"name": "now", "parameters": {"a": 1}}\nI have called it.', "I have called it."),
        (MARKED, '[TOOL_CALLS]now[ARGS]{"a": 1}\nI have called it.', "I have called it."),
    ],
)
def test_what_stands_behind_a_call_in_its_region_is_content(dialect: Dialect, text: str, content: str | None) -> None:
    content = '{"name": "x", "arguments": {}}' if content is None else content
    for pieces in splits(text):
        found = streamed(reader_of(dialect, streams=True), pieces)
        assert (found[0].strip(), *found[1:3]) == (content, "", [("now", '{"a": 1}')])
        found = streamed(reader_of(dialect), pieces)
        assert (found[0].strip(), *found[1:3]) == (content, "", [("now", '{"a": 1}')])


CUT = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {"a": "b c", "n": 12}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]now[ARGS]{"a": "b c", "n": 12}',
    "qwen3_coder": "<tool_call>\n<function=now>\n<parameter=a>\nb c\n</parameter>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", CUT)
def test_a_limit_that_cuts_a_call_leaves_what_there_is_of_it_and_no_marks(name: str) -> None:
    """Whole and as it comes, the same."""
    text = CUT[name]
    for end in range(1, len(text)):
        parts = []
        for streams in (False, True):
            reader = reader_of(DIALECTS[name], streams=streams)
            found = [*reader.feed("Well. " + text[:end]), *reader.end(cut=True)]
            calls = [p.call for p in found if p.call is not None]
            arguments = "".join(p.arguments for p in found)
            told = [(call.name, call.arguments or arguments) for call in calls]
            parts.append(("".join(p.content for p in found), told))
        assert parts[0] == parts[1]
        content, told = parts[0]
        assert content.startswith("Well.") and len(content) <= len("Well. <tool")
        assert all(text_.startswith("{") and name_ == "now" for name_, text_ in told)


def test_calls_begin_when_their_name_is_known_to_be_one() -> None:
    nobody = '<tool_call>\n{"name": "nobody", "arguments": {"a": 1}}\n</tool_call>'
    late = '<tool_call>\n{"arguments": {"a": 1}, "name": "now"}\n</tool_call>'
    for pieces in splits(nobody):
        assert streamed(reader_of(HERMES, streams=True), pieces) == (nobody, "", [], 0)
    for pieces in splits(late):
        assert streamed(reader_of(HERMES, streams=True), pieces) == ("", "", [("now", '{"a": 1}')], 0)
    reader = reader_of(HERMES, streams=True)
    (piece,) = reader.feed('<tool_call>\n{"name": "now", "arguments": {')[:1]
    assert piece.call is not None and (piece.call.name, piece.call.arguments) == ("now", "")


def test_arguments_are_what_the_model_wrote_but_for_what_is_no_json() -> None:
    text = '{"a" :1.50,\n"b": [NaN, -Infinity, 1e999, "NaN \\u00e9"]}'
    call = f'<tool_call>{{"name": "now", "arguments": {text}}}</tool_call>'
    told = '{"a" :1.50,\n"b": [null, null, null, "NaN \\u00e9"]}'
    assert texts_of(reader_of(HERMES), call) == [("now", told)]
    for pieces in splits(call):
        assert streamed(reader_of(HERMES, streams=True), pieces)[2] == [("now", told)]


def many_pieces(text: str, random_: random.Random) -> list[str]:
    """At random places."""
    places = sorted(random_.sample(range(len(text) + 1), min(len(text), random_.randint(1, 40))))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)])]


def splits(text: str) -> Iterator[list[str]]:
    """Character by character, and in two at every place."""
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]


@pytest.mark.parametrize("dialect", EVERY, ids=lambda each: each.name)
def test_many_answers_are_read_back(dialect: Dialect, count: int) -> None:
    random_ = random.Random(dialect.name)
    for answer in answers(dialect, count, seed=1):
        for pieces in ([answer.text], list(answer.text), many_pieces(answer.text, random_)):
            assert read(reader_of(dialect), pieces) == expected(answer), pieces


@pytest.mark.parametrize("dialect", EVERY, ids=lambda each: each.name)
def test_every_split_of_an_answer_reads_the_same(dialect: Dialect, count: int) -> None:
    for answer in answers(dialect, count if count == 200 else 5, seed=2):
        for pieces in splits(answer.text):
            assert read(reader_of(dialect), pieces) == expected(answer), pieces


@pytest.mark.parametrize("dialect", [each for each in EVERY if each.thinking], ids=lambda each: each.name)
def test_thinking_that_the_prompt_has_begun_ends_in_the_answer(dialect: Dialect) -> None:
    assert dialect.thinking is not None
    text = f"so\n{dialect.thinking[1]}\n\nYes."
    if "response" in dialect.fields:
        text = f"so\n{dialect.thinking[1]}<|START_RESPONSE|>Yes.<|END_RESPONSE|>"
    for pieces in splits(text):
        assert read(reader_of(dialect, thinks=True), pieces) == ("Yes.", "so", [])
    assert read(reader_of(dialect, thinks=True), "never done") == ("", "never done", [])


def test_without_tools_marks_of_calls_are_content() -> None:
    text = written(HERMES.form, [("now", {})])  # type: ignore[arg-type]
    assert read(reader_of(HERMES, with_calls=False), text) == (text, "", [])


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        '{"name": "now", "arguments"',
        "[1, 2]",
        '"now"',
        '{"arguments": {}}',
        '{"name": "a b", "arguments": {}}',
        "",
    ],
)
def test_what_is_no_call_within_its_marks_is_content(body: str) -> None:
    content, reasoning, calls = read(reader_of(HERMES), f"Hm.\n<tool_call>\n{body}\n</tool_call>")
    assert (reasoning, calls) == ("", [])
    assert body in content and content.startswith("Hm.")


def test_a_call_that_is_cut_off_is_content_or_a_whole_call() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
    for end in range(len(text)):
        content, _, calls = read(reader_of(HERMES), text[:end])
        assert calls in ([], [("now", {"a": 1})])
        assert calls or text[:end].removeprefix("<tool_call>").strip() in content


def test_arguments_may_be_text_that_holds_json_or_be_left_out() -> None:
    bodies = ['{"name": "now", "arguments": "{\\"a\\": 1}"}', '{"name": "now"}', '{"name": "now", "arguments": null}']
    calls = [read(reader_of(HERMES), f"<tool_call>{body}</tool_call>")[2] for body in bodies]
    assert calls == [[("now", {"a": 1})], [("now", {})], [("now", {})]]


def test_text_around_calls_keeps_its_own_whitespace() -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert read(reader_of(HERMES), f"One.\n\n{call}\n{call}\nTwo.\n")[0] == "One.\n\n\n\nTwo."
    assert read(reader_of(HERMES), "  plain \n")[0] == "  plain \n"


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("hermes", "</tool_call>"),
        ("jamba", "</tool_calls>"),
        ("nemotron_json", "</TOOLCALL>"),
        ("hunyuan", "```</tool_call>"),
    ],
)
def test_a_mark_within_an_argument_ends_nothing(name: str, mark: str) -> None:
    form = DIALECTS[name].form
    assert form is not None
    calls: list[tuple[str, dict[str, object]]] = [("edit_file", {"path": "a", "text": f'x"}}}}{mark}{mark} y'})]
    for pieces in splits(written(form, calls)):
        assert read(reader_of(DIALECTS[name]), pieces) == ("", "", calls)


def test_thinking_may_stop_and_begin_again() -> None:
    text = "<think>one</think>A<think>two</think>B"
    assert read(reader_of(THINKING_ONLY), text) == ("AB", "onetwo", [])


def test_ids_are_such_as_templates_of_the_family_accept() -> None:
    def ids(name: str, text: str) -> list[str]:
        reader = reader_of(DIALECTS[name])
        return [p.call.id for p in [*reader.feed(text), *reader.end()] if p.call is not None]

    two = [("now", {}), ("now", {})]
    hermes, mistral, kimi = (
        ids(name, written(DIALECTS[name].form, two))  # type: ignore[arg-type]
        for name in ("hermes", "mistral", "kimi_k2")
    )
    assert len(set(hermes)) == 2 and all(each.startswith("call_") for each in hermes)
    assert len(set(mistral)) == 2 and all(len(each) == 9 and each.isalnum() for each in mistral)
    assert kimi == ["functions.now:0", "functions.now:1"]


def test_a_template_that_raises_gives_out_the_rest_as_it_is() -> None:
    wrong = Dialect(
        name="wrong",
        thinking=None,
        fields={"tool_calls": {"open": "<c>", "close": "</c>", "content": "json", "repeats": True}},
    )
    assert read(reader_of(wrong), ["one <c>no", " json</c> two", " three"]) == ("one <c>no json</c> two three", "", [])


def test_long_answers_do_not_get_slower_to_read() -> None:
    """What has been read is let go of."""
    reader = reader_of(HERMES)
    for _ in range(5_000):
        reader.feed("some words ")
    assert reader._parser is not None and len(reader._parser._buffer) < 10_000


def test_other_ways_to_write_the_same_calls() -> None:
    cases = [
        ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}'),
        ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}'),
        ("qwen3_coder", "<function=now>\n</function>"),
        ("qwen3_coder", "<tool_call>\n\n<function=now></function></tool_call>"),
        ("minimax_m2", '<invoke name="now">\n</invoke>'),
        ("glm45", "<tool_call>now</tool_call>"),
        ("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        ("phi4_mini", 'functools[{"name": "now", "arguments": {}}]'),
        ("pythonic", "[now()]"),
        ("lfm2", "<|tool_call_start|>now()<|tool_call_end|>"),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}"),
        ("harmony", "<|channel|>analysis to=functions.now <|constrain|>json<|message|>{}<|call|>"),
        ("harmony", "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}"),
        ("cohere", '<|START_ACTION|>{"tool_name": "now", "parameters": {}}<|END_ACTION|>'),
    ]
    for name, text in cases:
        for pieces in splits(text):
            assert read(reader_of(DIALECTS[name]), pieces) == ("", "", [("now", {})]), (name, pieces)


def test_calls_in_a_row_within_one_pair_of_marks() -> None:
    lines = '{"name": "now", "arguments": {}}\n{"name": "edit_file", "arguments": {"path": "}"}}'
    text = f"<tool_calls>\n{lines}\n</tool_calls>"
    for pieces in splits(text):
        found = read(reader_of(DIALECTS["minimax_m1"]), pieces)
        assert found == ("", "", [("now", {}), ("edit_file", {"path": "}"})]), pieces
    call = '{"name": "now", "parameters": {"a": [{"b": 1}, {"c": 2}]}}'
    for between in ("; ", "", ";"):
        calls = read(reader_of(DIALECTS["llama3_json"]), list(call + between + call))[2]
        assert calls == [("now", {"a": [{"b": 1}, {"c": 2}]})] * 2


def test_values_of_other_kinds_than_text_are_read_as_what_they_are() -> None:
    """Templates of some families write them as Python does, or in marks of a text."""
    cases = [
        (
            "seed_oss",
            "<seed:tool_call><function=weather><parameter=place>{'lat': 1.5}</parameter></function></seed:tool_call>",
        ),
        ("functiongemma", "<start_function_call>call:weather{place:<escape>{'lat': 1.5}<escape>}<end_function_call>"),
        ("minicpm5", '<function name="weather"><param name="place"><![CDATA[{"lat": 1.5}]]></param></function>'),
        ("lfm2", "<|tool_call_start|>[weather(place={'lat': 1.5})]<|tool_call_end|>"),
    ]
    for name, text in cases:
        assert read(reader_of(DIALECTS[name]), [text])[2] == [("weather", {"place": {"lat": 1.5}})], name
    text = "<|tool_call_start|>[weather(city='two\nlines', days='3')]<|tool_call_end|>"
    assert read(reader_of(DIALECTS["lfm2"]), [text])[2] == [("weather", {"city": "two\nlines", "days": 3})]


def test_what_a_mark_does_not_begin_stays_as_it_was_written() -> None:
    coder = DIALECTS["qwen3_coder"]
    for dialect, text in (
        (HERMES, "Use the <tool_call> tag, closed by </tool_call>, to call."),
        (HERMES, "Write <tool_call> first."),
        (coder, "Write <function=name> and then go on."),
        (coder, "One </tool_call> alone."),
        (coder, "<tool_call>\n<function=nobody>\n</function>"),
        (coder, "<tool_call>\n<function=edit_file>\n<parameter=path>\na\n</parameter>\n<parameter=text>\nhalf"),
    ):
        for pieces in ([text], list(text)):
            assert read(reader_of(dialect), pieces) == (text.rstrip(), "", []), pieces


def test_a_mark_within_a_bare_argument_ends_nothing() -> None:
    for name, mark in (("qwen3_coder", "</function>"), ("glm45", "</tool_call>"), ("minimax_m2", "</invoke>")):
        form = DIALECTS[name].form
        assert form is not None
        calls: list[tuple[str, dict[str, object]]] = [("edit_file", {"path": "a", "text": f"x{mark} y"})]
        for pieces in splits(written(form, calls)):
            assert read(reader_of(DIALECTS[name]), pieces) == ("", "", calls)


def test_half_of_a_pair_is_an_argument_all_the_same() -> None:
    (piece,) = reader_of(HERMES).feed('<tool_call>{"name": "now", "arguments": {"a": "\\ud83d"}}</tool_call>')
    assert piece.call is not None and piece.call.arguments == '{"a": "\\ud83d"}'


def test_what_json_has_no_number_for_is_null() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": [NaN, -Infinity, 1e999, 1]}}</tool_call>'
    assert read(reader_of(HERMES), text)[2] == [("now", {"a": [None, None, None, 1]})]


def test_nested_texts_of_gemma() -> None:
    text = '<|tool_call>call:now{a:["a,b:c"],b:{c:<|"|>d:{e}<|"|>}}<tool_call|>'
    assert read(reader_of(DIALECTS["gemma4"]), text)[2] == [("now", {"a": ["a,b:c"], "b": {"c": "d:{e}"}})]


@pytest.mark.parametrize("dialect", EVERY, ids=lambda each: each.name)
def test_no_answer_takes_long_to_read(dialect: Dialect) -> None:
    """Marks without end, names without end, in one piece and in many: in proportion to their length."""
    form = dialect.form
    assert form is not None
    begin = form.begin + form.call[0]
    for text in (
        begin * 400,
        begin + "x" * 8_000,
        begin + 'f">{"a":"' + form.call[2] * 400,
        form.end * 800,
        "</tool_call>" * 800,
    ):
        reader = reader_of(dialect)
        counted = reader.feed(text)
        many = reader_of(dialect)
        for start in range(0, len(text), 7):
            counted += many.feed(text[start : start + 7])
        reader.end(), many.end()


def test_plain_models_are_read_as_they_write() -> None:
    assert read(reader_of(PLAIN, with_calls=False), "<think> a </think> ") == ("<think> a </think> ", "", [])
