"""The alphabet that byte-level vocabularies (GPT-2's scheme) write bytes with."""

from __future__ import annotations


def _alphabet() -> dict[str, int]:
    """Printable characters stand for themselves, the others, in order, for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _alphabet()


def bytes_of(token: str) -> bytes | None:
    """What `token` stands for; None where it has a character that stands for no byte."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return None
