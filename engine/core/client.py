"""How the front end talks to a core: one interface, a core in this process (`in_process_client`) or in one of its own.

`ProcessClient` serves both worlds: `recv` for a plain thread, `recv_async` for an event loop, over the same sockets.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import msgspec
import zmq

from engine import errors
from engine.child import is_stopped
from engine.config import EngineConfig
from engine.core.begun import Begun
from engine.core.in_process_client import InProcessClient
from engine.core.liveness import Liveness
from engine.core.outbox import Outbox
from engine.core.start import DEFAULT_EXECUTOR
from engine.core.supervision import CoreHandle, SocketDirectory
from engine.core.waiting import wait, wait_async
from engine.core.wire import AddRequest, CoreFailed, CoreReady, FromCore, Heartbeat, Shutdown, StepOutputs, ToCore
from engine.errors import CoreDiedError, EngineError
from engine.observability.logs import child_mark

__all__ = ["CoreClient", "InProcessClient", "ProcessClient"]

logger = logging.getLogger(__name__)

LAST_FRAMES_MS = 100
"""after a core's death: how long its last frames may take from the kernel's buffer to us"""
STOP_GRACE_S = 5.0
STACK_DUMP_S = 1.0


class CoreClient(Protocol):
    """Send from any thread; receive from one thread, or one task, at a time."""

    def start(self) -> CoreReady:
        """Start the core and wait until it can serve. Raises what made it fail, as the same type where it is ours."""
        ...

    def send(self, message: ToCore) -> None:
        """Never blocks. The death of a core is told by `recv`; after that, `send` raises `CoreDiedError` too. Raises
        `QueueFullError` for a request where too many messages are under way; the core knows nothing of it then."""
        ...

    def recv(self) -> StepOutputs:
        """The next outputs, in order. Raises `CoreDiedError`; its message's last line is the root cause."""
        ...

    async def recv_async(self) -> StepOutputs:
        """As `recv`; cancelling it loses nothing."""
        ...

    def wait_compiled(self) -> None:
        """Return once no compilation goes on behind the serving core. For the receiving thread, instead of `recv`."""
        ...

    def stalled(self) -> str | None:
        """Why the core, which has work, seems to make no progress, long before it counts as dead; or None."""
        ...

    def abandon(self) -> None:
        """Kill the core where it stands, also while `start` waits for it; whoever waits raises. From any thread and
        from a signal handler; `close` frees the rest."""
        ...

    def close(self) -> None:
        """Stop the core at once and free everything; idempotent."""
        ...


class ProcessClient:
    """A core in a process of its own, supervised. A client starts one core, once; after its death make a new client."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: str = DEFAULT_EXECUTOR,
        hang_timeout_s: float = 300.0,
        heartbeat_s: float = 1.0,
        cpus: Sequence[int] | None = None,
        group_fd: int | None = None,
    ) -> None:
        """A core that neither beats nor turns for `hang_timeout_s` although it has work counts as dead: a single step
        must take less. `executor`: "module:callable", imported in the core and called with the configuration. `cpus`:
        the logical ones that the core and all that it starts may run on; None: wherever this process may. `group_fd`:
        of the memory that it shares with other replicas; it is the caller's, and needed until `start` returns."""
        if hang_timeout_s < 2 * heartbeat_s:
            raise errors.ConfigError(
                f"hang_timeout_s ({hang_timeout_s}) must be at least two heartbeats ({heartbeat_s} s each)"
            )
        self._config = config
        self._executor = executor
        self._hang_timeout_s = hang_timeout_s
        self._heartbeat_s = heartbeat_s
        self._cpus = cpus
        self._group_fd = group_fd
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        self._died: str | None = None
        self._compiling = False
        self._kept: deque[StepOutputs] = deque()
        """what `wait_compiled` received for `recv`"""
        self._ready = False
        self._begun: Begun | None = None
        self._abandoned = False
        self._closed = False
        self._started = False

    def start(self) -> CoreReady:
        if self._started:
            raise EngineError("a ProcessClient starts one core: make a new client for another")
        if self._abandoned:
            raise CoreDiedError("the start was abandoned")
        self._started = True
        self._directory = SocketDirectory()
        self._context = zmq.Context()
        self._receiver = self._context.socket(zmq.PULL)
        self._sender = self._context.socket(zmq.PUSH)
        for socket in (self._receiver, self._sender):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, self._config.limits.frames)
            socket.setsockopt(zmq.RCVHWM, self._config.limits.frames)
        self._receiver.bind(self._directory.from_core)
        self._handle = CoreHandle(
            self._config,
            self._directory,
            executor=self._executor,
            heartbeat_s=self._heartbeat_s,
            hang_timeout_s=self._hang_timeout_s,
            log_level=logger.getEffectiveLevel(),
            log_mark=child_mark(),
            cpus=self._cpus,
            group_fd=self._group_fd,
        )
        if self._abandoned:  # meanwhile, by another thread that saw no handle
            self._handle.kill()
        self._finalizer = weakref.finalize(self, _free, self._handle, self._context, self._directory)
        self._liveness = Liveness(self._hang_timeout_s, time.monotonic())
        self._outbox = self._outbox_of(self._sender)
        try:
            return self._await_ready()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the core."""
        return self._handle.pid

    @property
    def socket_directory(self) -> str:
        """Where the sockets are while the core runs."""
        return self._directory.path

    def send(self, message: ToCore) -> None:
        self._check_open()
        self._outbox.send(self._encoder.encode(message), refusable=isinstance(message, AddRequest))

    def _outbox_of(self, sender: zmq.Socket[bytes]) -> Outbox:
        liveness, full = self._liveness, self._config.limits.message("frames")
        return Outbox(sender, full, lambda: liveness.sent(time.monotonic()), liveness.not_sent)

    def recv(self) -> StepOutputs:
        while (outputs := self.poll()) is None:
            wait([self])
        return outputs

    async def recv_async(self) -> StepOutputs:
        while (outputs := self.poll()) is None:
            await wait_async([self])
        return outputs

    def poll(self) -> StepOutputs | None:
        """As `recv`, but None where nothing has come."""
        message = self._kept.popleft() if self._kept else self._next()
        return message if isinstance(message, StepOutputs) else None

    def wait_compiled(self) -> None:
        while self.compiling:
            message = self._next()
            if isinstance(message, StepOutputs):
                self._kept.append(message)
            else:
                wait([self])

    @property
    def compiling(self) -> bool:
        """As far as the core has told."""
        return self._compiling

    @property
    def receiver(self) -> zmq.Socket[bytes]:
        """For `engine.core.waiting`."""
        return self._receiver

    @property
    def sentinel(self) -> int:
        """For `engine.core.waiting`."""
        return self._handle.sentinel

    @property
    def wait_s(self) -> float:
        """Until the next look at the heartbeats. An idle core owes none, but another thread may send meanwhile."""
        return self._hang_timeout_s / 4 if self._liveness.idle else self._heartbeat_s

    @property
    def idle(self) -> bool:
        """It owes nothing, as far as it has told."""
        return self._liveness.idle

    def begun(self) -> Begun:
        """Which requests it had taken up, when it has died; before `close`."""
        return self._begun or Begun(self._directory.path)

    def stalled(self) -> str | None:
        if not self._ready or self._closed or self._died is not None:
            return None
        if is_stopped(self._handle.pid):
            return "it was stopped by a signal"
        return self._liveness.stalled(time.monotonic(), compiling=self._compiling)

    def abandon(self) -> None:
        self._abandoned = True
        if hasattr(self, "_handle"):
            self._handle.kill()
            self._begun = self.begun()
            self._directory.remove()

    def close(self) -> None:
        if self._closed or not self._started:
            return
        self._closed = True
        runs = self._ready and self._died is None and not self._handle.wait_end(0)
        if runs and not (self._tell_end() and self._handle.wait_end(STOP_GRACE_S)):
            logger.warning("the core did not stop within %g s and was killed", STOP_GRACE_S)
        if hasattr(self, "_finalizer"):
            self._finalizer()
        else:  # the start failed before there was a process
            self._context.destroy(linger=0)
            self._directory.remove()

    def _tell_end(self) -> bool:
        with suppress(errors.QueueFullError):
            self._outbox.send(self._encoder.encode(Shutdown()), refusable=True)
            return True
        return False

    def _await_ready(self) -> CoreReady:
        while True:
            message = self._next()
            if isinstance(message, CoreReady):
                # Connecting from this side gives the socket its queue at once: `send` never finds it without a peer.
                self._sender.connect(self._directory.to_core)
                self._ready = True
                return message
            if message is None:
                wait([self])

    def _next(self) -> StepOutputs | CoreReady | None:
        """What has arrived, or None when there is nothing now. What a core sent before it died precedes the error."""
        self._check_open()
        message = self._take()
        if message is None and self._handle.wait_end(0):
            # Dead, but its last frames may still be in the kernel's buffer.
            message = self._take(LAST_FRAMES_MS)
            if message is None:
                raise self._death()
        if message is None and (verdict := self._liveness.verdict(time.monotonic())) is not None:
            raise self._hung(verdict)
        return message

    def _take(self, timeout_ms: int = 0) -> StepOutputs | CoreReady | None:
        """The next message that is not a heartbeat."""
        self._outbox.flush()
        while True:
            try:
                frame = self._receiver.recv(zmq.NOBLOCK)
            except zmq.Again:
                if timeout_ms and self._receiver.poll(timeout_ms):
                    continue
                return None
            try:
                message = self._decoder.decode(frame)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self._dead(f"sent a frame that does not decode, so outputs are lost: {error}") from error
            now = time.monotonic()
            match message:
                case Heartbeat():
                    self._liveness.beat(message, now)
                case CoreFailed():
                    raise self._failed(message)
                case _:
                    if not (isinstance(message, StepOutputs) and message.aside):  # told while a step computes
                        self._liveness.progressed(now)
                    self._compiling = (message.stats if isinstance(message, StepOutputs) else message).compiling
                    return message

    def _check_open(self) -> None:
        if self._died is not None:
            raise CoreDiedError(self._died)
        if self._closed or not self._started:
            raise CoreDiedError("the core is not running: not started, or closed")

    def _death(self) -> CoreDiedError:
        self._handle.destroy()
        return self._dead(self._handle.exit_cause())

    def _hung(self, verdict: str) -> CoreDiedError:
        self._handle.dump_stacks()
        self._handle.wait_end(STACK_DUMP_S)
        return self._dead(verdict)

    def _failed(self, message: CoreFailed) -> EngineError:
        self._dead(message.traceback)
        known = getattr(errors, message.kind or "", None)
        if not self._ready and isinstance(known, type) and issubclass(known, EngineError):
            return known(message.message)
        return CoreDiedError(self._died)

    def _dead(self, cause: str) -> CoreDiedError:
        self._handle.destroy()
        self._died = self._handle.report(cause)
        return CoreDiedError(self._died)


def _free(handle: CoreHandle, context: zmq.Context[zmq.Socket[bytes]], directory: SocketDirectory) -> None:
    handle.destroy()
    context.destroy(linger=0)
    directory.remove()
