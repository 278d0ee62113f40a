"""What whoever runs an `AsyncEngine` does with it while it serves, beside asking it."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from engine.config import EngineArgs
from engine.core.wire import ResetPrefixCache, SetLogLevel
from engine.front_ends.client import FrontEndClient
from engine.profiles import Profiles
from engine.replicas.client import ReplicatedClient
from engine.serving import Serving
from engine.sleeping import is_sleeping, ready_with, sleeper, with_weights

logger = logging.getLogger(__name__)


class Administered(ABC):
    _args: EngineArgs

    @abstractmethod
    def _require(self) -> Serving:
        """Raises `EngineError` where it has not started."""

    @abstractmethod
    def check_health(self) -> None: ...

    async def sleep(self) -> None:
        """As `LLM.sleep`; requests that run wait, with those that come, until `wake_up`, and go on where they were."""
        await asyncio.to_thread(sleeper(self._require().client, apart=True).sleep)
        logger.info("asleep: all memory is free, and requests wait")

    async def wake_up(self) -> None:
        """Raises what starting raises, and sleeps on."""
        await asyncio.to_thread(sleeper(self._require().client, apart=True).wake_up)
        logger.info("awake")

    @property
    def is_sleeping(self) -> bool:
        return is_sleeping(self._require().client)

    @property
    def is_restarting(self) -> bool:
        """A core died, and until another one has started requests wait."""
        client = self._require().client
        return isinstance(client, ReplicatedClient | FrontEndClient) and client.is_restarting

    async def update_weights(self, path: str) -> None:
        """As `LLM.update_weights`. Requests that run go on behind what they have been given, with the new weights."""
        engine = self._require()
        config = await asyncio.to_thread(with_weights, self._args, engine.model, engine.config, path)
        try:
            await asyncio.to_thread(sleeper(engine.client, apart=True).change, config)
        except Exception as error:
            logger.error("the weights of %s were not taken: %s", config.model.path, error)
            raise
        if not isinstance(engine.client, FrontEndClient):  # which tells all front ends alike
            engine.config, engine.ready = config, await asyncio.to_thread(ready_with, engine.ready, config)
        logger.info("the weights of %s are served from now on", config.model.path)

    @property
    def profiles(self) -> Profiles:
        """Of the steps of the core: `start_async`, `stop_async`."""
        return self._require().profiles

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes that no sequence uses."""
        self.check_health()
        self._require().client.send(ResetPrefixCache())

    async def scale(self, replicas: int, drain_timeout_s: float | None = None) -> None:
        """As `ReplicatedClient.scale`. Raises `ConfigError`, too, for an engine that was made with one core."""
        await asyncio.to_thread(self._require().replicated.scale, replicas, drain_timeout_s)

    def set_log_level(self, level: int) -> None:
        """Of the cores' logs, as in `logging`; those that start later log what this process does."""
        self._require().client.send(SetLogLevel(level=level))
