"""Prompts around a gap: each family's marks in its order, as its authors write them out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tiny_front import byte_level_tokenizer, metaspace_tokenizer
from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from engine.errors import InvalidRequestError
from engine.frontend.fill_in import FillIn, fill_in_of
from engine.frontend.tokenizer import Tokenizer
from engine.frontend.tokenizer_source import TokenizerDescription
from engine.limits import Limits
from engine.request import SamplingParams

CONTEXT = 512
BEFORE, BEHIND = "def f(x):\n  ", "\n  return y  # hello"
FILES = (("a.py", "the fox"), ("b/c.py", "the dog\n"))


def tokenizer_of(
    backend: Backend, marks: tuple[str, ...], *, special: bool, bos: bool = True, context: int = CONTEXT
) -> Tokenizer:
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    if bos:
        backend.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    described = TokenizerDescription(
        backend=backend.to_str(),
        vocab_size=backend.get_vocab_size(),
        eos_token_id=backend.token_to_id("</s>"),
        special_tokens={},
        chat_template=None,
    )
    return Tokenizer(described, "made here", max_model_len=context)


def made(marks: tuple[str, ...], limits: Limits = Limits(), **how: Any) -> tuple[FillIn, Tokenizer]:  # noqa: B008
    tokenizer = tokenizer_of(byte_level_tokenizer(), marks, **{"special": True, **how})
    fill_in = fill_in_of(tokenizer, limits, CONTEXT)
    assert fill_in is not None
    return fill_in, tokenizer


def filled(fill_in: FillIn, files: tuple[tuple[str, str], ...] = (), room: int | None = None) -> list[int]:
    return fill_in.prompt(asyncio.run(fill_in.read(BEFORE, BEHIND, files)), room)


@pytest.mark.parametrize(
    ("marks", "written"),
    [
        (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>"),
        (("<fim_prefix>", "<fim_middle>", "<fim_suffix>"), "<fim_prefix>{P}<fim_suffix>{S}<fim_middle>"),
        (("<fim-prefix>", "<fim-middle>", "<fim-suffix>"), "<fim-prefix>{P}<fim-suffix>{S}<fim-middle>"),
        (("<PRE>", "<SUF>", "<MID>", "<EOT>"), "<PRE>{P}<SUF>{S}<MID>"),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>{P}<｜fim▁hole｜>{S}<｜fim▁end｜>"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]{S}[PREFIX]{P}"),
        (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), "<[fim-suffix]>{S}<[fim-prefix]>{P}<[fim-middle]>"),
    ],
)
@pytest.mark.parametrize(("special", "bos"), [(True, True), (False, False)])
def test_each_family_is_told_as_it_was_taught(marks: tuple[str, ...], written: str, special: bool, bos: bool) -> None:
    fill_in, tokenizer = made(marks, special=special, bos=bos)
    assert filled(fill_in) == tokenizer.encode(written.format(P=BEFORE, S=BEHIND))
    ends = fill_in.params(SamplingParams(stop_token_ids=[7])).stop_token_ids
    assert ends is not None and set(ends) == {7, *(tokenizer.backend.token_to_id(mark) for mark in marks)}
    assert fill_in.params(SamplingParams(ignore_eos=True)).stop_token_ids is None


def test_other_files_stand_before_the_one_with_the_gap_where_there_is_a_mark_for_them() -> None:
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>")
    told = "a.py\nthe fox\n", "b/c.py\nthe dog\n\n"
    gap = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{BEHIND}<|fim_middle|>"
    fill_in, tokenizer = made(marks)
    with_marks = f"<|repo_name|>project\n<|file_sep|>{told[0]}<|file_sep|>{told[1]}<|file_sep|>file\n{gap}"
    assert filled(fill_in, FILES) == tokenizer.encode(with_marks)
    assert filled(fill_in) == tokenizer.encode(gap)
    plain, tokenizer = made(marks[:3])
    without = "".join(told)
    expected = tokenizer.encode(f"<|fim_prefix|>{without}")
    expected += tokenizer.encode(f"{BEFORE}<|fim_suffix|>{BEHIND}<|fim_middle|>", add_special_tokens=False)
    assert filled(plain, FILES) == expected


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("padding", [0, 70_000])
def test_a_text_that_spells_a_mark_is_text(special: bool, padding: int) -> None:
    """Also a long one, which a helper process tokenizes."""
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>", "<|fim_pad|>")
    tokenizer = tokenizer_of(byte_level_tokenizer(), marks, special=special, context=100_000)
    fill_in = fill_in_of(tokenizer, Limits(), 100_000)
    assert fill_in is not None
    text = "x" * padding + "a " + " ".join((*marks, "<s>", "</s>")) + " b"
    try:
        gap = asyncio.run(fill_in.read(text, text, [(text, text)]))
    finally:
        tokenizer.close()
    ids = [tokenizer.backend.token_to_id(mark) for mark in (*marks, "<s>", "</s>")]
    assert tokenizer.decode(gap.before, skip_special_tokens=False) == text == tokenizer.decode(gap.behind)
    assert [fill_in.prompt(gap).count(i) for i in ids] == [1, 1, 1, 2, 1, 0, 1, 0]
    files = tokenizer.decode(gap.files, skip_special_tokens=False)
    assert files == f"<|repo_name|>project\n<|file_sep|>{text}\n{text}\n<|file_sep|>file\n"
    assert tokenizer.encode(marks[0], add_special_tokens=False) == ids[:1], "elsewhere they are read as before"


def test_token_ids_may_stand_before_the_gap() -> None:
    fill_in, tokenizer = made(("[PREFIX]", "[SUFFIX]"))
    ids = tokenizer.encode(BEFORE, add_special_tokens=False)
    assert fill_in.prompt(asyncio.run(fill_in.read(ids, BEHIND))) == filled(fill_in)


def test_sentencepiece_puts_no_space_behind_the_gap() -> None:
    backend = metaspace_tokenizer()
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    marks = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    tokenizer = tokenizer_of(backend, marks, special=True)
    fill_in = fill_in_of(tokenizer, Limits(), CONTEXT)
    assert fill_in is not None
    pieces = [backend.id_to_token(i) for i in fill_in.prompt(asyncio.run(fill_in.read("he", "lo")))]
    assert pieces == ["<s>", "▁<PRE>", "▁", "h", "e", "▁<SUF>", "<0x6C>", "<0x6F>", "▁<MID>"]


def test_what_is_farthest_from_the_gap_is_left_out() -> None:
    marks = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<file_sep>")
    fill_in, tokenizer = made(marks)
    whole = filled(fill_in, FILES)
    gap = asyncio.run(fill_in.read(BEFORE, BEHIND, FILES))
    for room in range(4, len(whole) + 3):
        cut = fill_in.prompt(gap, room)
        assert len(cut) == min(room, len(whole))
        bos, first, last, middle = (tokenizer.backend.token_to_id(t) for t in ("<s>", *marks[:1], marks[2], marks[1]))
        assert cut[0] == bos and cut[-1] == middle
        files, before = cut[1 : cut.index(first)], cut[cut.index(first) + 1 : cut.index(last)]
        behind = cut[cut.index(last) + 1 : -1]
        assert gap.files[len(gap.files) - len(files) :] == files
        assert gap.before[len(gap.before) - len(before) :] == before and gap.behind[: len(behind)] == behind
        assert not files or (before, behind) == (gap.before, gap.behind)
        assert len(behind) >= min(len(gap.behind), (room - 4) // 4)


def test_models_that_were_taught_no_marks_fill_in_nothing() -> None:
    for marks in ((), ("<fim_prefix>", "<fim_suffix>"), ("[SUFFIX]",), ("<PRE>", "<｜fim▁hole｜>", "<fim-middle>")):
        assert fill_in_of(tokenizer_of(byte_level_tokenizer(), marks, special=True), Limits(), CONTEXT) is None


def test_all_that_is_told_has_a_bound() -> None:
    fill_in, _ = made(("[PREFIX]", "[SUFFIX]"), Limits(files=2, contexts_translated=1))

    def refused(*told: Any) -> str:
        with pytest.raises(InvalidRequestError) as error:
            asyncio.run(fill_in.read(*told, fields=("a", "b", "c")))  # type: ignore[misc]
        return str(error.value.field)

    long = "x" * 20_000
    assert refused("", "", [("", "")] * 3) == "c" and refused("", "", [("x", long)]) == "c"
    assert refused(long, "") == "a" and refused("", long) == "b"
    assert refused("\ud83d", "") == "a" and refused("", "\ud83d") == "b" and refused("", "", [("\ud83d", "")]) == "c"
