"""Compiled grammars: masks are what brute force says, positions are copied and go on by themselves."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from queue import Queue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.core.wire import Vocabulary
from engine.errors import InvalidRequestError
from engine.executor.team import Team
from engine.grammars import compiler as compiling
from engine.grammars.compiler import GrammarCompiler
from engine.grammars.language import grammar_of
from engine.grammars.threads import _MOST, Threads
from engine.request import StructuredOutputsParams

EOS, PADDING = 2, 5
WORDS = ["a", "b", "ab", "ba", "abb", "c", "bc", "cab", "1", "12", "{", "}", '"', ":", '":', '"}', "aa"]
VOCAB = 3 + 256 + len(WORDS) + PADDING


def vocabulary() -> Vocabulary:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = ["<unk>", "<s>", "</s>", *alphabet]
    vocab = {word: index for index, word in enumerate([*entries, *(w for w in WORDS if w not in entries)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Vocabulary(tokenizer=tokenizer.to_str(), eos_token_ids=[EOS])


TOKENS = {index: word for word, index in Tokenizer.from_str(vocabulary().tokenizer).get_vocab().items()}


@pytest.fixture(scope="module", params=[None, 2, 3], ids=["llguidance's threads", "team of 2", "team of 3"])
def compiler(request: pytest.FixtureRequest) -> GrammarCompiler:
    made = GrammarCompiler(VOCAB, 256, 2, team=request.param and Team(request.param))
    made.set_vocabulary(vocabulary())
    return made


def allowed(compiler: GrammarCompiler, matcher: object) -> set[int]:
    bits, failed = compiler.fill([matcher])  # type: ignore[list-item]
    assert not failed
    unpacked = np.unpackbits(bits.view(np.uint8), bitorder="little")
    assert bits.shape == (1, -(-VOCAB // 32))
    return set(np.flatnonzero(unpacked).tolist())


@settings(max_examples=30)
@given(st.lists(st.text("abc1", min_size=1, max_size=6), min_size=1, max_size=6, unique=True), st.data())
def test_masks_are_what_brute_force_says(compiler: GrammarCompiler, words: list[str], data: st.DataObject) -> None:
    grammar = grammar_of(StructuredOutputsParams(choice=words))
    assert compiler.begin(grammar)
    matcher, text = compiler.start(grammar), ""
    while True:
        may = {i for i, token in TOKENS.items() if i > EOS and any(w.startswith(text + token) for w in words)}
        if text in words:
            may.add(EOS)
        got, follow = allowed(compiler, matcher), {w[len(text) : len(text) + 1] for w in words if w.startswith(text)}
        # Where only one text can follow, it is to be spelt as the tokenizer would.
        assert got == may if len(follow) > 1 else got and got <= may
        assert matcher.is_over == (may == {EOS})
        token = data.draw(st.sampled_from(sorted(got)))
        if token == EOS:
            return
        matcher.advance(token)
        text += TOKENS[token]


def test_copies_go_on_by_themselves(compiler: GrammarCompiler) -> None:
    grammar = grammar_of(StructuredOutputsParams(regex="a+b?"))
    compiler.begin(grammar)
    one = compiler.start(grammar)
    one.advance(TOKEN["a"])
    other = one.copy()
    one.advance(TOKEN["b"])
    assert one.is_over and not other.is_over
    other.advance(TOKEN["aa"])
    assert TOKEN["b"] in allowed(compiler, other)
    assert EOS not in allowed(compiler, compiler.start(grammar))


TOKEN = {word: index for index, word in TOKENS.items()}


def test_a_token_that_does_not_match_is_an_error(compiler: GrammarCompiler) -> None:
    grammar = grammar_of(StructuredOutputsParams(regex="a+"))
    compiler.begin(grammar)
    with pytest.raises(InvalidRequestError, match="does not match"):
        compiler.start(grammar).advance(TOKEN["b"])


def test_rows_are_filled_side_by_side_and_those_without_a_grammar_may_anything(compiler: GrammarCompiler) -> None:
    grammar = grammar_of(StructuredOutputsParams(json={"type": "object"}))
    compiler.begin(grammar)
    first = compiler.start(grammar)
    second = first.copy()
    second.advance(TOKEN["{"])
    bits, failed = compiler.fill([None, first, second, None, first.copy()])
    assert not failed and (bits[[0, 3]] == -1).all()
    assert (bits[1] == bits[4]).all() and (bits[1] != bits[2]).any()


def test_nothing_to_fill_is_no_failure(compiler: GrammarCompiler) -> None:
    """As where all grammars of a step are xgrammar's."""
    assert (compiler.fill([None])[0] == -1).all() and not compiler.fill([None])[1]
    assert compiler.fill([])[0].shape == (0, -(-VOCAB // 32))


def test_what_does_not_compile_says_so_when_it_is_started(compiler: GrammarCompiler) -> None:
    assert compiler.begin("nonsense:")
    with pytest.raises(InvalidRequestError):
        compiler.start("nonsense:")


def test_a_grammar_that_runs_into_a_dead_end_fails_its_row_alone(compiler: GrammarCompiler) -> None:
    broken = grammar_of(StructuredOutputsParams(regex="a+"))
    compiler.begin(broken)
    dead, alive = compiler.start(broken), compiler.start(broken)
    with pytest.raises(InvalidRequestError):
        dead.advance(TOKEN["c"])
    dead.tokens.append(TOKEN["c"])  # so that compiling again does not help
    bits, failed = compiler.fill([dead, alive])
    assert list(failed) == [0] and failed[0] and (bits[0] == -1).all() and (bits[1] != -1).any()


def test_no_vocabulary_is_a_reason() -> None:
    bare = GrammarCompiler(VOCAB, 256, 1)
    grammar = grammar_of(StructuredOutputsParams(regex="a"))
    assert bare.begin(grammar)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        bare.start(grammar)


@pytest.fixture
def notified() -> Iterator[tuple[GrammarCompiler, Queue[str]]]:
    told: Queue[str] = Queue()
    made = GrammarCompiler(VOCAB, 256, 1, told.put)
    made.set_vocabulary(vocabulary())
    yield made, told


def test_a_thread_compiles_and_tells_once_for_all_who_ask(notified: tuple[GrammarCompiler, Queue[str]]) -> None:
    compiler, told = notified
    grammar = grammar_of(StructuredOutputsParams(regex="a+"))
    made, may = compiler._made, threading.Event()
    compiler._made = lambda text: may.wait(60) and made(text)  # type: ignore[method-assign, return-value, assignment]
    assert not compiler.begin(grammar) and not compiler.begin(grammar)
    may.set()
    assert told.get(timeout=60) == grammar
    assert compiler.begin(grammar) and told.empty()
    assert [t for t in threading.enumerate() if t.name == "grammars"]


def test_what_several_ask_for_is_compiled_for_each_thread_and_what_one_asks_for_once() -> None:
    told: Queue[str] = Queue()
    compiler = GrammarCompiler(VOCAB, 256, 2, told.put)
    compiler.set_vocabulary(vocabulary())
    grammar = grammar_of(StructuredOutputsParams(regex="a+"))
    compiler.begin(grammar)
    assert told.get(timeout=60) == grammar and compiler.begin(grammar)
    one = compiler.start(grammar)
    assert len(one.source.bases) == 1
    assert compiler.begin(grammar), "nobody waits for the second compilation"
    assert told.get(timeout=60) == grammar
    assert len(one.source.bases) == 2
    assert {compiler.start(grammar).share for _ in range(4)} == {base.share for base in one.source.bases}
    assert compiler.begin(grammar) and told.empty()


def test_what_is_asked_for_and_dropped_while_it_is_compiled_again_is_told_of() -> None:
    told: Queue[str] = Queue()
    compiler = GrammarCompiler(VOCAB, 1, 2, told.put)
    compiler.set_vocabulary(vocabulary())
    one, other = (grammar_of(StructuredOutputsParams(regex=pattern)) for pattern in ("a+", "b+"))
    compiler.begin(one)
    assert told.get(timeout=60) == one
    compiler.start(one)
    made, may = compiler._made, threading.Event()
    compiler._made = lambda text: (text == other or may.wait(60)) and made(text)  # type: ignore[method-assign, return-value, assignment]
    assert compiler.begin(one)
    assert not compiler.begin(other)
    may.set()
    assert {told.get(timeout=60), told.get(timeout=60)} == {one, other}
    compiler.start(other)
    while not compiler.begin(one):
        assert told.get(timeout=60) == one
    assert TOKEN["a"] in allowed(compiler, compiler.start(one))


def test_who_is_quick_to_compile_does_not_wait_for_those_who_are_not() -> None:
    told: Queue[str] = Queue()
    may, begun = threading.Event(), threading.Semaphore(0)

    def compile_one(grammar: str) -> None:
        if grammar.startswith("slow"):
            begun.release()
            may.wait(60)
        told.put(grammar)

    threads = Threads(compile_one)
    for number in range(_MOST):
        threads.put(f"slow {number}")
    threads.put("quick")
    for _ in range(_MOST):
        assert begun.acquire(timeout=60)
    assert told.empty(), "as many as there are threads"
    may.set()
    assert {told.get(timeout=60) for _ in range(_MOST + 1)} == {*(f"slow {n}" for n in range(_MOST)), "quick"}
    may.clear()
    for number in range(_MOST - 1):
        threads.put(f"slow {number}")
    threads.put("quick")
    assert told.get(timeout=60) == "quick"
    may.set()
    assert {told.get(timeout=60) for _ in range(_MOST - 1)} == {f"slow {n}" for n in range(_MOST - 1)}


def test_what_was_not_asked_for_for_long_is_dropped_and_compiled_again() -> None:
    compiler = GrammarCompiler(VOCAB, 5, 1)
    compiler.set_vocabulary(vocabulary())
    grammars = [grammar_of(StructuredOutputsParams(regex=f"a{{{n}}}")) for n in range(1, 30)]
    for grammar in grammars:
        compiler.begin(grammar)
        compiler.start(grammar)
    assert list(compiler._compiled) == grammars[-5:]
    compiler.begin(grammars[0])
    assert TOKEN["a"] in allowed(compiler, compiler.start(grammars[0]))


def test_json_that_is_drawn_at_random_from_masks_is_json(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[abc]{0,4}$"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    grammar = grammar_of(StructuredOutputsParams(json=schema))
    compiler.begin(grammar)
    random = np.random.default_rng(0)
    for _ in range(20):
        matcher, text = compiler.start(grammar), ""
        while not matcher.is_over:
            may = sorted(allowed(compiler, matcher) - {EOS})
            token = may[random.integers(len(may))]
            matcher.advance(token)
            text += TOKENS[token].replace("Ġ", " ").replace("Ċ", "\n").replace("ĉ", "\t")
        value = json.loads(text)
        assert set(value) == {"a"} and re.fullmatch("[abc]{0,4}", value["a"])


def test_what_nobody_has_started_is_not_dropped() -> None:
    compiler = GrammarCompiler(VOCAB, 1, 1)
    compiler.set_vocabulary(vocabulary())
    one, other = (grammar_of(StructuredOutputsParams(regex=pattern)) for pattern in ("a+", "b+"))
    compiler.begin(one)
    compiler.begin(other)
    assert TOKEN["a"] in allowed(compiler, compiler.start(one))
    assert TOKEN["b"] in allowed(compiler, compiler.start(other)), "compiled before the first was started"


def test_what_outputs_have_learnt_together_may_be_used_up(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a lexer has too many states: the position is found again in a new compilation."""
    monkeypatch.setattr(compiling, "_MOST_RENEWAL_S", 600.0)  # however slow this machine is
    grammar = grammar_of(StructuredOutputsParams(regex="a+b"))
    compiler.begin(grammar)
    one, other = compiler.start(grammar), compiler.start(grammar)
    one.advance(TOKEN["a"])
    for matcher in (one, other):
        matcher.inner.consume_token(TOKEN["{"])
        assert matcher.inner.is_error()
    bits, failed = compiler.fill([one, other])
    assert not failed and (bits[0] != bits[1]).any()
    assert TOKEN["b"] in allowed(compiler, one) and TOKEN["b"] not in allowed(compiler, other)
    third = compiler.start(grammar)
    third.inner.consume_token(TOKEN["{"])
    third.advance(TOKEN["aa"])
    assert not third.inner.is_error() and third.share != one.share


def test_what_is_used_up_and_takes_long_to_compile_fails_alone_and_is_compiled_behind_the_next_request() -> None:
    told: Queue[str] = Queue()
    compiler = GrammarCompiler(VOCAB, 256, 1, told.put)
    compiler.set_vocabulary(vocabulary())
    grammar = grammar_of(StructuredOutputsParams(regex="a+b"))
    compiler.begin(grammar)
    assert told.get(timeout=60) == grammar and compiler.begin(grammar)
    one = compiler.start(grammar)
    one.source._seconds = 1.0
    one.inner.consume_token(TOKEN["{"])
    _, failed = compiler.fill([one])
    assert list(failed) == [0]
    assert not compiler.begin(grammar)
    assert told.get(timeout=60) == grammar and compiler.begin(grammar)
    assert TOKEN["a"] in allowed(compiler, compiler.start(grammar))


def test_the_thread_survives_what_is_no_exception(notified: tuple[GrammarCompiler, Queue[str]]) -> None:
    compiler, told = notified

    class PanicError(BaseException):
        pass

    made, calls = compiler._made, itertools.count()

    def panics(grammar: str) -> object:
        if next(calls) in (0, 2):
            raise PanicError("a panic")
        return made(grammar)

    compiler._made = panics  # type: ignore[method-assign, assignment]
    compiler._num_bases = 2
    first, second = (grammar_of(StructuredOutputsParams(regex=pattern)) for pattern in ("a+", "b+"))
    compiler.begin(first)
    compiler.begin(second)
    assert [told.get(timeout=60), told.get(timeout=60)] == [first, second]
    with pytest.raises(InvalidRequestError, match="a panic"):
        compiler.start(first)
    assert TOKEN["b"] in allowed(compiler, compiler.start(second))
    third = grammar_of(StructuredOutputsParams(regex="c"))
    compiler.begin(third)
    assert told.get(timeout=60) == third


@pytest.mark.parametrize("tokenizer", ["byte", "/etc/passwd", "", "{}"])
def test_a_vocabulary_that_is_none_is_a_reason(tokenizer: str) -> None:
    compiler = GrammarCompiler(VOCAB, 256, 1)
    compiler.set_vocabulary(Vocabulary(tokenizer=tokenizer, eos_token_ids=[EOS]))
    grammar = grammar_of(StructuredOutputsParams(regex="a"))
    compiler.begin(grammar)
    with pytest.raises(InvalidRequestError):
        compiler.start(grammar)


def test_a_tokenizer_may_have_more_tokens_than_the_model_and_an_eos_too_many() -> None:
    compiler = GrammarCompiler(VOCAB - PADDING - 8, 256, 1)
    compiler.set_vocabulary(Vocabulary(tokenizer=vocabulary().tokenizer, eos_token_ids=[EOS, 60_000]))
    grammar = grammar_of(StructuredOutputsParams(regex="a+"))
    compiler.begin(grammar)
    bits, failed = compiler.fill([compiler.start(grammar)])
    assert not failed and bits.shape == (1, -(-(VOCAB - PADDING - 8) // 32)) and bits.flags.c_contiguous


def test_what_raises_while_masks_are_filled_is_the_failure_of_those_with_a_grammar(compiler: GrammarCompiler) -> None:
    grammar = grammar_of(StructuredOutputsParams(regex="a+"))
    compiler.begin(grammar)
    outputs = [None, compiler.start(grammar), compiler.start(grammar)]
    bits, failed = compiler.fill(outputs, [(), (-1,), ()])  # no token of the library's
    assert list(failed) == [1, 2] and all(failed.values())
    assert (bits == -1).all()


def test_a_long_text_that_is_forced_is_told_in_parts_and_found_once(compiler: GrammarCompiler) -> None:
    grammar = grammar_of(StructuredOutputsParams(grammar=f'root ::= "{"cab" * 200}" [ab]'))
    compiler.begin(grammar)
    matcher, calls = compiler.start(grammar), itertools.count()
    find = matcher.inner.compute_ff_tokens

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(inner, name)

        def compute_ff_tokens(self) -> list[int]:
            next(calls)
            return find()

    inner, matcher.inner = matcher.inner, Counting()  # type: ignore[assignment]
    text = ""
    while tokens := matcher.forced():
        assert len(tokens) <= 64
        for token in tokens[:3]:
            matcher.advance(token)
            text += TOKENS[token]
    assert text and ("cab" * 200).startswith(text) and len(text) > 590
    assert next(calls) <= 4


def test_after_a_long_look_that_finds_nothing_forced_none_is_taken_for_a_while(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.grammars.compiler._LONG_LOOK_S", -1.0)
    grammar = grammar_of(StructuredOutputsParams(grammar='root ::= [ab] [ab] [ab]{30} "cabcab" [ab]'))
    compiler.begin(grammar)
    matcher, found = compiler.start(grammar), []
    for _ in range(32):
        found.append(matcher.forced())
        matcher.advance(TOKEN["a"])
    assert not any(found) and matcher._look_from == 32, "it looked at the start and 16 tokens later"
    assert matcher.forced()
