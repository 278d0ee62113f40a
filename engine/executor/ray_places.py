"""Ranks as Ray places them: a placement group has a bundle for each, or for each stage, and an actor in it is a
rank's agent.

Ray places, watches and cleans up; what ranks say to each other does not go through it.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.executor.agent import AgentTask, serve_rank
from engine.executor.connections import Address
from engine.executor.ranks import Parts
from engine.executor.remote_ranks import RemoteRanks

logger = logging.getLogger(__name__)

_CAUSE_S = 1.0
_NODE = "ray.io/node-id"


class RankAgent:
    """The actor."""

    def serve(self, task: bytes) -> str:
        """Until the rank has ended; why."""
        return serve_rank(msgspec.json.decode(task, type=AgentTask)).cause


def ray_ranks(config: EngineConfig, parts: Parts) -> RemoteRanks:
    """For `MultiprocExecutor`. Raises `ConfigError` where there is no Ray, or no cluster."""
    return RemoteRanks(config, parts, RayPlaces(config))


class RayPlaces:
    """See `remote_ranks.Places`. The driver's own rank has a bundle on this node, which keeps its cores for it."""

    def __init__(self, config: EngineConfig) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "distributed_executor_backend='ray' needs the package of pip install 'pageloom[ray]'"
            ) from None
        self._ray: Any = ray
        self._strategy, self._threads = config.parallel.ray_placement, config.device.threads
        self._bundle_ranks = 1 if config.parallel.pipeline == 1 else config.parallel.tensor
        """those of a stage are on one node"""
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}
        """of each rank's actor, what its end will bring"""
        self._connected = not ray.is_initialized()
        if self._connected:
            _connect(ray)
        self._here = str(ray.get_runtime_context().get_node_id())

    def host(self) -> str:
        return str(self._ray.util.get_node_ip_address())

    def place(self, ranks: Sequence[int], driver: Address, secret: bytes, timeout_s: float) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        nodes = self._reserve(1 + len(ranks), timeout_s)
        actor = self._ray.remote(RankAgent)
        for rank in ranks:
            bundle = rank // self._bundle_ranks
            task = AgentTask(rank, driver, secret.hex(), timeout_s, node=nodes[bundle])
            placed = actor.options(
                num_cpus=self._threads,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            ).remote()
            self._actors[rank] = placed
            self._ends[rank] = placed.serve.remote(msgspec.json.encode(task))

    def check(self) -> None:
        ended, _ = self._ray.wait([*self._ends.values()], timeout=0)
        for rank, end in self._ends.items():
            if end in ended:
                raise EngineError(f"rank {rank}: its actor ended while the ranks were started: {self._words(end)}")

    def node(self) -> str:
        return self._here

    def cause_of(self, rank: int) -> str | None:
        ended, _ = self._ray.wait([self._ends[rank]], timeout=_CAUSE_S)
        return self._words(self._ends[rank]) if ended else None

    def close(self) -> None:
        if not self._ray.is_initialized():
            return
        for actor in self._actors.values():
            self._ray.kill(actor, no_restart=True)
        self._actors = {}
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
            self._group = None
        if self._connected:
            self._ray.shutdown()

    def _reserve(self, ranks: int, timeout_s: float) -> list[str]:
        """The node of each bundle. Raises `EngineError` where the cluster does not have them in time."""
        size, cpus = ranks // self._bundle_ranks, float(self._threads * self._bundle_ranks)
        where: list[dict[str, str]] = [{_NODE: self._here}, *({} for _ in range(size - 1))]
        self._group = self._ray.util.placement_group(
            [{"CPU": cpus} for _ in range(size)], strategy=self._strategy, bundle_label_selector=where
        )
        if not self._group.wait(timeout_s):
            of_stage = f", each for the {self._bundle_ranks} ranks of a stage," if self._bundle_ranks > 1 else ""
            raise EngineError(
                f"the Ray cluster did not give {ranks} ranks their places within {timeout_s:g} s: asked for are "
                f"{size} bundles of {cpus:g} CPUs{of_stage} ({self._strategy}), the first of them on this node "
                f"({self._here[:12]}); the cluster has {self._inventory()}"
            )
        table = self._ray.util.placement_group_table(self._group)
        return [str(table["bundles_to_node_id"][bundle]) for bundle in range(size)]

    def _inventory(self) -> str:
        """What each node has, in words."""
        free: Mapping[str, Mapping[str, float]] = self._ray._private.state.available_resources_per_node()
        nodes = []
        for node in self._ray.nodes():
            if node["Alive"]:
                name, total = str(node["NodeID"]), node["Resources"].get("CPU", 0)
                nodes.append(f"{name[:12]}: {total:g} CPUs, {free.get(name, {}).get('CPU', 0):g} free")
        return "; ".join(nodes) or "no node"

    def _words(self, end: Any) -> str:
        """Why an actor is no more, in a line."""
        try:
            return str(self._ray.get(end, timeout=_CAUSE_S))
        except Exception as error:  # Ray's, of many kinds
            text = " ".join(str(error).split())
            return f"{type(error).__name__}: {text[:500]}"


def _connect(ray: Any) -> None:
    from ray._private.services import canonicalize_bootstrap_address_or_die as address_of

    with _handlers_kept():
        try:
            # By its address: where Ray 2.60 finds a cluster of several nodes itself, it drops a driver's new actors.
            ray.init(address=address_of("auto"), configure_logging=False)
        except ConnectionError as error:
            raise ConfigError(
                "distributed_executor_backend='ray': no Ray cluster runs here; start one with ray start --head, or set "
                f"RAY_ADDRESS ({' '.join(str(error).split())[:200]})"
            ) from None


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Signals go on to mean what they did: Ray would have its own way with SIGTERM."""
    in_main = threading.current_thread() is threading.main_thread()
    kept: list[tuple[int, Any]] = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        yield
    finally:
        restore: Callable[[int, Any], Any] = signal.signal
        for number, handler in kept if in_main else []:
            restore(number, handler)
