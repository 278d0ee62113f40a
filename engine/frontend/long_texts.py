"""What is asked of the process that tokenizes long texts, and what it answers (`engine.frontend.helpers`)."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import msgspec

MAKE = "engine.frontend.long_texts:encoder"
_IDS = "I"


class EncodeQuestion(msgspec.Struct, frozen=True, array_like=True):
    text: str
    add_special_tokens: bool
    max_ids: int | None
    """of more only the number is of interest"""
    literal: bool = False
    """special tokens are not looked for in it"""


class EncodeAnswer(msgspec.Struct, frozen=True, array_like=True):
    count: int = 0
    ids: bytes | None = None
    error: str | None = None

    def token_ids(self) -> list[int]:
        ids = array(_IDS)
        ids.frombytes(self.ids or b"")
        return list(ids)


def encoder(setup: bytes) -> Callable[[bytes], bytes]:
    """Of the helper process. `setup`: JSON of a `tokenizers.Tokenizer`."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(setup.decode())
    decoder = msgspec.msgpack.Decoder(EncodeQuestion)

    def answer(message: bytes) -> bytes:
        question = decoder.decode(message)
        try:
            backend.encode_special_tokens = question.literal
            ids = backend.encode(question.text, add_special_tokens=question.add_special_tokens).ids
        except BaseException as error:  # a panic of the library's is no `Exception`
            return msgspec.msgpack.encode(EncodeAnswer(error=repr(error)))
        wanted = question.max_ids is None or len(ids) <= question.max_ids
        return msgspec.msgpack.encode(EncodeAnswer(len(ids), array(_IDS, ids).tobytes() if wanted else None))

    return answer
