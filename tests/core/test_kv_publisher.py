"""What the prefix cache stores and forgets, as a subscriber reads it who knows only vLLM's published schema."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from core_fakes import FakeExecutor, request, tiny_config
from kv_consumer import AllBlocksCleared, BlockRemoved, BlockStored, Consumer, KVEventBatch

from engine.config import EngineConfig, KVEventsConfig
from engine.core.client import InProcessClient, ProcessClient
from engine.core.kv_publisher import BATCHES_AT_ONCE, KVEventPublisher, endpoint_of_rank
from engine.core.wire import ResetPrefixCache, each_delta
from engine.errors import ConfigError
from engine.kv_cache.events import Cleared, KVEvent, Removed, Stored
from engine.kv_cache.hash_chain import HashChain
from engine.layer_groups import Chunk

pytestmark = pytest.mark.timeout(120)


def publishing(directory: Path, **settings: Any) -> EngineConfig:
    events = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{directory}/events",
        replay_endpoint=f"ipc://{directory}/replay",
        **settings,
    )
    return msgspec.structs.replace(tiny_config(), kv_events=events)


@pytest.fixture
def consumer(tmp_path: Path) -> Iterator[Consumer]:
    consumer = Consumer(tmp_path, topic="kv@pod@model")
    yield consumer
    consumer.close()


class Published:
    """A publisher without an engine, whose subscriber is there."""

    def __init__(self, directory: Path, consumer: Consumer, **settings: Any) -> None:
        self.publisher = KVEventPublisher(publishing(directory, topic="kv@pod@model", **settings))
        self.publisher.start([None, 7, Chunk(8)])
        self.consumer, self.first = consumer, 0
        while not consumer.events.poll(50):  # until the subscription has arrived
            self.publisher.publish([Cleared()])
        self.sent = self.publisher._next
        while consumer.next()[0] < self.sent - 1:
            pass

    def publish(self, events: list[KVEvent]) -> None:
        self.publisher.publish(events)


def test_events_are_told_as_vllm_tells_them(tmp_path: Path, consumer: Consumer) -> None:
    published = Published(tmp_path, consumer)
    digests = [bytes(24) + index.to_bytes(8, "big") for index in (2**64 - 1, 5, 6)]
    published.publish(
        [
            Stored(False, 0, digests[:2], None, list(range(32)), "salt \udc80"),
            Stored(True, 1, digests[2:], digests[1], list(range(16)), None),
            Removed(False, 2, digests[:1]),
            Cleared(),
        ]
    )
    number, batch = consumer.next()
    assert (number, batch.data_parallel_rank) == (published.sent, 0) and batch.ts > 1.7e9
    assert batch.events == [
        BlockStored(
            [2**64 - 1, 5], None, list(range(32)), 16, None, "GPU", None, [("salt ?",), None], 0, "full_attention"
        ),
        BlockStored([6], 5, list(range(16)), 16, None, "CPU", None, [None], 1, "sliding_window", 7),
        BlockRemoved([2**64 - 1], "GPU", 2),
        AllBlocksCleared(),
    ]
    published.publisher.close()


def test_what_was_missed_is_sent_again_as_far_as_it_is_kept(tmp_path: Path, consumer: Consumer) -> None:
    """Also right behind rubbish, more often than a queue of ZeroMQ's usual length would take."""
    published = Published(tmp_path, consumer, buffer_steps=3000)
    first, count = published.sent, 4000
    for index in range(count):
        published.publish([Removed(False, 0, [index.to_bytes(32, "big")] * 200)])
    assert [consumer.next()[0] for _ in range(count)] == list(range(first, first + count)), "in order, without a gap"
    consumer.send_rubbish()
    consumer.send_too_much()
    again = consumer.replay(0)
    assert [number for number, _ in again] == list(range(first + count - 3000, first + count))
    assert again[-1][1].events == [BlockRemoved([count - 1] * 200, "GPU", 0)]
    assert [number for number, _ in consumer.replay(first + count - 2)] == [first + count - 2, first + count - 1]
    assert consumer.replay(first + count) == []
    published.publisher.close()


def test_a_full_queue_drops_and_the_gap_shows(tmp_path: Path, consumer: Consumer) -> None:
    published = Published(tmp_path, consumer, max_queue_size=3)
    held, go = threading.Event(), threading.Event()
    told = published.publisher._told

    def hold(event: KVEvent) -> Any:
        held.set()
        assert go.wait(60)
        return told(event)

    published.publisher._told = hold  # type: ignore[method-assign]
    published.publish([Cleared()])
    assert held.wait(60)
    for _ in range(10):
        published.publish([Cleared()])
    go.set()
    numbers = [consumer.next()[0] for _ in range(4)]
    published.publish([Cleared()])
    numbers.append(consumer.next()[0])
    assert numbers == [published.sent + index for index in (0, 1, 2, 3, 11)]
    published.publisher.close()


def test_what_cannot_be_told_costs_its_batch_alone(tmp_path: Path, consumer: Consumer) -> None:
    published = Published(tmp_path, consumer)
    published.publish([Removed(False, 99, [])])
    published.publish([Stored(False, 99, [bytes(32)], None, [], None)])
    published.publish([Cleared()])
    assert [consumer.next()[0] for _ in range(2)] == [published.sent, published.sent + 2]
    published.publisher.close()


def test_all_that_was_published_is_sent_before_the_end(tmp_path: Path, consumer: Consumer) -> None:
    published = Published(tmp_path, consumer)
    count = 3 * BATCHES_AT_ONCE
    for _ in range(count):
        published.publish([Cleared()])
    published.publisher.close()
    published.publisher.close()
    assert [consumer.next()[0] for _ in range(count)][-1] == published.sent + count - 1
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-events"]


@pytest.mark.parametrize("make", [InProcessClient, ProcessClient])
def test_an_engine_publishes_what_its_cache_does(
    make: type[InProcessClient | ProcessClient], tmp_path: Path, consumer: Consumer
) -> None:
    """The sequence number tells whether the subscription came late; what was missed is asked for again."""
    client = make(publishing(tmp_path, topic="kv@pod@model"), executor="core_fakes:FakeExecutor")
    client.start()
    digests = HashChain(16, None).digests_of(3, list(range(50)))
    wanted = {int.from_bytes(digest[-8:], "big") for digest in digests}
    client.send(request("a", prompt_len=50))
    while not any(delta.finish_reason for delta in each_delta(client.recv().deltas)):
        pass
    client.send(ResetPrefixCache())
    client.send(request("b", prompt_len=20))
    while not any(delta.finish_reason for delta in each_delta(client.recv().deltas)):
        pass
    batches: list[tuple[int, KVEventBatch]] = []
    while sum(isinstance(e, BlockStored) for _, batch in batches for e in batch.events) < 2:
        batches = consumer.replay(0)
    stored, cleared, again = [event for _, batch in batches for event in batch.events]
    assert isinstance(stored, BlockStored) and set(stored.block_hashes) == wanted
    assert (stored.token_ids, stored.block_size, stored.medium) == (list(range(48)), 16, "GPU")
    assert isinstance(cleared, AllBlocksCleared)
    assert isinstance(again, BlockStored) and again.token_ids == list(range(16))
    client.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-events"]


@pytest.mark.parametrize("make", [InProcessClient, ProcessClient])
@pytest.mark.parametrize("taken", ["endpoint", "replay_endpoint"])
def test_a_port_that_is_taken_is_refused_at_the_start(make: type[InProcessClient | ProcessClient], taken: str) -> None:
    with socket.socket() as holder, socket.socket() as free:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        free.bind(("0.0.0.0", 0))
        ports = {"endpoint": free.getsockname()[1], taken: holder.getsockname()[1]}
        free.close()
        endpoints = {name: f"tcp://*:{port}" for name, port in ports.items()}
        events = KVEventsConfig(enable_kv_cache_events=True, **endpoints)
        config = msgspec.structs.replace(tiny_config(), kv_events=events)
        client = make(config, executor="core_fakes:FakeExecutor")
        with pytest.raises(ConfigError, match=rf"{taken} 'tcp://\*:{ports[taken]}' cannot be bound: Address already"):
            client.start()
        client.close()


def test_a_start_that_fails_lets_go_of_the_endpoints() -> None:
    with socket.socket() as free:
        free.bind(("0.0.0.0", 0))
        endpoint = f"tcp://*:{free.getsockname()[1]}"
    events = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint)
    config = msgspec.structs.replace(tiny_config(), kv_events=events)
    failed = InProcessClient(config, executor="core_fakes:NotFitting")
    with pytest.raises(ConfigError, match="9 GiB") as held:
        failed.start()
    client = InProcessClient(config, executor=FakeExecutor)
    client.start()
    client.close()
    assert held.value is not None


def test_a_file_that_somebody_listens_to_is_refused_and_our_own_goes_with_us(tmp_path: Path) -> None:
    file = tmp_path / "events"
    events = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{file}")
    config = msgspec.structs.replace(tiny_config(), kv_events=events)
    client = InProcessClient(config, executor=FakeExecutor)
    client.start()
    assert file.exists()
    second = InProcessClient(config, executor=FakeExecutor)
    with pytest.raises(ConfigError, match="cannot be bound: Address already in use"):
        second.start()
    second.close()
    assert file.exists()
    client.close()
    assert not file.exists()


def test_each_replica_has_ports_of_its_own() -> None:
    assert endpoint_of_rank("tcp://*:5557", 0) == "tcp://*:5557"
    assert endpoint_of_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert endpoint_of_rank("tcp://[::]:5557", 1) == "tcp://[::]:5558"
    assert endpoint_of_rank("ipc:///tmp/events", 2) == "ipc:///tmp/events_dp2"
