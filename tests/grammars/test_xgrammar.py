"""The other backend, where it is installed: what it takes, what it would pass over, and its positions."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.core.wire import Vocabulary
from engine.errors import InvalidRequestError
from engine.executor.team import Team
from engine.grammars.checking import GrammarAnswer
from engine.grammars.compiler import GrammarCompiler
from engine.grammars.language import grammar_of
from engine.grammars.vocabularies import ModelVocabulary
from engine.grammars.xgrammar_checking import checker
from engine.grammars.xgrammar_language import PREFIX
from engine.grammars.xgrammar_matcher import XgrammarMatcher
from engine.request import StructuredOutputsParams

pytest.importorskip("xgrammar")

EOS, PADDING = 2, 5
WORDS = ["ab", "ba", "abb", "cab", "12", '":', '"}', "aa"]


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *alphabet, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


TOKENIZER = _tokenizer()
TOKEN = TOKENIZER.get_vocab(with_added_tokens=True)
VOCAB = len(TOKEN) + PADDING
SETUP = ModelVocabulary(tokenizer=TOKENIZER.to_str(), eos_token_ids=[EOS], vocab_size=VOCAB)
ANSWER = checker(msgspec.msgpack.encode(SETUP))


def check(**fields: Any) -> GrammarAnswer:
    params = StructuredOutputsParams(backend="xgrammar", **fields)
    return msgspec.msgpack.decode(ANSWER(msgspec.msgpack.encode(params)), type=GrammarAnswer)


@pytest.fixture(scope="module", params=[None, 2])
def compiler(request: pytest.FixtureRequest) -> GrammarCompiler:
    made = GrammarCompiler(VOCAB, 256, 2, team=request.param and Team(request.param))
    made.set_vocabulary(Vocabulary(tokenizer=SETUP.tokenizer, eos_token_ids=[EOS]))
    return made


def start(compiler: GrammarCompiler, **fields: Any) -> XgrammarMatcher:
    answer = check(**fields)
    assert answer.error is None and answer.grammar.startswith(PREFIX)
    compiler.begin(answer.grammar)
    matcher = compiler.start(answer.grammar)
    assert isinstance(matcher, XgrammarMatcher)
    return matcher


def allowed(compiler: GrammarCompiler, matcher: object) -> set[int]:
    bits, failed = compiler.fill([matcher])  # type: ignore[list-item]
    assert not failed and bits.shape == (1, -(-VOCAB // 32))
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def takes(compiler: GrammarCompiler, text: str, **fields: Any) -> bool:
    """The whole text is an output."""
    matcher = start(compiler, **fields)
    for token in TOKENIZER.encode(text, add_special_tokens=False).ids:
        if token not in allowed(compiler, matcher):
            return False
        matcher.advance(token)
    return EOS in allowed(compiler, matcher)


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": OBJECT, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"json": OBJECT}, ['{"a":1}', '{ "a" : 12 }', '{"a":1, "b":[true]}'], ["{}", '{"a":"1"}', "1"]),
        ({"json": json.dumps(OBJECT), "disable_additional_properties": True}, ['{"a":1}'], ['{"a":1,"b":1}']),
        ({"json": OBJECT, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}', '{ "a":1}']),
        (
            {"json": {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 3}}},
            ["[]", '["a"]', '["é a","abc"]'],
            ['[""]', '["abcd"]', '["\x04"]', '["a\\"]'],
        ),
        ({"json": {"type": "string", "minLength": 2}}, ['"ab"', '"abcabc"'], ['"a"', '"a\n"']),
        ({"json_object": True}, ["{}", '{"x":{"y":null}}'], ["[]", "1"]),
        ({"regex": "[a-c]{2}[0-9]+"}, ["ab1", "cc123"], ["a1", "ab1 "]),
        ({"choice": ["yes", 'n"o\\', "né", "a\nb\x01", "</s>"]}, ["yes", 'n"o\\', "né", "a\nb\x01"], ["ye", "yesno"]),
        ({"grammar": 'root ::= "a" b*\nb ::= "b" | "c"'}, ["a", "abcb"], ["b", "ad"]),
        ({"grammar": 'start: "a" B+\nB: /[0-9]/'}, ["a1", "a42"], ["a", "1"]),
        ({"structural_tag": TAGS}, ["free", 'one <f>{"a":1}</f> two'], ['<f>{"b":1}</f>', "<fx"]),
    ],
)
def test_outputs_are_what_was_asked_for(
    compiler: GrammarCompiler, fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not takes(compiler, text, **fields)] == []
    assert [text for text in bad if takes(compiler, text, **fields)] == []


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"json": {"type": "object", "unevaluatedProperties": False}}, "unevaluatedProperties"),
        ({"json": {"type": "array", "items": {"type": "string", "format": "color"}}}, "color"),
        ({"json": {"type": "string", "pattern": "^a", "maxLength": 3}}, "lengths"),
        ({"json": {"anyOf": [{"type": "string"}], "minLength": 3}}, "beside 'anyOf'"),
        ({"json": {"$defs": {"x": {"multipleOf": 3, "type": "integer"}}, "$ref": "#/$defs/x"}}, "multipleOf"),
        ({"json": {"oneOf": [{"type": "string"}]}}, "oneOf"),
        ({"json": {"type": "string", "enum": ["a", 1]}}, "not of 'type'"),
        ({"json": {"minimum": 3}}, "minimum"),
        ({"json": {"type": "string", "format": "date"}}, "date"),
        ({"json": {"type": "string", "pattern": r"^\S{1,4}$"}}, "how JSON writes"),
        ({"json": {"type": "string", "pattern": "[^a]"}}, "how JSON writes"),
        ({"json": {"type": "string", "pattern": "(("}}, "(("),
        ({"json": "{"}, "not JSON"),
        ({"json": "[1]"}, "not list"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": OBJECT, "whitespace_pattern": " *"}, "whitespace_pattern"),
        ({"regex": "(("}, ""),
        ({"grammar": "root ::= foo"}, "foo"),
        ({"grammar": "start: missing"}, "missing"),
        ({"structural_tag": {"type": "structural_tag", "format": {}}}, "structures"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_reason(fields: dict[str, Any], says: str) -> None:
    error = check(**fields).error
    assert error is not None and error.startswith("structured_outputs") and says in error
    assert error.count("structured_outputs") == 1 and "\n" not in error and "/project" not in error


def test_what_has_no_effect_is_said_where_the_request_is_not_strict() -> None:
    answer = check(json={"type": "object", "unevaluatedProperties": False}, strict=False)
    assert answer.error is None and any("unevaluatedProperties" in each for each in answer.warnings)


def test_copies_go_on_by_themselves_and_an_output_that_can_only_end_is_over(compiler: GrammarCompiler) -> None:
    one = start(compiler, regex="a+b?")
    one.advance(TOKEN["a"])
    other = one.copy()
    one.advance(TOKEN["b"])
    assert one.is_over and one.copy().is_over and not other.is_over
    other.advance(TOKEN["aa"])
    assert {TOKEN["b"], EOS} <= allowed(compiler, other)
    assert EOS not in allowed(compiler, start(compiler, regex="a+b?"))
    with pytest.raises(InvalidRequestError, match="does not match"):
        other.advance(TOKEN["c"])
    other.advance(EOS)
    assert other.is_over


def test_drafts_have_masks_of_their_own_and_change_nothing(compiler: GrammarCompiler) -> None:
    llguidance = grammar_of(StructuredOutputsParams(regex="ab+c"))
    compiler.begin(llguidance)
    matchers = [None, start(compiler, regex="ab*c"), compiler.start(llguidance)]
    drafts = [[], [TOKEN["ab"], TOKEN["c"], TOKEN["1"]], [TOKEN["ab"]]]
    bits, failed = compiler.fill(matchers, drafts)
    assert not failed and bits.shape[0] == 7
    asked = matchers[1]
    assert isinstance(asked, XgrammarMatcher)
    expected = [allowed(compiler, asked)]
    for token in drafts[1][:2]:
        asked.advance(token)
        expected.append(allowed(compiler, asked))
    got = [set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB]).tolist()) for row in bits]
    assert got[1:4] == expected and expected[2] == {EOS}
    assert len(got[0]) == len(got[4]) == VOCAB and 0 < len(got[6]) < VOCAB


def test_a_small_grammar_that_forces_a_text_without_an_end_is_served(compiler: GrammarCompiler) -> None:
    rules = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40))
    matcher = start(compiler, grammar=f'root ::= r0\n{rules}\nr40 ::= "a"')
    assert matcher.forced() == []
    matcher.advance(TOKEN["aa"])
    assert allowed(compiler, matcher) == {TOKEN["a"], TOKEN["aa"]}


def test_special_tokens_are_no_text(compiler: GrammarCompiler) -> None:
    assert not allowed(compiler, start(compiler, regex="(.|\n)+")) & {0, 1, EOS}


def test_a_vocabulary_that_is_none_is_a_reason() -> None:
    answer = checker(msgspec.msgpack.encode(ModelVocabulary(tokenizer="", eos_token_ids=[2], vocab_size=10)))
    asked = msgspec.msgpack.encode(StructuredOutputsParams(regex="a", backend="xgrammar"))
    assert "not known" in str(msgspec.msgpack.decode(answer(asked), type=GrammarAnswer).error)
    bare = GrammarCompiler(VOCAB, 256, 1)
    grammar = check(regex="a").grammar
    bare.begin(grammar)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        bare.start(grammar)
