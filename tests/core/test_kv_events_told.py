"""The front end is told what the prefix cache stores and forgets, where it asked for it."""

from __future__ import annotations

import msgspec
import pytest
from core_fakes import FakeExecutor, request, tiny_config

from engine.config import EngineConfig
from engine.core.client import CoreClient, InProcessClient, ProcessClient
from engine.core.wire import KVDigests, ResetPrefixCache, each_delta
from engine.kv_cache.hash_chain import HashChain

pytestmark = pytest.mark.timeout(120)


def telling(config: EngineConfig) -> EngineConfig:
    cache = msgspec.structs.replace(config.cache, tell_front_end=True)
    return msgspec.structs.replace(config, cache=cache)


class Mirror:
    def __init__(self, client: CoreClient) -> None:
        self.client, self.found = client, set[bytes]()

    def run(self, request_id: str, prompt_len: int) -> set[bytes]:
        """What is known to be found when the request has ended."""
        self.client.send(request(request_id, prompt_len=prompt_len))
        while True:
            outputs = self.client.recv()
            if (told := outputs.kv_events) is not None:
                self.found = (set() if told.cleared else self.found) - set(told.removed) | set(told.stored)
            if any(delta.finish_reason for delta in each_delta(outputs.deltas)):
                return self.found


@pytest.mark.parametrize("make", [InProcessClient, ProcessClient])
def test_digests_are_those_that_the_front_end_can_compute(make: type[InProcessClient | ProcessClient]) -> None:
    client = make(telling(tiny_config()), executor="core_fakes:FakeExecutor")
    client.start()
    mirror, digests = Mirror(client), HashChain(16, None).digests_of(3, list(range(50)))
    try:
        assert mirror.run("a", 50) == set(digests)
        client.send(ResetPrefixCache())
        assert mirror.run("b", 20) == set(digests[:1])
    finally:
        client.close()


def test_a_reset_of_an_idle_core_is_told_at_once() -> None:
    client = InProcessClient(telling(tiny_config()), executor="core_fakes:FakeExecutor")
    client.start()
    client.send(ResetPrefixCache())
    assert client.recv().kv_events == KVDigests(cleared=True)
    client.close()


def test_who_did_not_ask_is_told_nothing() -> None:
    client = InProcessClient(tiny_config(), executor=FakeExecutor)
    client.start()
    client.send(request("a", prompt_len=50))
    assert [client.recv().kv_events for _ in range(4)] == [None] * 4
    client.close()
