"""A core's process as events of one loop: the real `CoreLoop`, scheduler and KV cache, before a device that replays
digests. What a process does besides (sockets, heartbeats, dying) is played here."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Callable
from queue import Empty
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace
from replaying_executor import ReplayingExecutor
from scheduler_loop import assert_nothing_leaked
from toy_adapters import ToyAdapters
from toy_grammars import ToyGrammars

from engine.config import EngineConfig
from engine.core.inbox import AdapterLoaded, GrammarCompiled, Message
from engine.core.kv_reports import KVEventReports
from engine.core.loop import CoreLoop
from engine.core.process import failure
from engine.core.wire import AbortRequests, AddRequest, CoreReady, FromCore, Heartbeat, Phase, ToCore
from engine.errors import EngineError
from engine.executor.interface import CompileState
from engine.kv_cache.kv_cache import KVCache
from engine.layer_groups import Window
from engine.request import Tenant
from engine.scheduling.fair_queue import OUTPUT_COST, PROMPT_COST
from engine.scheduling.scheduler import Scheduler
from engine.step import StepMasks, StepPlan, StepResult

KILLER = 300
"""A token of a prompt: what is computed behind it ends the process."""
FAULTY = 301
"""And another one: what is computed behind it are no numbers."""
ORDERLY = "exited with status 0"
HEARTBEAT_S = 1.0
LOADING_S = 0.004
"""a turn of what compiles grammars and loads adapters"""


class Shape(msgspec.Struct, frozen=True):
    """Of each core."""

    num_blocks: int
    block_size: int
    num_host_blocks: int
    windows: tuple[Window, ...]
    swap_block_s: float
    pads: bool
    exact: bool
    adapter_slots: int
    adapter_turns: int
    step_s: float
    """the mean; steps take from half to twice of it"""


class AsleepError(Exception):
    """A core without work waits for a message."""


class Inbox:
    """`SimpleQueue`, as far as a loop uses one; where it would wait the turn ends."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._waiting: deque[Message] = deque()
        self._wake = wake

    def put(self, message: Message) -> None:
        self._waiting.append(message)
        self._wake()

    def get(self) -> Message:
        if not self._waiting:
            raise AsleepError
        return self._waiting.popleft()

    def get_nowait(self) -> Message:
        if not self._waiting:
            raise Empty
        return self._waiting.popleft()

    def empty(self) -> bool:
        return not self._waiting


class Device:
    """Steps one behind the other; each computes when it is submitted and takes its time until it is done."""

    def __init__(self, core: SimulatedCore, replaying: ReplayingExecutor, adapters: ToyAdapters) -> None:
        self.replaying = replaying
        self._core, self._adapters = core, adapters
        self._dones: deque[Callable[[], None]] = deque()
        self._begun = self._free_at = 0.0
        self._killers: dict[int, int] = {}
        """by row: up to which position it may be computed"""
        self._faulty: dict[int, int] = {}
        """by row: up to which position numbers come of it"""
        self._deadly: set[int] = set()
        """steps"""
        self._faults: dict[int, list[int]] = {}
        """rows, by step"""
        self.given: Counter[str] = Counter()
        """to each tenant, in the costs of the fair policy, over its weight"""
        self._sampled: deque[list[Tenant]] = deque()
        """of each step under way: whose rows sample"""
        self._started: set[str] = set()
        self.has_lost = False  # a rank

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        if self.has_lost:
            raise EngineError("a rank has died")
        self.replaying.some_failed = bool(self._core.scheduler._held.failures._noted)
        for new in plan.added:
            for token, marked in ((KILLER, self._killers), (FAULTY, self._faulty)):
                marked.pop(new.row, None)
                if token in new.token_ids:
                    marked[new.row] = self._core.world.bad_at(new.token_ids)
        for row in plan.rows.each():
            end = row.computed + row.query_len - max(row.samples - 1, 0)
            if end > self._killers.get(row.row, end):
                self._deadly.add(plan.step_id)
            if row.samples and end > self._faulty.get(row.row, end):
                self._faults.setdefault(plan.step_id, []).append(row.row)
        self._count(plan)
        self._dones.append(done)
        self.replaying.submit(plan)
        self._adapters.begin(plan)
        self._begin()

    def _count(self, plan: StepPlan) -> None:
        """Whose prompts begin, and whose tokens will come."""
        owners, rows = self._core.scheduler._held.rows.owners, plan.rows.each()
        for seq in (owners[row.row] for row in rows):
            if seq.account is not None and seq.request_id not in self._started:
                self._started.add(seq.request_id)
                follows = seq.siblings[0] is not seq or (seq.group is not None and seq.group.members[0] is not seq)
                computed = 0 if follows else seq.prompt_len - (seq.cached_tokens or 0)
                self.given[seq.account.name] += PROMPT_COST * computed / seq.account.weight
        accounts = [owners[row.row].account for row in rows if row.samples]
        self._sampled.append([Tenant("", 1.0) if each is None else Tenant(each.name, each.weight) for each in accounts])

    def sample(self, masks: StepMasks) -> None:
        self.replaying.sample(masks)
        self._begin()

    def _begin(self) -> None:
        """Those that wait for no mask."""
        core = self._core
        while self._dones and len(self.replaying.results) > core.steps_under_way:
            step_id = self.replaying.results[core.steps_under_way].step_id
            core.steps_under_way += 1
            self._free_at = max(self._free_at, core.loop.time()) + core.step_seconds()
            core.call_at(self._free_at, core.crash if step_id in self._deadly else self._dones.popleft())

    def collect(self) -> StepResult:
        if self.has_lost:
            raise EngineError("a rank has died")
        self._core.steps_under_way -= 1
        self._adapters.end()
        result = self.replaying.collect()
        tenants = self._sampled.popleft()
        for tenant, count in zip(tenants, result.counts or [1] * len(tenants), strict=True):
            self.given[tenant.name] += OUTPUT_COST * count / tenant.weight
        return replace(result, faults=sorted({*result.faults, *self._faults.pop(result.step_id, ())}))

    def compile_state(self) -> CompileState:
        return "done"

    def compiles_after_ready(self) -> int:
        return 0

    def part_seconds(self) -> dict[str, float]:
        return {}


class SimulatedCore:
    def __init__(self, world: Any, config: EngineConfig, shape: Shape, rng: Random, to_front: Callable[[bytes], None]):
        """`world`: what is asked of it is said where it is. `to_front`: takes each frame."""
        self.world, self.config, self.shape, self._rng, self._to_front = world, config, shape, rng, to_front
        self.loop = asyncio.get_running_loop()
        self.alive, self.stopped_until = True, 0.0
        self.cause = ""
        self.resumed = 0
        scheduling = config.scheduler
        drafts = scheduling.speculation.num_speculative_tokens if scheduling.speculation.method else 0
        longest = max(scheduling.max_num_batched_tokens, scheduling.steps_in_flight * (1 + drafts))
        reports = KVEventReports(config)
        self.kv = KVCache(
            shape.num_blocks,
            shape.block_size,
            config.cache.enable_prefix_caching,
            shape.windows,
            longest,
            shape.num_host_blocks,
            keeps_events=reports.wanted,
        )
        reports.attach(self.kv)
        self.grammars = ToyGrammars()
        replaying = ReplayingExecutor(
            shape.num_blocks,
            shape.block_size,
            scheduling.max_num_seqs,
            scheduling.max_num_batched_tokens,
            scheduling.max_model_len,
            shape.windows,
            shape.num_host_blocks,
            scheduling.max_sampled,
            shape.pads,
        )
        self.adapters = ToyAdapters(shape.adapter_slots, shape.adapter_turns, replaying.adapters)
        self.steps_under_way, self.begun = 0, set[str]()
        self.device = Device(self, replaying, self.adapters)
        self.scheduler = Scheduler(
            scheduling,
            self.kv,
            shape.swap_block_s,
            self.grammars,
            shape.exact,
            None,
            self.adapters,
            self.loop.time,
            self.begun.add,
        )
        self._turning = self._beating = self._loading = False
        self.inbox = Inbox(self.wake)
        inbox: Any = self.inbox
        self.core = CoreLoop(self.scheduler, self.device, scheduling.steps_in_flight, inbox, kv_reports=reports)
        self._decoder, self._encoder = msgspec.msgpack.Decoder(ToCore), msgspec.msgpack.Encoder()
        self._frames: deque[bytes] = deque()
        self._bases: dict[tuple[str, str], float] = {}
        """of tenants that wait: how far apart they were when the second one began to"""
        self._unwanted: set[str] = set()
        """aborted since the last turn"""
        self._received = self._posted = 0

    # -- the process -------------------------------------------------------------------------------------------------

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        """Unless it is dead by then; a stopped process does it when it goes on."""

        def run() -> None:
            if not self.alive:
                return
            if self.stopped_until > self.loop.time():
                self.loop.call_at(self.stopped_until, run)
            else:
                callback()

        self.loop.call_at(when, run)

    def soon(self, callback: Callable[[], None], seconds: float) -> None:
        self.call_at(self.loop.time() + seconds * self._rng.uniform(0.5, 2.0), callback)

    def start(self) -> None:
        ready = CoreReady(
            num_blocks=self.shape.num_blocks,
            block_size=self.shape.block_size,
            max_model_len=self.config.scheduler.max_model_len,
            attention_backend="replaying",
            ledger="",
            distinct_pieces=0,
            pieces_compiled=0,
            startup_seconds=0.0,
        )
        self.tell(ready)
        self._beat()
        self.wake()

    def die(self, cause: str) -> None:
        if self.alive:
            self.alive, self.cause = False, cause
            self.world.core_died(self)

    def crash(self) -> None:
        self.die("killed by signal 9 (SIGKILL)")

    def lose_rank(self) -> None:
        """It learns that when it waits for its ranks next, tells it, and ends."""
        self.device.has_lost = True
        self.wake()

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT that much later."""
        self.stopped_until = max(self.stopped_until, self.loop.time() + seconds)

    @property
    def is_stopped(self) -> bool:
        return self.alive and self.stopped_until > self.loop.time()

    # -- its mailbox -------------------------------------------------------------------------------------------------

    def receive(self, frame: bytes) -> None:
        self._frames.append(frame)
        self.call_at(self.loop.time(), self._take)

    def _take(self) -> None:
        self._received += 1
        message = self._decoder.decode(self._frames.popleft())
        self.resumed += isinstance(message, AddRequest) and bool(message.resumed)
        if isinstance(message, AbortRequests):
            self._unwanted.update(message.request_ids)
        self.inbox.put(message)
        if not self._beating:
            self._beat()

    def tell(self, message: FromCore) -> None:
        self._to_front(self._encoder.encode(message))

    def post(self, message: Message) -> None:
        self._posted += 1
        self.inbox.put(message)
        if not self._beating:
            self._beat()

    def _beat(self) -> None:
        core = self.core
        all_taken = core.taken >= self._received and core.news_taken >= self._posted
        phase: Phase = "plan" if core.phase == "idle" and not all_taken else core.phase
        times = core.step_times
        self.tell(
            Heartbeat(turns=core.turns, phase=phase, received=self._received, steps=times.count, step_s=times.slowest())
        )
        self._beating = phase != "idle"
        if self._beating:
            self.call_at(self.loop.time() + HEARTBEAT_S, self._beat)

    # -- its loop ----------------------------------------------------------------------------------------------------

    def step_seconds(self) -> float:
        return self.shape.step_s * self._rng.uniform(0.5, 2.0)

    def wake(self) -> None:
        if self.alive and not self._turning:
            self._turning = True
            self.soon(self._turn, self.shape.step_s / 20)

    def _turn(self) -> None:
        try:
            outputs = self.core.turn()
        except AsleepError:
            self._turning = False
            return
        except EngineError as error:
            self.device.has_lost or self.world.broken(error)
            self.tell(failure(error))
            self.die(f"exited with status 1: {error}")
            return
        except Exception as error:
            self.world.broken(error)
            self.die(f"{type(error).__name__}: {error}")
            return
        if self.core.stopped:
            self.die(ORDERLY)
            return
        if outputs is not None:
            self.tell(outputs)
        if not self._loading and (self.grammars.under_way or self.adapters.under_way):
            self._loading = True
            self.soon(self._load, LOADING_S)
        self._check_shares()
        if computed := self._unwanted.intersection(self.scheduler._live):
            self.world.broken(AssertionError(f"{computed} are computed, and nobody wants them"))
        self._unwanted.clear()
        self.soon(self._turn, self.shape.step_s / 20)

    def _load(self) -> None:
        for grammar in self.grammars.turn():
            self.post(GrammarCompiled(grammar))
        for adapter in self.adapters.turn():
            self.post(AdapterLoaded(adapter))
        self._loading = bool(self.grammars.under_way or self.adapters.under_way)
        if self._loading:
            self.soon(self._load, LOADING_S)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _check_shares(self) -> None:
        """Theorem 4.4 of the paper of virtual token counters: while two tenants wait, what they are given differs by no
        more than twice what one prompt costs, or all tokens that the pool holds."""
        fair = self.scheduler._held.fair
        if fair is None or not self.world.is_fair:
            return
        given, waiting = self.device.given, {account.name: account.weight for account in fair._queues}
        pairs = list(itertools.combinations(sorted(waiting), 2))
        self._bases = {(a, b): self._bases.get((a, b), given[a] - given[b]) for a, b in pairs}
        longest, held = self.config.scheduler.max_model_len, self.shape.num_blocks * self.shape.block_size
        in_flight = self.config.scheduler.steps_in_flight * self.config.scheduler.max_sampled
        for (a, b), base in self._bases.items():
            bound = 2 * max(PROMPT_COST * longest, OUTPUT_COST * (held + in_flight)) / min(waiting[a], waiting[b])
            if abs(given[a] - given[b] - base) > bound:
                self.world.broken(AssertionError(f"{a} and {b} wait, and were given {given}: the bound is {bound}"))

    def assert_empty(self) -> None:
        assert self.core.has_work is False, "a core that nobody has asked anything has work"
        assert_nothing_leaked(self.scheduler, self.kv, self.device.replaying)
