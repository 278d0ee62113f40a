"""Filling in the middle: what stands before a gap and behind it, between the marks that code models are taught with.

A family is known by its marks alone. Tokenizers are shared among models, so one that has them may never have been
taught to use them; nobody can tell that from here. Marks are put in by their ids: what a text spells like one is text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from engine.errors import InvalidRequestError
from engine.frontend.texts import too_many_tokens
from engine.frontend.tokenizer import Tokenizer
from engine.limits import Limits
from engine.request import SamplingParams


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """Marks, each one token; of several spellings the first that the tokenizer has."""

    name: str
    before: tuple[str, ...]
    behind: tuple[str, ...]
    middle: tuple[str, ...] = ()
    """behind which the answer comes; (): behind what stands before the gap"""
    behind_first: bool = False
    """what follows the gap is told first (SPM)"""
    project: tuple[str, ...] = ()
    """before a project's name"""
    file: tuple[str, ...] = ()
    """before each file's name, which stands in a line of its own"""
    ends: tuple[str, ...] = ()
    """further tokens that end an answer; none of the others belongs into one, either"""


FAMILIES = (
    Family(  # Qwen, Gemma, Granite 3
        name="fim",
        before=("<|fim_prefix|>",),
        behind=("<|fim_suffix|>",),
        middle=("<|fim_middle|>",),
        project=("<|repo_name|>", "<|reponame|>"),
        file=("<|file_sep|>", "<|file_separator|>", "<|filename|>"),
        ends=("<|fim_pad|>", "<|endoftext|>"),
    ),
    Family(  # StarCoder, Granite Code, Stable Code; SantaCoder has dashes
        name="starcoder",
        before=("<fim_prefix>", "<fim-prefix>"),
        behind=("<fim_suffix>", "<fim-suffix>"),
        middle=("<fim_middle>", "<fim-middle>"),
        project=("<repo_name>", "<reponame>"),
        file=("<file_sep>", "<filename>"),
        ends=("<fim_pad>", "<fim-pad>", "<|endoftext|>"),
    ),
    Family(
        name="codellama",
        before=("▁<PRE>", "<PRE>"),
        behind=("▁<SUF>", "<SUF>"),
        middle=("▁<MID>", "<MID>"),
        ends=("▁<EOT>", "<EOT>"),
    ),
    Family(
        name="deepseek",
        before=("<｜fim▁begin｜>",),
        behind=("<｜fim▁hole｜>",),
        middle=("<｜fim▁end｜>",),
        ends=("<|EOT|>",),
    ),
    Family(name="mistral", before=("[PREFIX]",), behind=("[SUFFIX]",), behind_first=True, ends=("[MIDDLE]",)),
    Family(
        name="seed",
        before=("<[fim-prefix]>",),
        behind=("<[fim-suffix]>",),
        middle=("<[fim-middle]>",),
        behind_first=True,
    ),
)

_PROJECT, _FILE = "project", "file"
"""names of those whose own nobody tells"""
_LINE = "\n"


class Gap(NamedTuple):
    """Token ids around it, marks of other files among them."""

    before: list[int]
    behind: list[int]
    files: list[int]


class FillIn:
    """Of one tokenizer, in its family's order. Make it with `fill_in_of`."""

    def __init__(self, tokenizer: Tokenizer, family: Family, limits: Limits, max_model_len: int) -> None:
        self.family = family
        self._tokenizer = tokenizer
        self._limits = limits
        self._max_model_len = max_model_len
        self._max_ids = limits.contexts_translated * max_model_len
        self._before, self._behind = _mark(tokenizer, family.before), _mark(tokenizer, family.behind)
        self._middle = _mark(tokenizer, family.middle)
        self._file, self._project = _mark(tokenizer, family.file), _mark(tokenizer, family.project)
        self._start = _start_of_texts(tokenizer)
        self._line = tokenizer.encode(_LINE, add_special_tokens=False)
        marks = (family.before, family.behind, family.middle, family.project, family.file, family.ends)
        self._stop_token_ids = sorted({i for names in marks for i in _ids(tokenizer, names)})
        """what ends an answer beside EOS: a model that is done goes on with the next file, or with another gap"""
        self._marks = frozenset(name for names in marks for name in names)
        special = (i for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special)
        self._not_of_texts = frozenset([*special, *self._stop_token_ids])

    def params(self, params: SamplingParams) -> SamplingParams:
        """Answers end at the family's marks, too."""
        if params.ignore_eos:
            return params
        return replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *self._stop_token_ids])

    async def read(
        self,
        before: str | Sequence[int],
        behind: str | list[int],
        files: Sequence[tuple[str, str]] = (),
        fields: tuple[str, str, str] = ("prompt", "suffix", "files"),
    ) -> Gap:
        """`behind`: ids as of `encode_behind`, where it is that of several gaps. `files`: others of the project, (name,
        text), the most important last. `fields` name the three in errors. Raises `InvalidRequestError`."""
        self._limits.check("files", len(files), fields[2])
        first = await self._encode(before, fields[0]) if isinstance(before, str) else list(before)
        last = await self.encode_behind(behind, fields[1]) if isinstance(behind, str) else behind
        return Gap(first, last, await self._encode_files(files, fields[2]))

    def check_size(self, gap: Gap, field: str) -> None:
        """Before its prompt is made. Raises `InvalidRequestError` where that does not fit the context."""
        count = len(self._start) + 2 + len(self._middle) + sum(map(len, gap))
        if count >= self._max_model_len:
            raise too_many_tokens(count, self._max_model_len, field)

    def prompt(self, gap: Gap, room: int | None = None) -> list[int]:
        """`room`: for so many tokens; what is farthest from the gap is left out, of other files the first."""
        before, behind, files = gap if room is None else self._cut(gap, room)
        if not self._file:  # told as if they stood in the same file
            before, files = files + before, []
        first, last = [*self._before, *before], [*self._behind, *behind]
        if self.family.behind_first:
            first, last = last, first
        return [*self._start, *files, *first, *last, *self._middle]

    def _cut(self, gap: Gap, room: int) -> Gap:
        """A quarter of the room is kept for what stands behind the gap, if there is as much."""
        free = max(room - len(self._start) - 2 - len(self._middle), 0)
        behind = gap.behind[: max(free // 4, free - len(gap.before))]
        left = free - len(behind)
        before = gap.before[max(len(gap.before) - left, 0) :]
        left -= len(before)
        return Gap(before, behind, gap.files[max(len(gap.files) - left, 0) :])

    async def _encode(self, text: str, field: str) -> list[int]:
        self._tokenizer.bound.check(text, field, contexts=self._limits.contexts_translated)
        ids = await self._ids_of(self._tokenizer, text, field)
        if self._not_of_texts.isdisjoint(ids):
            return ids
        return await self._ids_of(await asyncio.to_thread(self._tokenizer.literal, self._marks), text, field)

    async def _ids_of(self, tokenizer: Tokenizer, text: str, field: str) -> list[int]:
        return await tokenizer.encode_async(text, add_special_tokens=False, field=field, max_ids=self._max_ids)

    async def encode_behind(self, text: str, field: str) -> list[int]:
        """SentencePiece puts a space before a text, which must not stand behind a gap: it is put before a line's end
        there, which is taken away. Raises `InvalidRequestError`."""
        if len(self._line) != 2:
            return await self._encode(text, field)
        ids = await self._encode(_LINE + text, field)
        return ids[2:] if ids[:2] == self._line else await self._encode(text, field)

    async def _encode_files(self, files: Sequence[tuple[str, str]], field: str) -> list[int]:
        if not files:
            return []
        told = [f"{name}{_LINE}{text}{_LINE}" for name, text in files]
        self._tokenizer.bound.check("".join(told), field, contexts=self._limits.contexts_translated)
        if not self._file:
            return await self._encode("".join(told), field)
        pieces = [(self._file, text) for text in (*told, f"{_FILE}{_LINE}")]
        if self._project:
            pieces.insert(0, (self._project, f"{_PROJECT}{_LINE}"))
        found: list[int] = []
        for mark, text in pieces:
            found += [*mark, *await self.encode_behind(text, field)]
            self._tokenizer.check_count(len(found), self._max_ids, field)
            await asyncio.sleep(0)  # short ones are tokenized on the event loop
        return found


def fill_in_of(tokenizer: Tokenizer, limits: Limits, max_model_len: int) -> FillIn | None:
    """None: it has no family's marks."""
    for family in FAMILIES:
        needed = (family.before, family.behind, *([family.middle] if family.middle else []))
        if all(_mark(tokenizer, names) for names in needed):
            return FillIn(tokenizer, family, limits, max_model_len)
    return None


def no_fill_in(field: str) -> InvalidRequestError:
    known = ", ".join(family.before[0] for family in FAMILIES)
    return InvalidRequestError(
        f"{field}: this model cannot fill in: its tokenizer has none of the marks that models are taught it with "
        f"({known}, ...)",
        field,
    )


def _ids(tokenizer: Tokenizer, names: Sequence[str]) -> list[int]:
    return [i for name in names if (i := tokenizer.backend.token_to_id(name)) is not None]


def _mark(tokenizer: Tokenizer, names: Sequence[str]) -> list[int]:
    """One token, or none."""
    return _ids(tokenizer, names)[:1]


def _start_of_texts(tokenizer: Tokenizer) -> list[int]:
    """BOS, where texts begin with it."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:at]
