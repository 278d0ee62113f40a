"""Single tokens as text and as bytes, and where they stand in the text that the client gets.

A token's text by itself is not always a piece of the whole: a character may be spread over several tokens, special
tokens may not be shown, and a SentencePiece decoder strips a text's first space. Offsets that add up token texts drift
from the text at each of these; here they are counted in bytes and aligned.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING

from engine.frontend.byte_level import bytes_of

if TYPE_CHECKING:
    from engine.frontend.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """What each token of one vocabulary is by itself."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {i for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}

    def text(self, token_id: int) -> str:
        """Its leading space included; bytes that are no whole character show as U+FFFD."""
        return self._tokenizer.token_text(token_id)

    def data(self, token_id: int) -> bytes:
        """The token's bytes, exact also where they are only a part of a character."""
        text = self.text(token_id)
        piece = self._tokenizer.backend.id_to_token(token_id)
        if _INCOMPLETE not in text or piece is None:
            return text.encode()
        if (byte := _BYTE_TOKEN.fullmatch(piece)) is not None:
            return bytes([int(byte.group(1), 16)])
        data = bytes_of(piece)
        return text.encode() if data is None else data

    def special(self, token_id: int) -> bool:
        return token_id in self._special


class TextOffsets:
    """Counts, token by token, the characters of one choice's text."""

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skip_special = skip_special_tokens
        self._at = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt_token(self, token_id: int, prompt: str) -> int:
        """Offset of the next token of an echoed prompt. What the tokenizer added to it (BOS, a first space) has no
        width."""
        data = self._texts.data(token_id)
        if self._texts.special(token_id) and not prompt.startswith(self._texts.text(token_id), self._at):
            return self._at
        if self._at == 0 and data.startswith(b" ") and not prompt.startswith(" "):
            data = data[1:]
        return self._advance(data)

    def generated_token(self, token_id: int) -> int:
        """Offset of the next generated token."""
        hidden = self._skip_special and self._texts.special(token_id)
        return self._advance(b"" if hidden else self._texts.data(token_id))

    def _advance(self, data: bytes) -> int:
        start = self._at
        self._at += len(self._characters.decode(data))
        return start
