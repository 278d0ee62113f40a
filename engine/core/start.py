"""From an `EngineConfig` to a loop that is ready: load, fit the KV cache into what is left, allocate, warm up."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import cast

from engine.adapters.interface import AdapterLoader
from engine.adapters.request import LoRARequest
from engine.config import EngineConfig
from engine.core.inbox import PIECES_TOOK_OVER, AdapterLoaded, GrammarCompiled, Inbox, Post
from engine.core.kv_reports import KVEventReports
from engine.core.loop import CoreLoop
from engine.core.rounds import Rounds, in_rounds
from engine.core.wire import CoreReady
from engine.errors import ConfigError
from engine.executor.interface import Executor, HoldsAdapters, HoldsPages
from engine.executor.kernels_ahead import build_ahead, check_cache
from engine.grammars.compiler import GrammarCompiler
from engine.kv_cache.kv_cache import KVCache
from engine.kv_cache.ledger import MemoryLedger, human, memory_ledger
from engine.kv_transfer.connector import EngineConnector
from engine.kv_transfer.interface import Connector
from engine.kv_transfer.layout import Layout
from engine.observability.step_profile import StepObserver
from engine.reports import LoadReport, WarmUpReport
from engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

DEFAULT_EXECUTOR = "engine.executor.default:make_executor"


def load_executor(name: str, config: EngineConfig, group_fd: int | None = None) -> Executor:
    """Make the executor that `name` ("module:callable", called with the configuration) stands for. `group_fd`: of the
    memory that replicas share, called with, too, where there is one."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"executor must read 'module:callable', got {name!r}")
    if name == DEFAULT_EXECUTOR:
        check_cache(config)
        build_ahead(config)
    factory = cast(Callable[..., Executor], getattr(importlib.import_module(module), attribute))
    return factory(config) if group_fd is None else factory(config, group_fd)


def build_core(
    config: EngineConfig,
    executor: Executor,
    inbox: Inbox | None = None,
    observer: StepObserver | None = None,
    connector: Connector | None = None,
    post: Post | None = None,
    begun: Callable[[str], None] = lambda _: None,
) -> tuple[CoreLoop, CoreReady]:
    """Bring `executor` to the point where it can serve and put a scheduler before it. `connector`: whoever moves pages
    in place of the engine's own. `post`: how news come into the inbox from other threads, where somebody has to know.
    `begun`: as `Scheduler`'s.

    Raises what loading raises (`ConfigError`, `WeightsError`, ...), and `ConfigError` when the KV cache does not fit or
    its events cannot be published where they should be.
    """
    inbox, waits = (SimpleQueue(), True) if inbox is None else (inbox, False)
    reports, post = KVEventReports(config), post or inbox.put
    own = None
    try:
        if config.kv_transfer is not None and connector is None:
            connector = own = EngineConnector(config, post, waits)
        return _build(config, executor, inbox, post, waits, observer, reports, connector, begun)
    except BaseException:
        reports.close()
        if own is not None:
            own.close()
        raise


def _build(
    config: EngineConfig,
    executor: Executor,
    inbox: Inbox,
    post: Post,
    waits: bool,
    observer: StepObserver | None,
    reports: KVEventReports,
    connector: Connector | None,
    begun: Callable[[str], None],
) -> tuple[CoreLoop, CoreReady]:
    began = time.monotonic()
    load = executor.load()
    ledger = memory_ledger(
        load=load,
        cache=config.cache,
        scheduler=config.scheduler,
        device=config.device.kind,
        replicas=config.parallel.data,
    )
    table = ledger.table()
    logger.info("memory\n%s", table)
    executor.allocate(ledger.num_blocks, ledger.num_host_blocks)
    warm_up = executor.warm_up()
    kv = _kv_cache(config, load, ledger, reports.wanted)
    reports.attach(kv)
    threads = config.device.threads if config.device.kind == "cpu" else None
    # A core in its front end's thread waits for what it compiles, and for what it fetches.
    notify = None if waits else lambda grammar: post(GrammarCompiled(grammar))
    grammars = GrammarCompiler(config.model.vocab_size, config.limits.grammars, threads, notify, executor.team())
    layout = _attached(connector, executor)
    rounds = Rounds(config.scheduler.steps_in_flight) if in_rounds(config) else None
    adapters = _adapters(config, executor, None if waits else lambda adapter: post(AdapterLoaded(adapter)))
    parts = warm_up.swap_block_s, grammars, load.exact_lengths, connector, adapters
    scheduler = Scheduler(config.scheduler, kv, *parts, begun=begun)
    ends = connector.close if isinstance(connector, EngineConnector) else lambda: None
    told = grammars.set_vocabulary, reports, rounds, ends, post
    loop = CoreLoop(scheduler, executor, config.scheduler.steps_in_flight, inbox, observer, *told)
    compiling = executor.compile_state() == "running"
    if compiling or config.parallel.ranks > 1:  # which also tells of a rank that is lost while nobody steps
        executor.watch_compilation(lambda: post(PIECES_TOOK_OVER))
    ready = CoreReady(
        num_blocks=ledger.num_blocks,
        block_size=config.cache.block_size,
        max_model_len=config.scheduler.max_model_len,
        attention_backend=load.attention_backend,
        ledger=table,
        distinct_pieces=warm_up.distinct_pieces,
        pieces_compiled=warm_up.compiled,
        startup_seconds=time.monotonic() - began,
        compiling=compiling,
        kv_layout=layout,
    )
    _log(ready, warm_up, load)
    return loop, ready


def _attached(connector: Connector | None, executor: Executor) -> Layout:
    """How the pages lie that the engine's own connector moves; empty without one."""
    if not isinstance(connector, EngineConnector):
        return {}
    if not isinstance(executor, HoldsPages):
        raise ConfigError("kv_transfer_config: this executor's KV cache is not in the core's process")
    memory = executor.kv_memory()
    connector.attach(memory)
    return memory.layout


def _adapters(
    config: EngineConfig, executor: Executor, notify: Callable[[LoRARequest], None] | None
) -> AdapterLoader | None:
    if config.lora is None:
        return None
    if not isinstance(executor, HoldsAdapters):
        raise ConfigError("enable_lora: this executor loads no adapters")
    return executor.adapters(notify)


def _log(ready: CoreReady, warm_up: WarmUpReport, load: LoadReport) -> None:
    pieces = f"{ready.distinct_pieces} distinct pieces ({ready.pieces_compiled} compiled now)"
    logger.info(
        "ready in %.1f s: %s attention, %s",
        ready.startup_seconds,
        ready.attention_backend,
        "eager until pieces are compiled" if ready.compiling else pieces,
    )
    if warm_up.graphs_captured:
        logger.info(
            "graphs: %d captured in %s (%s estimated for all), %d to be captured between steps",
            warm_up.graphs_captured,
            human(warm_up.graph_bytes),
            human(load.graph_bytes),
            warm_up.graphs_pending,
        )


def _kv_cache(config: EngineConfig, load: LoadReport, ledger: MemoryLedger, keeps_events: bool) -> KVCache:
    drafts = config.scheduler.speculation.num_speculative_tokens
    return KVCache(
        ledger.num_blocks,
        config.cache.block_size,
        config.cache.enable_prefix_caching,
        load.windows,
        max(config.scheduler.max_num_batched_tokens, config.scheduler.steps_in_flight * (1 + drafts)),
        ledger.num_host_blocks,
        keeps_events=keeps_events,
    )
