"""Prefill apart from decode on a virtual clock: servers of both kinds behind the router's two hops."""

from __future__ import annotations

import functools
import json
from collections import deque
from typing import Any

import msgspec

from engine.config import EngineArgs, EngineConfig
from engine.core.wire import AddRequest, SequenceDelta, StepOutputs, each_delta
from engine.kv_transfer.params import FIELD, KVTransferParams, as_answer
from entrypoints.bench.cluster.clock import Clock
from entrypoints.bench.cluster.costs import StepCosts
from entrypoints.bench.cluster.layouts import Layout
from entrypoints.bench.cluster.neighbours import Neighbours
from entrypoints.bench.cluster.simulate import Cluster, loads_and_hits
from entrypoints.bench.cluster.stages import Stages
from entrypoints.bench.cluster.transfers import Link, Transfers
from entrypoints.bench.cluster.virtual_core import VirtualCore
from entrypoints.router.servers import Server, Servers
from entrypoints.router.two_hops import about_tokens, decode_body, prefill_body


class _Hop(msgspec.Struct):
    message: AddRequest
    """as the caller sent it"""
    server: Server
    tokens: int
    """about what the router thinks that it has"""


class TwoHops:
    """What `entrypoints/router` does, with cores for servers. A server that is lost is one that computes prompts."""

    def __init__(self, prefill: list[VirtualCore], decode: list[VirtualCore]) -> None:
        self.told: deque[StepOutputs] = deque()
        self._prefill = Servers([f"prefill-{number}" for number in range(len(prefill))])
        self._decode = Servers([f"decode-{number}" for number in range(len(decode))])
        self._cores = {server.url: core for server, core in zip(self._prefill.all, prefill, strict=True)}
        self._cores |= {server.url: core for server, core in zip(self._decode.all, decode, strict=True)}
        self._prefilling: dict[str, _Hop] = {}
        self._decoding: dict[str, _Hop] = {}
        for core in prefill:
            core.hears = self._prefilled
        for core in decode:
            core.hears = self._decoded

    def send(self, message: AddRequest) -> None:
        body = prefill_body(_body(message))
        for server in self._prefill.in_order():
            self._hop(self._prefilling, message, server, about_tokens(body))
            first = msgspec.structs.replace(message, max_tokens=1, kv_transfer=KVTransferParams(do_remote_decode=True))
            self._cores[server.url].send(first)
            return
        self._go_on(message, None)

    def lose(self) -> None:
        server = self._prefill.all[0]
        server.failed()
        self._cores[server.url].lost = True
        for name in [name for name, hop in self._prefilling.items() if hop.server is server]:
            self._go_on(self._prefilling.pop(name).message, None)

    def loads_and_hits(self) -> tuple[list[int], float]:
        """Hits are those of the servers that compute prompts: what the others find, these have brought."""
        loads, _ = loads_and_hits([core.stats for core in self._cores.values()])
        _, hits = loads_and_hits([self._cores[server.url].stats for server in self._prefill.all])
        return loads, hits

    def _prefilled(self, outputs: StepOutputs) -> None:
        for delta in _ends(outputs):
            hop = self._prefilling.pop(delta.request_id)
            hop.server.prompt_tokens -= hop.tokens
            self._go_on(hop.message, delta.kv_transfer)

    def _go_on(self, message: AddRequest, handed: KVTransferParams | None) -> None:
        given = _body(message)
        body = None if handed is None else decode_body(given, json.dumps({FIELD: as_answer(handed)}).encode())
        server = self._decode.in_order()[0]
        self._hop(self._decoding, message, server, about_tokens(body or json.dumps(given).encode()))
        self._cores[server.url].send(msgspec.structs.replace(message, kv_transfer=handed))

    def _decoded(self, outputs: StepOutputs) -> None:
        for delta in _ends(outputs):
            hop = self._decoding.pop(delta.request_id)
            hop.server.prompt_tokens -= hop.tokens
        self.told.append(outputs)

    @staticmethod
    def _hop(hops: dict[str, _Hop], message: AddRequest, server: Server, tokens: int) -> None:
        hops[message.request_id] = _Hop(message, server, tokens)
        server.prompt_tokens += tokens


def prefill_apart(
    prefill: EngineConfig,
    decode: EngineConfig,
    costs: StepCosts,
    layout: Layout,
    link: Link,
    neighbours: Neighbours | None = None,
) -> Cluster:
    """`prefill`, `decode`: what such a server is started with. `neighbours`: as in `replicated`."""
    clock = Clock()
    transfers = Transfers(clock, link, decode.limits, costs.report.block_bytes)
    make = functools.partial(
        VirtualCore, costs=costs, stages=Stages(), clock=clock, connect=transfers.connect, neighbours=neighbours
    )
    computing = [make(prefill) for _ in range(layout.prefill)]
    return Cluster(clock, TwoHops(computing, [make(decode) for _ in range(layout.replicas)]))


def apart_args(args: EngineArgs) -> tuple[EngineArgs, EngineArgs]:
    """What a server that computes prompts is started with, and one that takes them over."""
    prefill, decode = (
        msgspec.structs.replace(args, kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": role})
        for role in ("kv_producer", "kv_consumer")
    )
    return prefill, decode


def _ends(outputs: StepOutputs) -> list[SequenceDelta]:
    return [delta for delta in each_delta(outputs.deltas) if delta.finish_reason is not None]


def _body(message: AddRequest) -> dict[str, Any]:
    """As a client would write it: the router goes by its size."""
    return {"prompt": message.prompt_token_ids, "max_tokens": message.max_tokens, "temperature": 0, "stream": True}
