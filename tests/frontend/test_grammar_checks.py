"""What outputs must be is checked in a process that can be ended: remembered, bounded, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.errors import InvalidRequestError
from engine.frontend.grammars import GrammarChecks
from engine.grammars.vocabularies import ModelVocabulary
from engine.limits import Limits
from engine.request import SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.timeout(120)
SLOW = StructuredOutputsParams(
    json={"allOf": [{"type": "string", "pattern": f".*{c}.{{{n}}}"} for n, c in enumerate("abcdefghijklmnop")]}
)
"""about a second"""


@pytest.fixture
def checks() -> Iterator[GrammarChecks]:
    made = GrammarChecks(Limits(grammar_s=0.2, grammar_chars=4000, choices=5, grammars_bytes=2000))
    yield made
    made.close()


@pytest.fixture
def patient() -> Iterator[GrammarChecks]:
    """Whatever else the machine does."""
    made = GrammarChecks(Limits(grammar_s=60.0))
    yield made
    made.close()


def test_the_same_answer_without_asking_again(patient: GrammarChecks) -> None:
    params = StructuredOutputsParams(regex="a+")
    grammar = patient.check(params)
    patient.close()  # nobody could be asked any more
    assert patient.check(StructuredOutputsParams(regex="a+")) == grammar
    assert asyncio.run(patient.check_async(params)) == grammar


def test_what_is_wrong_is_told_and_the_helper_serves_on(patient: GrammarChecks) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="unclosed") as caught:
            patient.check(StructuredOutputsParams(regex="(("))
        assert caught.value.field == "structured_outputs"
    assert patient.check(StructuredOutputsParams(regex="b"))
    assert len(patient._helpers._idle) == 1


def test_what_takes_too_long_is_ended_and_names_its_limit(checks: GrammarChecks) -> None:
    for ask in (checks.check, lambda params: asyncio.run(checks.check_async(params))):
        with pytest.raises(InvalidRequestError, match="grammar_s"):
            ask(SLOW)
    assert checks.check(StructuredOutputsParams(regex="b"))


def test_who_leaves_ends_the_check(checks: GrammarChecks) -> None:
    async def leave() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(checks.check_async(SLOW), 0.02)

    asyncio.run(leave())
    assert not checks._helpers._idle


@pytest.mark.parametrize(
    ("params", "limit"),
    [
        (StructuredOutputsParams(choice=["a"] * 6), "choices"),
        (StructuredOutputsParams(regex="a" * 5000), "grammar_chars"),
    ],
)
def test_too_much_is_refused_without_asking(checks: GrammarChecks, params: StructuredOutputsParams, limit: str) -> None:
    with pytest.raises(InvalidRequestError, match=limit):
        checks.check(params)
    assert not checks._helpers._idle


def test_what_nests_for_ever_is_no_json(checks: GrammarChecks) -> None:
    schema: dict[str, object] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError):
        checks.check(StructuredOutputsParams(json=schema))


def test_what_is_remembered_is_bounded(checks: GrammarChecks) -> None:
    for number in range(60):
        checks.check(StructuredOutputsParams(regex=f"a{{{number + 1}}}"))
    assert sum(len(key) + len(value) for key, value in checks._known.items()) <= 2000


def test_two_that_are_slow_do_not_hold_up_those_who_are_remembered(checks: GrammarChecks) -> None:
    known = StructuredOutputsParams(regex="a+")
    checks.check(known)

    async def ask() -> float:
        slow = [asyncio.ensure_future(checks.check_async(SLOW)) for _ in range(4)]
        await asyncio.sleep(0.01)
        began = time.monotonic()
        await checks.check_async(known)
        took = time.monotonic() - began
        assert not all(one.done() for one in slow)
        await asyncio.gather(*slow, return_exceptions=True)
        return took

    asyncio.run(ask())


def test_a_search_in_a_grammar_needs_its_end() -> None:
    with pytest.raises(InvalidRequestError, match="ignore_eos"):
        SamplingParams(
            use_beam_search=True,
            n=2,
            temperature=0,
            ignore_eos=True,
            structured_outputs=StructuredOutputsParams(regex="a"),
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": 5},
        {"choice": "abc"},
        {"json": True},
        {"json_object": "yes"},
        {"regex": "a", "whitespace_pattern": 5},
        {"regex": "a", "backend": "outlines"},
    ],
)
def test_wrong_types_are_named_before_anybody_is_asked(checks: GrammarChecks, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checks.check(StructuredOutputsParams(**fields))
    assert caught.value.field == "structured_outputs" and "memory" not in str(caught.value)
    assert not checks._helpers._idle


def test_a_dictionary_is_taken_too(checks: GrammarChecks) -> None:
    given: Any = {"regex": "a+"}
    assert checks.check(given) == checks.check(StructuredOutputsParams(regex="a+"))
    with pytest.raises(InvalidRequestError, match="rejex"):
        checks.check({"rejex": "a"})  # type: ignore[arg-type]


def test_a_backend_that_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.frontend.grammars.find_spec", lambda name: None)
    made = GrammarChecks(Limits(), lambda: pytest.fail("nobody asks for it"))
    with pytest.raises(InvalidRequestError, match=r"pageloom\[xgrammar\]") as caught:
        made.check(StructuredOutputsParams(regex="a", backend="xgrammar"))
    assert caught.value.field == "structured_outputs"
    assert made.check(StructuredOutputsParams(regex="a", backend="llguidance"))
    made.close()


def _byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: index for index, word in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|call|>"])
    return tokenizer


def _vocabulary(tokenizer: Tokenizer) -> ModelVocabulary:
    return ModelVocabulary(tokenizer=tokenizer.to_str(), eos_token_ids=[1], vocab_size=tokenizer.get_vocab_size() + 8)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('start: <|call|> "a"', None),
        ("start: <[10-260]>+", None),
        ('start: "<|nope|>"', None),
        ("start: <|nope|>", "unknown special token"),
        ("start: <[10-90000]>", "too large"),
    ],
)
def test_grammars_may_name_the_models_tokens(grammar: str, says: str | None) -> None:
    tokenizer = _byte_level()
    made = GrammarChecks(Limits(), lambda: _vocabulary(tokenizer), tokenizer)
    try:
        if says is None:
            assert made.check(StructuredOutputsParams(grammar=grammar))
        else:
            with pytest.raises(InvalidRequestError, match=says):
                made.check(StructuredOutputsParams(grammar=grammar))
        assert not made._helpers._idle, "bytes know of no tokens"
    finally:
        made.close()


FALLBACK = decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize(
    "decoder", [decoders.ByteLevel(), FALLBACK, decoders.Metaspace(), decoders.WordPiece(), decoders.Fuse(), None]
)
def test_a_tokenizer_that_cannot_be_followed_is_refused_before_the_core_hears_of_it(decoder: Any) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "b": 2}, unk_token="a"))
    if decoder is not None:
        tokenizer.decoder = decoder
    try:
        _vocabulary(tokenizer).for_llguidance()
        followed = True
    except ValueError:
        followed = False
    made = GrammarChecks(Limits(), lambda: _vocabulary(tokenizer), tokenizer)
    try:
        if followed:
            assert made.check(StructuredOutputsParams(regex="a"))
        else:
            with pytest.raises(InvalidRequestError, match="cannot be followed"):
                made.check(StructuredOutputsParams(regex="a"))
            assert not made._helpers._idle
    finally:
        made.close()
