"""What the driver and the agent of a rank's host say to each other, as messages of a `FrameBuffer`."""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

from engine.errors import EngineError
from engine.executor.connections import Address
from engine.executor.frames import Frame, FrameBuffer, Kind, StreamKind, WorkerStart

T = TypeVar("T")

VERSION = 2
"""of these messages, of the streams' and of the numbers that ranks exchange"""


Memory = tuple[int, int]
"""(process, its descriptor) of memory that ranks of one node share"""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The agent is there."""

    version: int
    host: str
    """which machine it is: the kernel's boot id"""
    node: str
    """as `AgentTask.node`"""
    address: Address
    """where other ranks' agents reach it"""


class Share(msgspec.Struct, frozen=True, tag="share"):
    """Make memory for so many ranks of this node; answered by `Shared`."""

    ranks: int


class Shared(msgspec.Struct, frozen=True, tag="shared"):
    memory: Memory


class Stream(msgspec.Struct, frozen=True):
    """To another rank."""

    kind: StreamKind
    rank: int
    address: Address
    """of its agent, or the driver"""


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """Start the rank."""

    start: WorkerStart
    """but for its descriptors"""
    streams: tuple[Stream, ...] = ()
    """those that it is to have: of two ranks, the one with the larger number calls"""
    memory: Memory | None = None
    """of all ranks"""
    parts_memory: Memory | None = None
    """of those that compute a stage together"""


class Spawned(msgspec.Struct, frozen=True, tag="spawned"):
    pid: int


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The rank was stopped by a signal, or goes on."""

    is_stopped: bool


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The agent leaves."""

    cause: str
    is_orderly: bool = False
    """the rank was asked to leave"""


FromAgent = Hello | Shared | Spawned | Stopped | Ended
FromDriver = Share | Spawn
_ENCODER = msgspec.msgpack.Encoder()
_FROM_AGENT: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_FROM_DRIVER: msgspec.msgpack.Decoder[FromDriver] = msgspec.msgpack.Decoder(FromDriver)


class AgentStream:
    """Either end of the stream between them; one thread reads."""

    def __init__(self, stream: socket.socket) -> None:
        self.socket = stream
        self.lost: str | None = None
        """why nothing comes any more"""
        self._frames = FrameBuffer()

    def fileno(self) -> int:
        return self.socket.fileno()

    def tell(self, message: FromAgent | FromDriver) -> None:
        """Raises OSError where the other end has gone."""
        self.socket.sendall(Frame(Kind.MESSAGE, 0, _ENCODER.encode(message)).encode())

    def read(self) -> None:
        """What has come, without waiting."""
        while self.lost is None:
            try:
                data = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                self.lost = str(error)
                return
            if not data:
                self.lost = "it closed its connection"
            self._frames.feed(data)

    def of_agent(self) -> FromAgent | None:
        """The next of its messages that has come."""
        frame = self._frames.next()
        return None if frame is None else _decoded(_FROM_AGENT, frame)

    def of_driver(self) -> FromDriver | None:
        frame = self._frames.next()
        return None if frame is None else _decoded(_FROM_DRIVER, frame)


def _decoded(decoder: msgspec.msgpack.Decoder[T], frame: Frame) -> T:
    try:
        return decoder.decode(frame.body)
    except msgspec.DecodeError as error:
        raise EngineError(f"the other host sent what is no message ({error}); is its version another one?") from None
