"""What the executor and the processes of its other ranks say to each other, over one stream socket each.

A frame is a header, the kind and a body: a step's plan, masks or tokens as bytes (`engine.step.encode_step`), or a
message as msgpack. Nothing is pickled.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Literal, NamedTuple

import msgspec

from engine.adapters.request import LoRARequest
from engine.config import EngineConfig
from engine.core.wire import CoreFailed
from engine.reports import LoadReport, WarmUpReport

StreamKind = Literal["sums", "parts", "states"]
"""between all ranks, those that compute a stage together, and a stage and the next one"""


class RankEnds(msgspec.Struct, frozen=True, kw_only=True):
    """The descriptors by which a rank reaches the others."""

    memory: int = -1
    """of all ranks; -1: they have streams"""
    parts_memory: int = -1
    """of those that compute a stage together; -1: they have streams, or there is nobody else"""
    before: tuple[int, int] | None = None
    after: tuple[int, int] | None = None
    """`SharedEnd`s of a rank that computes a stage: where states come from, and go to"""
    streams: dict[StreamKind, dict[int, int]] = {}
    """by the rank at the other end"""

    def descriptors(self) -> list[int]:
        """All of them."""
        found = [self.memory, self.parts_memory, *(self.before or ()), *(self.after or ())]
        found += [each for of_kind in self.streams.values() for each in of_kind.values()]
        return [each for each in found if each >= 0]


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker needs to know; one line of JSON on its stdin."""

    config: EngineConfig
    """its own: the device and the cores are those of its rank"""
    rank: int
    driver_pid: int
    socket_fd: int
    ends: RankEnds = RankEnds()
    make_group: str
    make_socket_group: str
    """"module:callable": a `joining.MakeGroup` and a `joining.MakeSocketGroup`"""
    executor: str
    """"module:callable": a `rank.MakeExecutor`"""
    log_level: int
    log_mark: str = ""
    """as `CoreStart.log_mark`"""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Answered by `Loaded`."""


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    """Answered by `Allocated`."""

    num_blocks: int
    num_host_blocks: int


class WarmUp(msgspec.Struct, frozen=True, tag="warm_up"):
    """Answered by `WarmedUp`."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Answered by `LoadedAdapter`, while steps go on. No row of a step in flight has the slot."""

    adapter: LoRARequest
    slot: int
    anew: bool = False
    """its files are read, whatever is kept of it"""


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The worker leaves."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    report: LoadReport


class Allocated(msgspec.Struct, frozen=True, tag="allocated"):
    block_bytes: list[int] = []
    """of each cache, where rank 0 reads them, too (`CacheConfig.pages_fd`)"""


class WarmedUp(msgspec.Struct, frozen=True, tag="warmed_up"):
    report: WarmUpReport


class LoadedAdapter(msgspec.Struct, frozen=True, tag="loaded_adapter"):
    adapter: LoRARequest
    problem: str | None
    """why it is not there"""
    digest: str = ""
    """of its files"""


Command = Load | Allocate | WarmUp | LoadAdapter | Close
Answer = Loaded | Allocated | WarmedUp | LoadedAdapter
Message = Answer | CoreFailed
"""of a worker. `CoreFailed`: it leaves"""


class Kind(IntEnum):
    MESSAGE = 0
    PLAN = 1
    MASKS = 2
    TOKENS = 3
    """what a step sampled that the worker has computed"""


class Frame(NamedTuple):
    kind: Kind
    number: int
    """of a plan: how many have been sent before it"""
    body: bytes

    def encode(self) -> bytes:
        return _HEADER.pack(len(self.body), self.kind, self.number) + self.body


_HEADER = struct.Struct("<IBQ")


def encode_message(message: Command | Message) -> bytes:
    """The whole frame."""
    return Frame(Kind.MESSAGE, 0, _ENCODER.encode(message)).encode()


def decode_command(frame: Frame) -> Command:
    """Raises `msgspec.DecodeError` for what is none."""
    return _COMMANDS.decode(frame.body)


def decode_message(frame: Frame) -> Message:
    """As `decode_command`."""
    return _MESSAGES.decode(frame.body)


class FrameBuffer:
    """Bytes as they come, and the frames that are complete among them."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def next(self) -> Frame | None:
        """None: the next one is not complete."""
        if len(self._bytes) < _HEADER.size:
            return None
        size, kind, number = _HEADER.unpack_from(self._bytes)
        end = _HEADER.size + size
        if len(self._bytes) < end:
            return None
        body = bytes(memoryview(self._bytes)[_HEADER.size : end])
        del self._bytes[:end]
        return Frame(Kind(kind), number, body)


_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_MESSAGES: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
