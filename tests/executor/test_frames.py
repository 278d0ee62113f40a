from __future__ import annotations

import random

import msgspec
import pytest

from engine.core.wire import CoreFailed
from engine.executor.frames import (
    Allocate,
    Allocated,
    Close,
    Frame,
    FrameBuffer,
    Kind,
    Load,
    decode_command,
    decode_message,
    encode_message,
)


def test_frames_come_whole_however_the_bytes_come() -> None:
    random.seed(3)
    frames = [
        Frame(random.choice(list(Kind)), n << 33, random.randbytes(random.choice([0, 1, 9, 70_000]))) for n in range(40)
    ]
    stream = b"".join(frame.encode() for frame in frames)
    for most in (1 << 30, 100_000, 997):
        buffer, found, at = FrameBuffer(), [], 0
        while at < len(stream):
            size = random.randint(1, most)
            buffer.feed(stream[at : at + size])
            at += size
            while (frame := buffer.next()) is not None:
                found.append(frame)
        assert found == frames
        assert buffer.next() is None


def test_messages_travel_and_what_is_none_is_refused() -> None:
    buffer = FrameBuffer()
    commands = [Load(), Allocate(3, 4), Close()]
    messages = [Allocated(), CoreFailed(traceback="t", kind="ConfigError", message="m")]
    for each in (*commands, *messages):
        buffer.feed(encode_message(each))
    frames = [buffer.next() for _ in range(5)]
    assert all(frames)
    assert [decode_command(frame) for frame in frames[:3] if frame] == commands
    assert [decode_message(frame) for frame in frames[3:] if frame] == messages
    with pytest.raises(msgspec.ValidationError):
        decode_message(Frame(Kind.MESSAGE, 0, encode_message(Load())[13:]))
