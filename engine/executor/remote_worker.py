"""A rank on another host, or under another parent, as its agent tells of it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from engine.executor.agent_frames import AgentStream, Ended, Stopped
from engine.executor.worker_link import WorkerLink


class RemoteWorker:
    """A `Handle`. Its frames go to the worker itself."""

    def __init__(
        self,
        rank: int,
        pid: int,
        where: str,
        agent: AgentStream,
        frames: socket.socket,
        cause_of: Callable[[int], str | None],
    ) -> None:
        """`where`: the process and its host, in words; `cause_of` a rank: what whoever placed it knows of its loss."""
        self.rank = rank
        self.pid = pid
        self.stopped_looks = 0
        self.link = WorkerLink(frames)
        self._where = where
        self._agent = agent
        self._cause_of = cause_of
        self._is_stopped = self._is_killed = False
        self._ended: str | None = None

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self._where})"

    @property
    def sentinel(self) -> int:
        return self._agent.fileno()

    def has_ended(self) -> bool:
        self._agent.read()
        while (message := self._agent.of_agent()) is not None:
            match message:
                case Stopped():
                    self._is_stopped = message.is_stopped
                case Ended():
                    self._ended = message.cause
        return self._ended is not None or self._agent.lost is not None

    def is_stopped(self) -> bool:
        return self._is_stopped

    def kill(self) -> None:
        """Without a driver its agent ends it, at the latest when the connection is found lost there."""
        self._is_killed = True
        with suppress(OSError):
            self._agent.socket.shutdown(socket.SHUT_RDWR)

    def reap(self) -> str:
        cause = self._ended
        if cause is None and self._is_killed:
            cause = "it was ended"
        elif cause is None:
            cause = f"its host was lost: {self._cause_of(self.rank) or self._agent.lost}"
        self._agent.socket.close()
        self.link.close()
        return cause
