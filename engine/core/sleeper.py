"""A client whose core may end without being missed, and start again: its memory is free meanwhile, or what it serves is
another one from then on (`engine.sleeping`)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from engine.config import EngineConfig
from engine.errors import EngineError


class Sleeper(ABC):
    @property
    @abstractmethod
    def is_sleeping(self) -> bool: ...

    @abstractmethod
    def sleep(self) -> None:
        """The core ends, and its memory is free. Idempotent. Raises `ConfigError` where requests would be lost."""

    @abstractmethod
    def wake_up(self, config: EngineConfig | None = None) -> None:
        """It starts again, from now on as `config` says. Raises what starting raises, and sleeps on. Idempotent."""

    def change(self, config: EngineConfig) -> None:
        """It wakes up as `config` says, whether it slept or not. Where that does not start, all is as before, and the
        error is raised; or it sleeps, where what was before does not start any more."""
        slept = self.is_sleeping
        self.sleep()
        try:
            self.wake_up(config)
        except BaseException as error:
            if not slept:
                self._back(error)
            raise

    def _back(self, error: BaseException) -> None:
        try:
            self.wake_up()
        except EngineError as worse:
            said = f"{error}; and what was served before does not start any more, so the engine sleeps: {worse}"
            raise EngineError(said) from error
