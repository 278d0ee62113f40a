"""How long a request is expected to take, beside a server that takes as long by rule; and who is refused for it."""

from __future__ import annotations

import heapq
import random

import pytest
from scheduler_loop import Loop

from engine.core.wire import AddRequest
from engine.errors import QueueFullError
from engine.kv_cache.sequence_blocks import SequenceBlocks
from engine.request import Tenant
from engine.scheduling.expected import Expected
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.waiting_queue import WaitingQueue
from engine.step import RowParams, Rows
from engine.step_costs import StepCosts

DECODE_S = 0.01


def _costs() -> StepCosts:
    import numpy as np

    costs = StepCosts()
    for _ in range(20):
        costs.observe(Rows(np.ones((5, 4), dtype=np.int32)), 0, DECODE_S)
    return costs


def _request(prompt: int, deadline_s: float | None = None, tenant: str = "", priority: int = 0) -> AddRequest:
    return AddRequest(
        request_id="x",
        prompt_token_ids=[1] * prompt,
        params=RowParams(seed=0),
        max_tokens=1000,
        tenant=Tenant(tenant),
        priority=priority,
        deadline_s=deadline_s,
    )


class Server:
    """Rows that are each busy for as long as an answer takes; what arrives waits for one."""

    def __init__(self, rows: int, queue: WaitingQueue) -> None:
        self.now, self.queue = 1000.0, queue
        self.expected = Expected(queue, [], _costs(), lambda: self.now, rows)
        self.busy = [0.0] * rows
        self.started: dict[int, float] = {}
        self.number = 0

    def arrive(self, prompt: int, tenant: str = "") -> int:
        self.number += 1
        blocks = SequenceBlocks.__new__(SequenceBlocks)
        seq = Sequence(str(self.number), RowParams(seed=0), [1] * prompt, (0, self.number), 10**6, blocks)
        if isinstance(self.queue, FairQueue):
            self.queue.join(seq, Tenant(tenant))
        self.expected.queued()
        self.queue.push(seq)
        return self.number

    def go_on(self, until: float, answer: float = 100.0) -> None:
        """Rows take up who waits as they become free."""
        while (first := self.queue.first()) is not None and self.busy[0] <= until:
            self.now = max(self.now, heapq.heappop(self.busy))
            heapq.heappush(self.busy, self.now + answer * DECODE_S)
            self.queue.pop()
            first.status = Status.RUNNING
            if isinstance(self.queue, FairQueue):
                first.cached_tokens = 0
                self.queue.started(first, first.prompt_len)
            self.expected.started(first.prompt_len)
            done = Sequence("x", RowParams(seed=0), [1], (0, 0), 10**6, first.blocks)
            done.tokens += [1] * int(answer)
            done.started_at = self.now - answer * DECODE_S
            self.expected.ended(done, by_itself=True)
            self.started[int(first.request_id)] = self.now
        self.now = max(self.now, until)


def test_where_nobody_waits_it_is_the_answer_alone() -> None:
    server = Server(4, WaitingQueue())
    for _ in range(10):
        server.arrive(50)
        server.go_on(server.now + 2)
    assert server.expected.seconds(_request(50)) == pytest.approx(100 * DECODE_S, rel=0.01)


def test_of_a_burst_behind_a_quiet_time_each_is_told_of_those_before_it() -> None:
    server = Server(2, WaitingQueue())
    for _ in range(2):
        server.arrive(50)
        server.go_on(server.now + 20)
    service = 100 * DECODE_S
    told = {}
    for index in range(14):
        seconds = server.expected.seconds(_request(50)) - service
        told[server.arrive(50)] = seconds
        assert index > 1 or seconds == 0
    at = server.now
    server.go_on(at + 100)
    assert all(abs(server.started[number] - at - seconds) <= service for number, seconds in told.items())
    assert max(told.values()) > 5 * service


@pytest.mark.parametrize("overload", [1.5, 4.0])
def test_under_overload_the_wait_is_what_it_turns_out_to_be(overload: float) -> None:
    """Rows are what is scarce; prompts differ a hundredfold."""
    random.seed(1)
    server = Server(8, WaitingQueue())
    told: dict[int, tuple[float, float]] = {}
    per_second = overload * 8 / (100 * DECODE_S)
    while server.now < 1020:
        prompt = random.choice([10, 100, 1000])
        seconds = server.expected.seconds(_request(prompt)) - 100 * DECODE_S
        told[server.arrive(prompt)] = server.now, seconds
        server.go_on(server.now + random.expovariate(per_second))
    server.go_on(server.now + 200)
    off = [abs(server.started[n] - at - wait) / (server.started[n] - at) for n, (at, wait) in told.items() if at > 1010]
    assert sorted(off)[len(off) // 2] < 0.25 and sorted(off)[int(len(off) * 0.95)] < 0.5


def test_who_cannot_be_in_time_is_refused_and_told_when_to_ask_again() -> None:
    server = Server(2, WaitingQueue())
    for _ in range(60):
        server.arrive(100)
        server.go_on(server.now + 0.1)
    wait = server.expected._margin * server.expected.seconds(_request(100))
    assert 10 < wait < 40 and 1 < server.expected._margin < 2
    server.expected.check(_request(100))
    server.expected.check(_request(100, deadline_s=wait + 1))
    with pytest.raises(QueueFullError, match="too short") as error:
        server.expected.check(_request(100, deadline_s=wait - 4))
    assert error.value.retry_after_s == pytest.approx(4)
    server.expected.check(_request(100, deadline_s=2, priority=-1))


def test_of_a_flood_that_waits_another_tenant_waits_for_its_share_alone() -> None:
    server = Server(2, FairQueue())
    for _ in range(60):
        server.arrive(100, "flood")
        server.go_on(server.now + 0.1)
    assert server.expected.seconds(_request(100, tenant="flood")) > 10
    assert server.expected.seconds(_request(100, tenant="honest")) < 2


@pytest.mark.parametrize(("kept", "limit"), [(True, 1.0), (False, 3.0)])
def test_the_margin_follows_what_became_of_those_that_were_let_in(kept: bool, limit: float) -> None:
    expected = Server(2, WaitingQueue()).expected
    for _ in range(2000):
        expected._learn(kept)
    assert expected._margin == limit
    expected._margin = 1.5
    for number in range(40 * 50):
        expected._learn(number % 40 != 0)
    assert expected._margin == pytest.approx(1.5, rel=0.1), "one of forty is what is wanted"


def test_who_waits_for_rows_that_nobody_leaves_is_told_so() -> None:
    """Nothing was taken up for long: what was seen before says nothing."""
    server = Server(2, WaitingQueue())
    for _ in range(20):
        server.arrive(100)
        server.go_on(server.now + 0.5)
    before = server.expected.seconds(_request(100))
    server.busy = [server.now + 1000] * 2
    for _ in range(3):
        server.arrive(100)
    server.now += 60
    assert server.expected.seconds(_request(100)) > before + 60


def test_the_scheduler_refuses_it_and_takes_nothing() -> None:
    loop = Loop(rows=1, num_blocks=64, max_model_len=64)
    for index in range(8):
        loop.add(str(index), [index] * 20, 20)
    for _ in range(30):
        loop.turn()
    expected = loop.scheduler._admission._expected
    expected._rate = 10.0
    with pytest.raises(QueueFullError):
        loop.scheduler.add(_request(4, deadline_s=1e-9))
    loop.scheduler.add(_request(4, deadline_s=1e6))
    loop.scheduler.abort(["x"])
    loop.run()
    loop.assert_nothing_leaked()
    assert loop.scheduler._held.waiting.num_tokens == 0


def _ended(server: Server, tokens: int, seconds: float, tenant: str = "", interrupted: bool = False) -> None:
    seq = Sequence("x", RowParams(seed=0), [1], (0, 0), 10**6, SequenceBlocks.__new__(SequenceBlocks))
    seq.tokens += [1] * tokens
    seq.started_at, seq.tenant, seq.interrupted = server.now - seconds, tenant, interrupted
    server.expected.ended(seq, by_itself=True)


def test_whatever_was_seen_who_comes_while_nothing_runs_is_let_in() -> None:
    """Or nobody would ever learn that the server is fast again."""
    server = Server(4, WaitingQueue())
    for _ in range(64):
        _ended(server, 16, 600.0)
    server.expected.check(_request(100, deadline_s=5))
    running = Sequence("r", RowParams(seed=0), [1], (0, 0), 99, SequenceBlocks.__new__(SequenceBlocks))
    server.expected._running = [running]
    with pytest.raises(QueueFullError):
        server.expected.check(_request(100, deadline_s=5))
    for _ in range(150):
        _ended(server, 16, 0.1)
    server.expected.check(_request(100, deadline_s=5))


def test_one_that_stood_still_says_little_of_others() -> None:
    server = Server(4, WaitingQueue())
    for _ in range(100):
        _ended(server, 100, 1.0)
    _ended(server, 4, 3600.0)
    _ended(server, 4, 3600.0, interrupted=True)
    assert server.expected.seconds(_request(10)) < 3


def test_ones_long_answers_say_nothing_of_anothers() -> None:
    server = Server(4, WaitingQueue())
    for _ in range(100):
        _ended(server, 100, 1.0, "honest")
    for _ in range(100):
        _ended(server, 8000, 80.0, "long")
    assert server.expected.seconds(_request(10, tenant="honest")) < 2
    assert server.expected.seconds(_request(10, tenant="long")) > 5
    for index in range(5000):
        _ended(server, 5, 1.0, f"tenant {index}")
    assert len(server.expected._answers) <= 1024


def test_a_queue_that_was_empty_begins_anew() -> None:
    server = Server(1, WaitingQueue())
    server.expected.queued()
    server.now += 3600
    for _ in range(2):
        server.arrive(100)
    assert server.expected.seconds(_request(100)) < 5
