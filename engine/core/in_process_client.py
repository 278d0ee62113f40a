"""A core in the front end's own process and thread."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable

from engine.config import EngineConfig
from engine.core.inbox import PIECES_TOOK_OVER
from engine.core.loop import CoreLoop
from engine.core.process import failure
from engine.core.sleeper import Sleeper
from engine.core.start import DEFAULT_EXECUTOR, build_core, load_executor
from engine.core.wire import AddRequest, CoreReady, StepOutputs, ToCore, UnpinPrefix, Vocabulary
from engine.errors import ConfigError, CoreDiedError, EngineError
from engine.executor.interface import Executor
from engine.machine import release_free_memory
from engine.observability.step_profile import StepObserver


class InProcessClient(Sleeper):
    """A core in this process and thread, for debugging and offline use: it turns only while someone receives."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: str | Callable[[EngineConfig], Executor] = DEFAULT_EXECUTOR,
        observer: StepObserver | None = None,
    ) -> None:
        """`executor`: a function of the configuration, or "module:callable" that names one. `observer` is told what
        the core spends its time on."""
        self._config = config
        self._make_executor = executor
        self._observer = observer
        self._executor: Executor | None = None
        self._core: CoreLoop | None = None
        self._died: str | None = None
        self._asleep = False
        self._of_all: dict[str, AddRequest | Vocabulary] = {}
        """what a core that wakes up has to be told: pins by their names, the vocabulary under "" """
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._sent = asyncio.Event()
        self._compiled = threading.Event()

    def start(self) -> CoreReady:
        make = self._make_executor
        self._executor = load_executor(make, self._config) if isinstance(make, str) else make(self._config)
        try:
            self._core, ready = build_core(self._config, self._executor, observer=self._observer)
            if ready.compiling:
                self._executor.watch_compilation(self._end_of_compilation)
            else:
                self._compiled.set()
        except BaseException:
            self.close()
            raise
        return ready

    def send(self, message: ToCore) -> None:
        self._alive().inbox.put(message)
        if isinstance(message, Vocabulary):
            self._of_all[""] = message
        elif isinstance(message, AddRequest) and message.pin is not None:
            self._of_all[message.pin] = message
        elif isinstance(message, UnpinPrefix):
            self._of_all.pop(message.name, None)
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._sent.set)

    @property
    def has_work(self) -> bool:
        """`recv` would not be in vain."""
        return self._alive().has_work

    def recv(self) -> StepOutputs:
        """Turns the loop until there is something to tell. `EngineError` when there is no work to wait for."""
        while self._alive().has_work:
            outputs = self._turn()
            if outputs is not None:
                return outputs
        raise EngineError("recv from an in-process core that has no work: send a request first")

    async def recv_async(self) -> StepOutputs:
        """Runs each turn on the event loop, which it holds up for the length of a step."""
        self._event_loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0)
            self._sent.clear()
            if not self._alive().has_work:
                await self._sent.wait()
                continue
            outputs = self._turn()
            if outputs is not None:
                return outputs

    def wait_compiled(self) -> None:
        self._alive()
        self._compiled.wait()

    def _end_of_compilation(self) -> None:
        """In the executor's thread."""
        core = self._core
        if core is not None:
            core.inbox.put(PIECES_TOOK_OVER)
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._sent.set)
        self._compiled.set()

    def stalled(self) -> str | None:
        return None  # who asks runs on the thread that steps

    @property
    def is_sleeping(self) -> bool:
        return self._asleep

    def sleep(self) -> None:
        """As `Sleeper.sleep`; not while requests run, which live in the core alone."""
        if not self._asleep:
            if self._alive().is_busy:
                raise ConfigError("sleep: requests run, and this core is in their callers' process")
            while self._alive().has_work:  # a step that was planned for those that have ended
                self._turn()
            self.close()
            self._asleep = True
            self._compiled.clear()
            gc.collect()  # a model is full of circles
            release_free_memory()

    def wake_up(self, config: EngineConfig | None = None) -> None:
        if self._asleep:
            before, self._config = self._config, config or self._config
            try:
                self.start()
            except BaseException:
                self._config = before
                raise
            self._asleep = False
            for message in self._of_all.values():
                self._alive().inbox.put(message)

    def abandon(self) -> None:
        """Nothing: this process is the core."""

    def close(self) -> None:
        core, executor = self._core, self._executor
        self._core = self._executor = None
        if core is not None:
            core.close()
        if executor is not None:
            executor.close()

    def _alive(self) -> CoreLoop:
        if self._died is not None:
            raise CoreDiedError(self._died)
        if self._asleep:
            raise EngineError("the engine sleeps: wake it up first")
        if self._core is None:
            raise CoreDiedError("the core is not running: not started, or closed")
        return self._core

    def _turn(self) -> StepOutputs | None:
        core = self._alive()
        try:
            outputs = core.turn(wait=False)
        except Exception as error:
            self._died = failure(error).traceback
            raise CoreDiedError(self._died) from error
        if core.stopped:
            self._died = "the core was shut down"
        return outputs
