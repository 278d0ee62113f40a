"""The loop's order of things, over the real scheduler and a fake device."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from queue import SimpleQueue

import msgspec
import pytest
from core_fakes import TOKEN, FakeExecutor, request, tiny_config
from thread_cpu import assert_idle

from engine.config import EngineConfig
from engine.core.client import CoreClient, InProcessClient
from engine.core.inbox import PIECES_TOOK_OVER, STATS_CHANGED
from engine.core.loop import MAX_EMPTY_PLANS, MESSAGES_A_TURN, CoreLoop
from engine.core.start import build_core
from engine.core.wire import (
    AbortRequests,
    AddRequest,
    CoreStats,
    ResetPrefixCache,
    SequenceDelta,
    SetLogLevel,
    Shutdown,
    StartProfile,
    StepOutputs,
    StopProfile,
    each_delta,
)
from engine.errors import ConfigError, CoreDiedError, EngineError
from engine.step import StepPlan, StepResult

pytestmark = pytest.mark.timeout(120)


class Held(FakeExecutor):
    """Its second step ends when it is let go."""

    def __init__(self, config: EngineConfig) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        super().__init__(config)

    def compute(self, plan: StepPlan) -> StepResult:
        if plan.step_id == 1:
            self.began.set()
            assert self.go.wait(60)
        return super().compute(plan)


class StuckScheduler:
    """Claims to have work and plans nothing."""

    has_work = is_busy = True

    def add(self, request: AddRequest) -> None: ...

    def abort(self, request_ids: list[str]) -> list[SequenceDelta]:
        return []

    def plan(self) -> StepPlan | None:
        return None

    def end_failed(self) -> list[SequenceDelta]:
        return []

    def masks(self) -> None:
        return None

    def complete(self, result: StepResult) -> list[SequenceDelta]:
        return []

    def stats(self) -> CoreStats:
        return CoreStats(waiting=5)

    def reset_prefix_cache(self) -> int:
        return 0


def finish(client: CoreClient, ids: set[str]) -> dict[str, SequenceDelta]:
    """Receive until all of `ids` ended; one merged delta per request, plus the check that each ended once."""
    tokens: dict[str, list[int]] = defaultdict(list)
    ended: dict[str, SequenceDelta] = {}
    while ids - ended.keys():
        for delta in each_delta(client.recv().deltas):
            assert delta.request_id not in ended
            tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                ended[delta.request_id] = delta
    return {i: msgspec.structs.replace(d, token_ids=tokens[i]) for i, d in ended.items()}


def run_one_request(async_scheduling: bool, max_tokens: int = 6) -> list[tuple[str, int]]:
    config = tiny_config(async_scheduling=async_scheduling)
    executor = FakeExecutor(config)
    loop, _ = build_core(config, executor)
    loop.inbox.put(request("a", max_tokens))
    while loop.has_work:
        loop.turn(wait=False)
    executor.close()
    return executor.log


def test_one_step_ahead_submits_the_next_step_before_it_collects_the_last():
    log = run_one_request(async_scheduling=True)
    for step in range(5):
        assert log.index(("submit", step + 1)) < log.index(("collect", step))
    for step in range(4):
        assert log.index(("submit", step + 2)) > log.index(("collect", step))
    assert len(log) == 12


def test_without_async_scheduling_nothing_is_in_flight_while_the_host_plans():
    log = run_one_request(async_scheduling=False)
    assert log == [(what, step) for step in range(6) for what in ("submit", "collect")]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_requests_in_process_get_all_their_tokens(async_scheduling):
    client = InProcessClient(tiny_config(async_scheduling=async_scheduling), executor="core_fakes:FakeExecutor")
    ready = client.start()
    assert (ready.num_blocks, ready.block_size, ready.attention_backend) == (2048, 16, "fake")
    assert "2048 blocks" in ready.ledger
    ids = {f"r{i}" for i in range(20)}
    for i, request_id in enumerate(sorted(ids)):
        client.send(request(request_id, max_tokens=i + 1))
    ended = finish(client, ids)
    for i, request_id in enumerate(sorted(ids)):
        assert ended[request_id].token_ids == [TOKEN] * (i + 1)
        assert ended[request_id].finish_reason == "length"
    client.close()
    assert not [t for t in threading.enumerate() if t.name == "fake-device"]


def test_refused_requests_fail_alone_and_say_why():
    client = InProcessClient(tiny_config(max_waiting=1, max_num_seqs=1), executor="core_fakes:FakeExecutor")
    client.start()
    client.send(request("good", max_tokens=3))
    client.send(request("good too", max_tokens=3))
    client.send(request("one too many", max_tokens=3))
    client.send(request("too long", prompt_len=5000))
    ended = finish(client, {"good", "good too", "one too many", "too long"})
    assert ended["good"].finish_reason == "length"
    assert (ended["one too many"].finish_reason, ended["one too many"].error_kind) == ("error", "queue_full")
    assert (ended["too long"].finish_reason, ended["too long"].error_kind) == ("error", "invalid")
    assert "4096" in (ended["too long"].error or "")
    client.close()


def test_an_aborted_request_ends_at_once_and_its_blocks_are_free():
    client = InProcessClient(tiny_config(), executor="core_fakes:FakeExecutor")
    client.start()
    client.send(request("a", max_tokens=1000))
    client.send(request("b", max_tokens=3))
    client.recv()
    client.send(AbortRequests(request_ids=["a", "unknown"]))
    client.send(ResetPrefixCache())
    assert finish(client, {"a", "b"})["a"].finish_reason == "abort"
    client.send(request("c"))
    outputs = client.recv()
    while not any(delta.finish_reason for delta in each_delta(outputs.deltas)):
        outputs = client.recv()
    assert outputs.stats.kv_blocks_used == 0
    client.close()


class Unprofitable(FakeExecutor):
    """Has a profiler that fails."""

    is_profiling = False

    def start_profile(self, path: str, steps: int, core_seconds: object, done: object) -> None:
        raise RuntimeError("no profiler is left")

    def end_profile(self, done: Callable[[], None]) -> None:
        done()


@pytest.mark.parametrize(
    ("executor", "said"), [(FakeExecutor, "makes no profiles"), (Unprofitable, "no profiler is left")]
)
def test_a_profile_that_cannot_be_costs_nothing_else(executor, said, caplog):
    device = executor(tiny_config())
    loop, _ = build_core(tiny_config(), device)
    for place, order in enumerate([StartProfile(path="/nowhere", steps=3), StopProfile()]):
        loop.inbox.put(order)
        outputs = loop.turn()
        assert outputs is not None and not outputs.stats.profiling and outputs.stats.profile_orders == place + 1
    assert said in caplog.text
    loop.inbox.put(request("a", max_tokens=3))
    ended = False
    while not ended:
        outputs = loop.turn()
        ended = outputs is not None and any(delta.finish_reason for delta in each_delta(outputs.deltas))
    loop.close()
    device.close()


def test_the_level_of_its_log_is_set():
    device = FakeExecutor(tiny_config())
    loop, _ = build_core(tiny_config(), device)
    before = logging.getLogger().level
    try:
        for level in (logging.DEBUG, logging.ERROR):
            loop.inbox.put(SetLogLevel(level=level))
            loop.turn(wait=False)
            assert logging.getLogger().level == level
    finally:
        logging.getLogger().setLevel(before)
    loop.close()
    device.close()


def test_where_compiled_pieces_took_over_nothing_is_known_of_what_steps_cost():
    """Forecasts would stand on steps of before, several times as long, until a hundred others were seen."""
    config = tiny_config()
    device = FakeExecutor(config)
    loop, _ = build_core(config, device)
    costs = loop._scheduler._costs
    loop.inbox.put(request("a", 6))
    while loop.has_work:
        loop.turn(wait=False)
    assert costs.decode_s > 0.0 and costs.prompt_token_s > 0.0 and costs.rows_s()[0] > 0.0
    loop.inbox.put(STATS_CHANGED)
    assert loop.turn(wait=False) is not None and costs.decode_s > 0.0, "a profile has ended"
    loop.inbox.put(PIECES_TOOK_OVER)
    assert loop.turn(wait=False) is not None, "it is told at once"
    assert (costs.decode_s, costs.prompt_token_s, costs.rows_s()) == (0.0, 0.0, (0.0, 0.0))
    loop.close()
    device.close()


def test_a_flood_of_messages_holds_up_no_step_that_is_done():
    """The message that a step is done stands behind all of them; it is the step that counts."""
    config = tiny_config(async_scheduling=False)
    executor = FakeExecutor(config)
    loop, _ = build_core(config, executor)
    loop.inbox.put(request("a", 3))
    done = threading.Event()
    submit = executor.submit

    def submit_and_tell(plan, tell):
        submit(plan, lambda: (tell(), done.set()))

    executor.submit = submit_and_tell
    loop.turn(wait=False)
    for number in range(5 * MESSAGES_A_TURN):
        loop.inbox.put(AbortRequests(request_ids=[str(number)]))
    assert done.wait(60)
    assert [delta.request_id for delta in each_delta(loop.turn(wait=False).deltas)] == ["a"]
    assert loop.inbox.qsize() > 3 * MESSAGES_A_TURN
    executor.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_abort_frees_blocks_while_a_long_step_still_computes(async_scheduling):
    config = tiny_config(async_scheduling=async_scheduling)
    executor = Held(config)
    loop, _ = build_core(config, executor)
    published: SimpleQueue[StepOutputs] = SimpleQueue()
    thread = threading.Thread(target=loop.run, args=(published.put,))
    thread.start()
    loop.inbox.put(request("a", max_tokens=1000))
    published.get(timeout=30)
    assert executor.began.wait(30)
    loop.inbox.put(AbortRequests(request_ids=["a"]))
    outputs = published.get(timeout=30)
    executor.go.set()
    assert [d.finish_reason for d in each_delta(outputs.deltas)] == ["abort"]
    assert outputs.stats.kv_blocks_used == 0
    loop.inbox.put(Shutdown())
    thread.join(10)
    executor.close()


def test_run_stops_at_shutdown_and_leaves_what_is_running():
    config = tiny_config()
    executor = FakeExecutor(config)
    loop, _ = build_core(config, executor)
    published: list[StepOutputs] = []

    def publish(outputs: StepOutputs) -> None:
        published.append(outputs)
        if len(published) == 3:
            loop.inbox.put(Shutdown())

    loop.inbox.put(request("a", max_tokens=1000))
    loop.run(publish)
    assert len(published) == 3 and loop.stopped
    executor.close()


def test_an_idle_loop_blocks_on_its_inbox_and_uses_no_cpu():
    config = tiny_config()
    executor = FakeExecutor(config)
    loop, _ = build_core(config, executor)
    got = threading.Event()
    thread = threading.Thread(target=loop.run, args=(lambda outputs: got.set(),))
    thread.start()
    time.sleep(0.05)
    turns = loop.turns
    assert_idle(os.getpid(), {thread.native_id})
    assert loop.turns == turns and loop.phase == "idle"
    loop.inbox.put(request("a"))
    assert got.wait(30)
    loop.inbox.put(Shutdown())
    thread.join(30)
    assert not thread.is_alive()
    executor.close()


def test_a_scheduler_that_plans_nothing_for_ever_is_an_error_not_a_spin():
    executor = FakeExecutor(tiny_config())
    loop = CoreLoop(StuckScheduler(), executor, 2)
    with pytest.raises(EngineError, match="waiting=5"):
        for _ in range(MAX_EMPTY_PLANS + 2):
            loop.turn(wait=False)
    executor.close()


def test_an_error_of_the_device_in_process_names_its_cause_last():
    client = InProcessClient(tiny_config(), executor="core_fakes:Raising")
    client.start()
    client.send(request("a", max_tokens=50))
    with pytest.raises(CoreDiedError) as caught:
        finish(client, {"a"})
    assert str(caught.value).splitlines()[-1] == "RuntimeError: device lost in step 3"
    with pytest.raises(CoreDiedError, match="device lost"):
        client.send(request("b"))
    client.close()


def test_a_start_that_fails_in_process_raises_the_error_itself_and_frees_the_executor():
    client = InProcessClient(tiny_config(), executor="core_fakes:NotFitting")
    with pytest.raises(ConfigError, match="lower --max-model-len"):
        client.start()
    assert not [t for t in threading.enumerate() if t.name == "fake-device"]


def test_receiving_without_work_in_process_is_refused_not_a_hang():
    client = InProcessClient(tiny_config(), executor="core_fakes:FakeExecutor")
    client.start()
    with pytest.raises(EngineError, match="no work"):
        client.recv()
    client.close()


def test_the_in_process_core_serves_an_event_loop_too():
    async def scenario() -> list[str]:
        client = InProcessClient(tiny_config(), executor="core_fakes:FakeExecutor")
        client.start()
        seen: list[str] = []

        async def pump() -> None:
            while len(seen) < 2:
                seen.extend(d.request_id for d in each_delta((await client.recv_async()).deltas) if d.finish_reason)

        task = asyncio.create_task(pump())
        await asyncio.sleep(0.05)
        client.send(request("first"))
        await asyncio.sleep(0.1)
        client.send(request("second"))
        await asyncio.wait_for(task, 10)
        client.close()
        return seen

    assert asyncio.run(scenario()) == ["first", "second"]
