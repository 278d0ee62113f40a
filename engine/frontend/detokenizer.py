"""Token ids to text while they arrive, so that the pieces joined equal the decoding of the whole.

Two things make this more than `decode` of each token: a character may be spread over several tokens, and decoders
treat the beginning of a text specially (SentencePiece strips its first space). So new ids are decoded behind a few ids
of context whose text is known already, and text is held back while it ends in an incomplete character.
`tokenizers.DecodeStream` follows the same idea, but has no way to flush, raises on decoders that rewrite earlier text,
and decodes again everything since the last complete character, which is quadratic on binary noise; here what is
pending is bounded.

A byte-level vocabulary (GPT-2's, and that of most models since) needs none of it: its decoder joins each token's bytes,
whatever stands beside it. There a token costs a look into a table, a tenth of what decoding takes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from engine.frontend.byte_level import bytes_of

if TYPE_CHECKING:
    import tokenizers

_INCOMPLETE = "\ufffd"
_CONTEXT = 6
_KEPT_CONTEXT = 16
"""a longer context is cut; until then a token costs one decoding, not two"""
_MAX_CONTEXT = 32
_MAX_PENDING = 32
_MAX_CHARACTER_BYTES = 4
_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """One sequence's text."""

    def append(self, token_ids: Sequence[int]) -> str:
        """Text that `token_ids` add for certain; "" while it ends in a part of a character."""
        ...

    def flush(self) -> str:
        """What is held back when the sequence has ended, incomplete characters as U+FFFD."""
        ...


class Detokenizers:
    """Of one tokenizer, which must not change any more."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        import tokenizers

        self._backend = backend
        self._byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
        self._tables = {skip: ByteLevelTable(backend, skip_special=skip) for skip in (False, True)}

    def begin(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        if self._byte_level:
            return ByteLevelDetokenizer(self._tables[skip_special_tokens], prompt_token_ids)
        return IncrementalDetokenizer(self._backend, prompt_token_ids, skip_special_tokens=skip_special_tokens)


class ByteLevelTable(dict[int, str | bytes]):
    """What tokens of a byte-level vocabulary stand for, filled as they come: bytes where they are not whole characters.
    Ids that are no token are nothing."""

    def __init__(self, backend: tokenizers.Tokenizer, *, skip_special: bool) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder().values() if skip_special else ()
        self._skipped = {token.content for token in added if token.special}

    def __missing__(self, token_id: int) -> str | bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or token in self._skipped:
            token = ""
        data = bytes_of(token)
        if data is None:
            data = token.encode()  # as the library's decoder does
        try:
            self[token_id] = data.decode()
        except UnicodeDecodeError:
            self[token_id] = data
        return self[token_id]


class ByteLevelDetokenizer:
    __slots__ = ("_borrowed", "_characters", "_table", "_within")

    def __init__(self, table: ByteLevelTable, prompt_token_ids: Sequence[int]) -> None:
        self._table = table
        self._characters = _utf8("replace")
        self._within = self._borrowed = False
        """a character has begun; it is one of the prompt, which is shown if it is completed"""
        self.append(prompt_token_ids[-_MAX_CHARACTER_BYTES:])
        self._borrowed = self._within

    def append(self, token_ids: Sequence[int]) -> str:
        found = [self._table[token] for token in token_ids]
        if not self._within and len(found) == 1 and isinstance(found[0], str):
            return found[0]
        text = self._decode(b"".join([each.encode() if isinstance(each, str) else each for each in found]))
        self._within = bool(self._characters.getstate()[0])
        return text

    def flush(self) -> str:
        text = self._decode(b"", final=True)
        self._within = self._borrowed = False
        return text

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        text = self._characters.decode(data, final)
        if not self._borrowed or not text:
            return text
        self._borrowed = False
        return text.removeprefix(_INCOMPLETE)  # the prompt's own, where nothing has completed it


class IncrementalDetokenizer:
    """For any vocabulary."""

    __slots__ = ("_backend", "_context", "_pending", "_prefix", "_skip_special")

    def __init__(
        self, backend: tokenizers.Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._backend = backend
        self._skip_special = skip_special_tokens
        self._pending: list[int] = []
        self._context: list[int] = []
        self._prefix = ""
        self._rebase(prompt_token_ids)

    def append(self, token_ids: Sequence[int]) -> str:
        self._pending.extend(token_ids)
        text = self._decode(self._context + self._pending)
        if text.endswith(_INCOMPLETE):
            return self._cut() if len(self._pending) > _MAX_PENDING else ""
        if text == self._prefix:
            # Skipped special tokens, or ids without a token. Kept while nothing precedes them: a decoder may yet keep
            # or strip a space by what comes first.
            if self._prefix or len(self._pending) > _MAX_PENDING:
                self._pending.clear()
            return ""
        new = text[len(self._prefix) :]
        if len(self._context) + len(self._pending) <= _KEPT_CONTEXT:
            # Its text is known already: the next tokens are decoded behind all of it, and nothing is decoded twice.
            self._context, self._prefix, self._pending = self._context + self._pending, text, []
        else:
            self._rebase(self._pending)
        return new

    def flush(self) -> str:
        new = self._decode(self._context + self._pending)[len(self._prefix) :] if self._pending else ""
        self._rebase(self._pending or self._context)
        return new

    def _cut(self) -> str:
        """Give out all but the last few pending ids, at a border that no character crosses.

        A UTF-8 character has at most four bytes, so one of four neighbouring borders is free: the one behind the last
        complete character, and in noise, which has none, one that makes no difference. (A decoder that joins byte
        tokens makes noise of a whole run whose end is missing, so what is complete must be tried first.)
        """
        for keep in range(1, _MAX_CHARACTER_BYTES):
            head = self._pending[:-keep]
            text = self._decode(self._context + head)
            if not text.endswith(_INCOMPLETE):
                tail = self._pending[-keep:]
                new = text[len(self._prefix) :]
                self._rebase(head)
                self._pending = tail
                return new
        whole = self._decode(self._pending)
        for keep in range(_MAX_CHARACTER_BYTES, 2 * _MAX_CHARACTER_BYTES):
            head, tail = self._pending[:-keep], self._pending[-keep:]
            if self._decode(head) + self._decode(tail) == whole:
                break
        new = self._decode(self._context + head)[len(self._prefix) :]
        self._rebase(head)
        self._pending = list(tail)
        return new

    def _rebase(self, token_ids: Sequence[int]) -> None:
        """Take the end of `token_ids` as the context of what follows, from a border between characters."""
        size = min(_CONTEXT, len(token_ids))
        while True:
            context = list(token_ids[len(token_ids) - size :])
            prefix = self._decode(context)
            if size >= min(len(token_ids), _MAX_CONTEXT) or (prefix and not prefix.startswith(_INCOMPLETE)):
                break
            size += 1
        self._context, self._prefix, self._pending = context, prefix, []

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skip_special)
        return text
