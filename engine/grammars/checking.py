"""The process that says whether a grammar can be served (`engine.frontend.helpers`): what it is in llguidance's
language, or why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from engine.errors import InvalidRequestError
from engine.grammars.language import FIELD, first_line, grammar_of, parser_limits
from engine.request import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAKE = "engine.grammars.checking:checker"
_FIRST_KEY = list(b'{"')


class GrammarAnswer(msgspec.Struct, omit_defaults=True):
    grammar: str = ""
    error: str | None = None
    warnings: list[str] = []


def checker(setup: bytes) -> Callable[[bytes], bytes]:
    from llguidance import LLTokenizer

    bytewise = LLTokenizer("byte")
    decode = msgspec.msgpack.Decoder(StructuredOutputsParams).decode

    def answer(question: bytes) -> bytes:
        return msgspec.msgpack.encode(check(decode(question), bytewise))

    return answer


def check(params: StructuredOutputsParams, bytewise: LLTokenizer) -> GrammarAnswer:
    """`bytewise`: llguidance's tokenizer of single bytes."""
    answer = _compiled(params, bytewise)
    if answer.error is not None and params.strict and _compiled(replace(params, strict=False), bytewise).error is None:
        return GrammarAnswer(error=f"{answer.error} (strict=False passes over it)")
    return answer


def _compiled(params: StructuredOutputsParams, bytewise: LLTokenizer) -> GrammarAnswer:
    """An output must be possible: its first byte is looked for, and in an object what comes behind the first quote,
    where all its properties may come."""
    from llguidance import LLMatcher

    try:
        grammar = grammar_of(params)
    except InvalidRequestError as error:
        return GrammarAnswer(error=str(error))
    matcher = LLMatcher(bytewise, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
        if matcher.validate_tokens(_FIRST_KEY) == len(_FIRST_KEY) and matcher.consume_tokens(_FIRST_KEY):
            matcher.compute_bitmask()
    if matcher.is_error():
        reason = first_line(matcher.get_error())
        if reason.startswith("NoExtension"):
            reason = "no output can match it"
        return GrammarAnswer(error=f"{FIELD}: {reason}")
    return GrammarAnswer(grammar=grammar, warnings=[first_line(each) for each in matcher.get_grammar_warnings()])
