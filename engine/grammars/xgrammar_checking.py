"""The process that says whether a grammar can be served by xgrammar (`engine.frontend.helpers`). It compiles for the
model's own vocabulary, as the core will: nothing else says what that takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from engine.errors import InvalidRequestError
from engine.grammars.checking import GrammarAnswer
from engine.grammars.language import FIELD
from engine.grammars.vocabularies import ModelVocabulary
from engine.grammars.xgrammar_language import PREFIX, reason_of, xgrammar_of
from engine.request import StructuredOutputsParams

if TYPE_CHECKING:
    from xgrammar import GrammarCompiler

MAKE = "engine.grammars.xgrammar_checking:checker"
_MOST_BYTES = 128 * 1024 * 1024
"""of a compiled grammar, which the core keeps"""


def checker(setup: bytes) -> Callable[[bytes], bytes]:
    """`setup`: a `ModelVocabulary`."""
    from xgrammar import GrammarCompiler

    decode = msgspec.msgpack.Decoder(StructuredOutputsParams).decode
    try:
        info = msgspec.msgpack.decode(setup, type=ModelVocabulary).for_xgrammar()
    except InvalidRequestError as error:
        refusal = msgspec.msgpack.encode(GrammarAnswer(error=f"{FIELD}: {error}"))
        return lambda question: refusal
    compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return lambda question: msgspec.msgpack.encode(check_with(compiler, decode(question)))


def check_with(compiler: GrammarCompiler, params: StructuredOutputsParams) -> GrammarAnswer:
    import numpy as np
    from xgrammar import Grammar, GrammarMatcher

    try:
        grammar, warnings = xgrammar_of(params)
        text = grammar.serialize_json()
        compiled = compiler.compile_grammar(Grammar.deserialize_json(text))  # just as the core will
    except InvalidRequestError as error:
        return GrammarAnswer(error=str(error))
    except (RuntimeError, ValueError) as error:
        return GrammarAnswer(error=f"{FIELD}: {reason_of(error)}")
    if compiled.memory_size_bytes > _MOST_BYTES:
        return GrammarAnswer(error=f"{FIELD}: compiled it has more than {_MOST_BYTES} bytes")
    mask = np.zeros((1, -(-compiled.tokenizer_info.vocab_size // 32)), dtype=np.int32)
    if GrammarMatcher(compiled).fill_next_token_bitmask(mask) and not mask.any():
        return GrammarAnswer(error=f"{FIELD}: no output can match it")
    return GrammarAnswer(grammar=PREFIX + text, warnings=warnings)
