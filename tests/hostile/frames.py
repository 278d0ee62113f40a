"""Damaged messages to the core: every byte of a real one may be another, be gone, or be there many times."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from engine.core.wire import AbortRequests, AddRequest, BeamParams, Follower, ResetPrefixCache, ToCore, UnpinPrefix
from engine.step import RowParams

MOST_TOKENS = 4
"""that a frame which is still a request may ask for: it is to break things, not to fill the queue"""


def _whole() -> list[bytes]:
    params = RowParams(seed=7, top_p=0.9, logit_bias={5: 1.0}, bad_words=[[3, 4]], stop_token_ids=[0], logprobs=1)
    request = AddRequest(
        request_id="forged",
        prompt_token_ids=[1, 2, 3, 4],
        params=params,
        max_tokens=2,
        followers=[Follower(request_id="forged-too", seed=9)],
        cache_salt="salt",
    )
    search = msgspec.structs.replace(request, beams=BeamParams(width=2, length_penalty=0.5))
    pin = msgspec.structs.replace(request, followers=[], pin="forged")
    messages = [request, search, pin, AbortRequests(request_ids=["forged"]), UnpinPrefix(name="x"), ResetPrefixCache()]
    return [msgspec.msgpack.encode(message) for message in messages]


def _damaged(rng: random.Random, frame: bytearray) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(frame) + 1)
        match rng.randrange(5):
            case 0:
                frame[at : at + 1] = rng.randbytes(1)
            case 1:
                del frame[at : at + rng.randrange(1, 9)]
            case 2:
                frame[at:at] = frame[: rng.randrange(1, 64)]
            case 3:
                frame[at : at + 1] = rng.choice(
                    (b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7, b"\xcb\x7f\xf8", b"\x91")
                )
            case _:
                frame[at:at] = bytes([rng.choice((0x91, 0x81, 0xC0, 0xDF))]) * rng.choice((1, 3, 2000))
    return bytes(frame)


def _is_harmless_noise(frame: bytes) -> bool:
    """Not what the front end itself may say to end everything, nor real work in bulk."""
    try:
        message = msgspec.msgpack.decode(frame, type=ToCore)
    except Exception:
        return True
    if isinstance(message, AddRequest):
        return message.max_tokens <= MOST_TOKENS
    return not type(message).__name__.startswith("Shutdown")


def damaged_frames(number: int, seed: int = 0) -> Iterator[bytes]:
    """`number` of them; the first is nested 100,000 deep."""
    rng = random.Random(seed)
    whole = _whole()
    yield b"\x91" * 100_000
    left = number - 1
    while left > 0:
        frame = _damaged(rng, bytearray(rng.choice(whole)))
        if _is_harmless_noise(frame):
            left -= 1
            yield frame
