"""Whether what a request's output must be can be served: asked of a process that can be ended, and remembered."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec

import msgspec
from tokenizers import Tokenizer

from compilation.priority import LOW
from engine.errors import EngineError, InvalidRequestError
from engine.frontend.helpers import HelperEndedError, Helpers
from engine.frontend.turns import Turns
from engine.grammars.checking import MAKE, GrammarAnswer, names_tokens
from engine.grammars.marks import Marks
from engine.grammars.validation import MAKE as VALIDATION
from engine.grammars.validation import UNKNOWN, Written, has_schema
from engine.grammars.vocabularies import ModelVocabulary, check_decoder
from engine.grammars.xgrammar_checking import MAKE as XGRAMMAR
from engine.limits import Limits
from engine.request import CompletionOutput, SamplingParams, StructuredOutputsParams

logger = logging.getLogger(__name__)

_FIELD = "structured_outputs"
_HELPERS = 2
_PATIENCE_S = 0.05
_SLOW_HELPERS = 4
"""checks that took longer and go on at the lowest priority"""
_answers = msgspec.msgpack.Decoder(GrammarAnswer)


class GrammarChecks:
    """`check` from any thread, `check_async` from one event loop."""

    def __init__(
        self,
        limits: Limits,
        vocabulary: Callable[[], ModelVocabulary] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`vocabulary`: what xgrammar compiles for, and whose tokens grammars may name. `tokenizer`: of outputs."""
        self._limits = limits
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._marks = Marks(tokenizer)
        self._helpers = self._new(MAKE, bytes)
        self._with_tokens = self._xgrammar = None
        if vocabulary is not None:
            self._with_tokens = self._new(MAKE, self._setup)
            if find_spec("xgrammar") is not None:
                self._xgrammar = self._new(XGRAMMAR, self._setup)
        self._validators = self._new(VALIDATION, bytes)
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """the grammars of what was asked before"""

    def check(self, params: StructuredOutputsParams) -> str:
        """The grammar as the core is told of it. Raises `InvalidRequestError`."""
        question, helpers = self._question(params)
        if (known := self._known.get(question)) is not None:
            return known
        try:
            return self._learn(question, helpers.ask(question, self._limits.grammar_s))
        except HelperEndedError as error:
            raise self._refusal(error) from None

    async def check_async(self, params: StructuredOutputsParams) -> str:
        """As `check`; being cancelled ends the work."""
        question, helpers = self._question(params)
        if (known := self._known.get(question)) is not None:
            return known
        try:
            return self._learn(question, await helpers.ask_async(question, self._limits.grammar_s))
        except HelperEndedError as error:
            raise self._refusal(error) from None

    def validate(self, params: SamplingParams, ended: Iterable[tuple[CompletionOutput, str]]) -> None:
        """Says of outputs that have ended, each with all of its text, where they do not keep their schema: under
        `strict=False` a grammar may have passed over it. Where one cannot be validated, nor are those behind it."""
        unknown: str | None = None
        for output, question in _to_validate(params, ended):
            if unknown is None:
                try:
                    output.schema_error = self._validators.ask(question, self._limits.grammar_s).decode() or None
                except EngineError as error:
                    unknown = self._not_validated(error)
            output.schema_error = unknown or output.schema_error

    async def validate_async(
        self, params: SamplingParams, parts: Iterable[tuple[CompletionOutput, str]], told: dict[int, str | None]
    ) -> None:
        """As `validate`, of those parts that have ended, each once: `told` keeps what was said of them, by their index.
        Being cancelled ends the work."""
        unknown: str | None = None
        for output, question in _to_validate(params, parts):
            if output.index in told:
                output.schema_error = told[output.index]
                continue
            if unknown is None:
                try:
                    answer = await self._validators.ask_async(question, self._limits.grammar_s)
                    output.schema_error = answer.decode() or None
                except EngineError as error:
                    unknown = self._not_validated(error)
            told[output.index] = output.schema_error = unknown or output.schema_error

    def _not_validated(self, error: EngineError) -> str:
        return f"{UNKNOWN}{self._refusal(error) if isinstance(error, HelperEndedError) else error}"

    def close(self) -> None:
        for helpers in (self._helpers, self._with_tokens, self._xgrammar, self._validators):
            if helpers is not None:
                helpers.close()

    def _setup(self) -> bytes:
        return b"" if self._vocabulary is None else msgspec.msgpack.encode(self._vocabulary())

    def _new(self, make: str, setup: Callable[[], bytes]) -> Helpers:
        limits = self._limits
        return Helpers(
            make,
            setup=setup,
            memory_bytes=limits.grammar_bytes,
            turns=Turns(_HELPERS, limits.waiting_s, limits.message("waiting_s")),
            patience_s=_PATIENCE_S,
            slow_turns=Turns(_SLOW_HELPERS, limits.waiting_s, limits.message("waiting_s")),
            priority=LOW,
        )

    def _question(self, params: StructuredOutputsParams) -> tuple[bytes, Helpers]:
        """And whom to ask it."""
        try:
            given = params if isinstance(params, dict) else msgspec.to_builtins(params)
            checked = msgspec.convert(given, StructuredOutputsParams)
            question = msgspec.msgpack.encode(checked)
            msgspec.json.encode(checked)
        except InvalidRequestError:
            raise
        except (RecursionError, TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise InvalidRequestError(f"{_FIELD}: {error}", _FIELD) from None
        self._limits.check("choices", len(checked.choice or ()), _FIELD)
        self._limits.check("grammar_chars", len(question), _FIELD)
        if checked.backend != "xgrammar":
            if self._tokenizer is not None:
                check_decoder(self._tokenizer)
            if self._with_tokens is not None and names_tokens(checked, self._marks):
                return question, self._with_tokens
            return question, self._helpers
        if self._xgrammar is None:
            raise InvalidRequestError(
                f"{_FIELD}.backend: xgrammar is not installed here (pip install 'pageloom[xgrammar]')", _FIELD
            )
        return question, self._xgrammar

    def _learn(self, question: bytes, answered: bytes) -> str:
        answer = _answers.decode(answered)
        if answer.error is not None:
            raise InvalidRequestError(answer.error, _FIELD)
        for warning in answer.warnings:
            logger.warning("%s: %s", _FIELD, warning)
        self._known[question] = answer.grammar
        size = sum(len(key) + len(value) for key, value in self._known.items())
        while size > self._limits.grammars_bytes and self._known:
            key, value = self._known.popitem(last=False)
            size -= len(key) + len(value)
        return answer.grammar

    def _refusal(self, error: HelperEndedError) -> InvalidRequestError:
        if error.too_slow:
            return InvalidRequestError(self._limits.message("grammar_s", None, _FIELD), _FIELD)
        if error.too_large:
            return InvalidRequestError(self._limits.message("grammar_bytes", None, _FIELD), _FIELD)
        return InvalidRequestError(f"{_FIELD}: it could not be checked: {error}", _FIELD)


def _to_validate(
    params: SamplingParams, ended: Iterable[tuple[CompletionOutput, str]]
) -> Iterator[tuple[CompletionOutput, bytes]]:
    asked = params.structured_outputs
    if isinstance(asked, dict):
        asked = msgspec.convert(asked, StructuredOutputsParams)
    if asked is not None and not asked.strict and has_schema(asked) and params.detokenize:
        for output, text in ended:
            if output.finish_reason in ("stop", "length"):
                yield output, msgspec.msgpack.encode(Written(asked, text))
