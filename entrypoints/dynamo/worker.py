"""Pageloom as an engine of NVIDIA Dynamo: `python -m entrypoints.dynamo MODEL …` is a worker of a Dynamo cluster.

Implements `dynamo.common.backend.engine.LLMEngine` (ai-dynamo 1.6, the extra `dynamo`): its runtime registers the
model, sends requests, watches health, publishes what the KV cache holds, and routes by it. One core a worker: Dynamo
routes among workers as our replicas would.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.common.backend.worker import WorkerConfig
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.utils.runtime import parse_endpoint
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm import ModelInput
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, WorkerUnavailable

from engine.async_engine import AsyncEngine
from engine.config import EngineArgs
from engine.core.wire import CoreStats
from engine.errors import ConfigError, CoreDiedError, InvalidRequestError, QueueFullError
from entrypoints.dynamo.requests import chunks, sampling_params
from entrypoints.options import FlexibleArgumentParser, add_engine_options, add_model, engine_args

logger = logging.getLogger(__name__)

SNAPSHOT_S = 0.25
"""how often Dynamo's router learns of the load, where it changed"""


class PageloomEngine(LLMEngine):
    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self._engine: AsyncEngine | None = None
        self._publisher: Any = None
        self._telling: Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    async def from_args(cls, argv: Sequence[str] | None = None) -> tuple[PageloomEngine, WorkerConfig]:
        """Dynamo's options and those of `engine-serve` that concern the engine; without a model, the demo model.
        Raises `ConfigError`."""
        runtime = FlexibleArgumentParser(prog="python -m entrypoints.dynamo", allow_abbrev=False)
        DynamoRuntimeArgGroup().add_arguments(runtime)
        add_model(runtime)
        runtime.add_argument("--served-model-name", help="the model's name; default: that of its directory or file")
        add_engine_options(runtime)
        options = runtime.parse_args(argv)
        config = DynamoRuntimeConfig.from_cli_args(options)
        config.validate()
        args = engine_args(options, options.model)
        if (args.data_parallel_size or 1) > 1:
            raise ConfigError("data_parallel_size: start as many workers instead; Dynamo routes among them")
        endpoint = config.endpoint or f"dyn://{config.namespace}.backend.generate"
        config.namespace, config.component, config.endpoint = parse_endpoint(endpoint)
        worker = WorkerConfig.from_runtime_config(
            config, model_name=args.model, served_model_name=args.served_model_name, model_input=ModelInput.Tokens
        )
        return cls(args), worker

    async def start(self, worker_id: int) -> EngineConfig:
        self._loop = asyncio.get_running_loop()
        self._engine = engine = AsyncEngine(self._args)
        ready = await engine.start()
        return EngineConfig(
            model=str(engine.model.path),
            served_model_name=engine.served_name,
            llm=LlmRegistration(
                context_length=engine.max_model_len,
                kv_cache_block_size=ready.block_size,
                total_kv_blocks=ready.num_blocks,
                max_num_seqs=engine.config.scheduler.max_num_seqs,
                max_num_batched_tokens=engine.config.scheduler.max_num_batched_tokens,
            ),
        )

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Raises Dynamo's own exceptions, which its frontend knows how to tell."""
        engine, generated = self._started(), dict[int, int]()
        try:
            normalize_request_token_ids(request)
            params = sampling_params(request, engine.default_sampling_params())
            prompt = {"prompt_token_ids": request["token_ids"]}
            async for output in engine.generate(prompt, params, context.id(), delta=True):
                for chunk in chunks(output, generated):
                    yield chunk
        except InvalidRequestError as error:
            raise InvalidArgument(str(error)) from error
        except QueueFullError as error:
            raise WorkerUnavailable(str(error)) from error
        except CoreDiedError as error:
            raise EngineShutdown(str(error)) from error

    async def abort(self, context: Any) -> None:
        if self._engine is not None:
            await self._engine.abort(context.id())

    async def cleanup(self) -> None:
        telling, self._telling = self._telling, None
        if telling is not None:
            telling.cancel()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.shutdown()

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Where `--kv-events-config` has them published, as a subscriber on this host reaches it."""
        events = self._started().config.kv_events
        if events is None or not events.enable_kv_cache_events or events.publisher == "null":
            return []
        address = events.endpoint.replace("*", "127.0.0.1").replace("[::]", "[::1]")
        return [ZmqSource(endpoint=address, topic=events.topic, dp_rank=0)]

    async def health_check_payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=1)
        return payload

    async def register_prometheus(self, metrics: Any) -> None:
        register_engine_registry(metrics, self._started().metrics.registry)

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """From another thread."""
        assert self._loop is not None
        self._publisher = publisher
        self._telling = asyncio.run_coroutine_threadsafe(self._tell(), self._loop)

    async def _tell(self) -> None:
        told: CoreStats | None = None
        while True:
            try:
                if (stats := self._started().stats()) is not told:
                    self._publisher.publish(0, _snapshot(stats))
                    told = stats
            except Exception:  # the router goes on with what it has
                logger.exception("the load could not be published")
            await asyncio.sleep(SNAPSHOT_S)

    def _started(self) -> AsyncEngine:
        if self._engine is None:
            raise EngineShutdown("the engine is not started, or was shut down")
        return self._engine


def _snapshot(stats: CoreStats) -> ComponentSnapshot:
    asked = stats.prefix_query_tokens
    return ComponentSnapshot(
        kv_used_blocks=stats.kv_blocks_used,
        kv_total_blocks=stats.kv_blocks_total,
        gpu_cache_usage=stats.kv_blocks_used / max(stats.kv_blocks_total, 1),
        kv_cache_hit_rate=stats.prefix_hit_tokens / asked if asked else None,
        dp_rank=0,
    )
