"""Incremental detokenization, piece by piece, is the decoding of the whole."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_front import byte_level_tokenizer, metaspace_tokenizer

from engine.frontend.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    Detokenizers,
    IncrementalDetokenizer,
)

BYTE_LEVEL = byte_level_tokenizer()
METASPACE = metaspace_tokenizer()
SIZE = BYTE_LEVEL.get_vocab_size()
PADDING = SIZE + 3  # an id that the model has and the tokenizer has not


def _pieces(draw_sizes: list[int], ids: list[int]) -> list[list[int]]:
    pieces, start = [], 0
    for size in draw_sizes:
        pieces.append(ids[start : start + size])
        start += size
    return [p for p in [*pieces, ids[start:]] if p]


def _texts(detokenizer: Detokenizer, pieces: list[list[int]]) -> list[str]:
    return [*(detokenizer.append(piece) for piece in pieces), detokenizer.flush()]


def _stream(tokenizer: object, prompt: list[int], pieces: list[list[int]], skip: bool = True) -> list[str]:
    return _texts(IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip), pieces)


def _byte_level(prompt: list[int], pieces: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = Detokenizers(BYTE_LEVEL).begin(prompt, skip_special_tokens=skip)
    assert isinstance(detokenizer, ByteLevelDetokenizer)
    return _texts(detokenizer, pieces)


ids = st.lists(st.integers(0, PADDING), max_size=120)
noise = st.lists(st.sampled_from([*BYTE_LEVEL.encode("😀é你").ids, 200, 201, 230]), max_size=200)


@given(ids=ids | noise, sizes=st.lists(st.integers(1, 40), max_size=30), skip=st.booleans())
def test_pieces_joined_equal_the_whole_decoded(ids: list[int], sizes: list[int], skip: bool) -> None:
    prompt = BYTE_LEVEL.encode("hello the").ids
    whole = BYTE_LEVEL.decode(prompt + ids, skip_special_tokens=skip)
    assert "hello the" + "".join(_stream(BYTE_LEVEL, prompt, _pieces(sizes, ids), skip)) == whole
    assert "hello the" + "".join(_byte_level(prompt, _pieces(sizes, ids), skip)) == whole


@given(ids=ids | noise, skip=st.booleans())
def test_one_token_at_a_time_equals_the_whole_decoded(ids: list[int], skip: bool) -> None:
    pieces = _stream(BYTE_LEVEL, [0], [[i] for i in ids], skip)
    prefix = BYTE_LEVEL.decode([0], skip_special_tokens=skip)
    whole = BYTE_LEVEL.decode([0, *ids], skip_special_tokens=skip)
    assert prefix + "".join(pieces) == whole
    assert prefix + "".join(_byte_level([0], [[i] for i in ids], skip)) == whole


@given(
    words=st.lists(
        st.sampled_from(["\u2581hello", "\u2581world", "lo", ",", "\u2581", "h", "😀", "é", "你", "</s>"]), max_size=40
    ),
    sizes=st.lists(st.integers(1, 20), max_size=20),
)
@example(words=["\u2581hello"] * 6 + ["😀"] * 7, sizes=[15, 4, 14])  # the most that is held back, and a character cut
def test_sentencepiece_spaces_and_byte_tokens_survive(words: list[str], sizes: list[int]) -> None:
    ids = []
    for word in words:
        known = METASPACE.token_to_id(word)
        ids += [known] if known is not None else [METASPACE.token_to_id(f"<0x{b:02X}>") for b in word.encode()]
    prompt = [METASPACE.token_to_id(t) for t in ("<s>", "\u2581hello", ",")]
    whole = METASPACE.decode(prompt + ids, skip_special_tokens=True)
    assert "hello," + "".join(_stream(METASPACE, prompt, _pieces(sizes, ids))) == whole


def test_a_character_over_several_tokens_appears_once_it_is_whole() -> None:
    emoji = [BYTE_LEVEL.token_to_id(t) for t in BYTE_LEVEL.pre_tokenizer.pre_tokenize_str("🙃")[0][0]]
    assert len(emoji) == 4
    assert _stream(BYTE_LEVEL, [0], [[i] for i in emoji]) == ["", "", "", "🙃", ""]
    assert _byte_level([0], [[i] for i in emoji]) == ["", "", "", "🙃", ""]


def test_a_character_that_the_prompt_begins_is_the_answers_if_it_is_completed() -> None:
    emoji = [BYTE_LEVEL.token_to_id(t) for t in BYTE_LEVEL.pre_tokenizer.pre_tokenize_str("🙃")[0][0]]
    words = BYTE_LEVEL.encode("hello").ids
    special = BYTE_LEVEL.token_to_id("</s>")
    for at in (1, 2, 3):
        for skipped in ([], [special], [PADDING]):
            assert "".join(_byte_level(emoji[:at], [skipped, emoji[at:], words])) == "🙃hello"
            assert "".join(_byte_level(emoji[:at], [skipped, words])) == "hello"
            assert _byte_level(emoji[:at], [skipped]) == ["", ""]
    assert "".join(_byte_level(emoji[:2], [[emoji[2]], words])) == "hello", "it goes on, and is not completed"


def test_an_unfinished_character_is_shown_when_the_sequence_ends() -> None:
    first = BYTE_LEVEL.token_to_id(BYTE_LEVEL.pre_tokenizer.pre_tokenize_str("🙃")[0][0][0])
    assert _stream(BYTE_LEVEL, [0], [[first]]) == ["", "\ufffd"]
    assert _byte_level([0], [[first]]) == ["", "\ufffd"]


def test_other_vocabularies_are_decoded_in_context() -> None:
    assert isinstance(Detokenizers(METASPACE).begin([1], skip_special_tokens=True), IncrementalDetokenizer)


@pytest.mark.timeout(20)
def test_binary_noise_is_given_out_while_it_comes() -> None:
    """Bytes that never form a character must neither be held for ever nor be decoded again at every token."""
    byte = BYTE_LEVEL.token_to_id(BYTE_LEVEL.pre_tokenizer.pre_tokenize_str("é")[0][0][1])
    pieces = _stream(BYTE_LEVEL, [0], [[byte]] * 5000)
    assert "".join(pieces) == "\ufffd" * 5000
    assert max(map(len, pieces)) <= 40
