"""What the driver and the agent of a rank's host say to each other, as messages of a `FrameBuffer`."""

from __future__ import annotations

import socket
from typing import TypeVar

import msgspec

from engine.errors import EngineError
from engine.executor.connections import Address
from engine.executor.frames import Frame, FrameBuffer, Kind, WorkerStart

T = TypeVar("T")

VERSION = 1
"""of these messages, of the streams' and of the numbers that ranks exchange"""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The agent is there."""

    version: int
    host: str
    """which machine it is: the kernel's boot id"""
    address: Address
    """where other ranks' agents reach it"""


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """Start the rank."""

    start: WorkerStart
    """but for its descriptors"""
    peers: tuple[Address, ...] = ()
    """of the agents, by rank; the first is the driver's own. (): ranks share memory"""
    memory: tuple[int, int] | None = None
    """(process, its descriptor) of the memory that ranks of the driver's host share"""


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


FromAgent = Hello | Spawned | Stopped | Ended
_ENCODER = msgspec.msgpack.Encoder()
_FROM_AGENT: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_SPAWN: msgspec.msgpack.Decoder[Spawn] = msgspec.msgpack.Decoder(Spawn)


class AgentStream:
    """Either end of the stream between them; one thread reads."""

    def __init__(self, stream: socket.socket) -> None:
        self.socket = stream
        self.lost: str | None = None
        """why nothing comes any more"""
        self._frames = FrameBuffer()

    def fileno(self) -> int:
        return self.socket.fileno()

    def tell(self, message: FromAgent | Spawn) -> None:
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

    def of_driver(self) -> Spawn | None:
        frame = self._frames.next()
        return None if frame is None else _decoded(_SPAWN, frame)


def _decoded(decoder: msgspec.msgpack.Decoder[T], frame: Frame) -> T:
    try:
        return decoder.decode(frame.body)
    except msgspec.DecodeError as error:
        raise EngineError(f"the other host sent what is no message ({error}); is its version another one?") from None
