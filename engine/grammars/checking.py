"""The process that says whether a grammar can be served (`engine.frontend.helpers`): what it is in llguidance's
language, or why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from engine.errors import InvalidRequestError
from engine.grammars.language import FIELD, LENIENT, first_line, grammar_of, parser_limits
from engine.grammars.marks import PLAIN, Marks
from engine.grammars.vocabularies import ModelVocabulary
from engine.request import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAKE = "engine.grammars.checking:checker"
_MOST_FORCED = 16384
"""bytes that are tokenized anew for each mask"""


class GrammarAnswer(msgspec.Struct, omit_defaults=True):
    grammar: str = ""
    error: str | None = None
    warnings: list[str] = []


def checker(setup: bytes) -> Callable[[bytes], bytes]:
    """`setup`: a `ModelVocabulary` for grammars that name tokens; nothing for others, which bytes are enough for."""
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

    tokenizer, marks = LLTokenizer("byte"), PLAIN
    if setup:
        vocabulary = msgspec.msgpack.decode(setup, type=ModelVocabulary)
        tokenizer, marks = vocabulary.for_llguidance(), Marks(Tokenizer.from_str(vocabulary.tokenizer))
    decode = msgspec.msgpack.Decoder(StructuredOutputsParams).decode

    def answer(question: bytes) -> bytes:
        return msgspec.msgpack.encode(check(decode(question), tokenizer, marks))

    return answer


def names_tokens(params: StructuredOutputsParams, marks: Marks) -> bool:
    """It may: Lark's <|token|> and <[1-5]>; GBNF has none. Or marks of its thinking are special tokens."""
    thinking = params.thinking
    if thinking is not None and thinking.budget is not None:
        return True
    if thinking is not None and any(marks.has_special(mark) for mark in (thinking.open or "", thinking.close)):
        return True
    return params.grammar is not None and "<" in params.grammar and "::=" not in params.grammar


def check(params: StructuredOutputsParams, tokenizer: LLTokenizer, marks: Marks = PLAIN) -> GrammarAnswer:
    """`tokenizer`: llguidance's, of single bytes or of the model."""
    answer = _compiled(params, tokenizer, marks)
    if answer.error is not None and params.strict:
        lenient = _compiled(replace(params, strict=False), tokenizer, marks)
        if lenient.error is None:
            return GrammarAnswer(error=f"{answer.error} ({LENIENT} passes over it)")
    return answer


def _compiled(params: StructuredOutputsParams, tokenizer: LLTokenizer, marks: Marks) -> GrammarAnswer:
    """An output must be possible: its first byte is looked for, and in an object what comes behind the first quote,
    where all its properties may come."""
    from llguidance import LLMatcher

    try:
        grammar = grammar_of(params, marks)
    except InvalidRequestError as error:
        return GrammarAnswer(error=str(error))
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
        if len(matcher.compute_ff_bytes()) > _MOST_FORCED:
            return GrammarAnswer(error=f"{FIELD}: it begins with more than {_MOST_FORCED} bytes that cannot be others")
        first_key = tokenizer.tokenize_str('{"')
        if matcher.validate_tokens(first_key) == len(first_key) and matcher.consume_tokens(first_key):
            matcher.compute_bitmask()
    if matcher.is_error():
        reason = first_line(matcher.get_error())
        if reason.startswith("NoExtension"):
            reason = "no output can match it"
        return GrammarAnswer(error=f"{FIELD}: {reason}")
    return GrammarAnswer(grammar=grammar, warnings=[first_line(each) for each in matcher.get_grammar_warnings()])
