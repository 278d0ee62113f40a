"""The engine core's loop, reduced to what the scheduler sees of it, and a record of what clients receive."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable

from replaying_executor import ReplayingExecutor
from toy_adapters import ToyAdapters, adapter
from toy_grammars import ToyGrammars

from engine.config import Policy, Preemption, SchedulerConfig
from engine.core.wire import AddRequest, BeamParams, Delta, Follower, SequenceDelta, each_delta
from engine.kv_cache.kv_cache import KVCache
from engine.kv_transfer.interface import Connector
from engine.kv_transfer.params import KVTransferParams
from engine.layer_groups import Window
from engine.request import NOBODY, Tenant
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.speculation_config import SpeculationConfig
from engine.step import Pooling, RowParams, StepPlan, TokenLogprobs

STEP_S = 0.01


class Loop:
    """``depth`` plans are submitted ahead of the result that is collected next: 0 is lockstep, 1 is one step ahead."""

    def __init__(
        self,
        *,
        depth: int = 1,
        num_blocks: int = 64,
        block_size: int = 4,
        rows: int = 8,
        budget: int = 32,
        max_model_len: int = 64,
        policy: Policy = "fcfs",
        caching: bool = True,
        max_waiting: int = 1000,
        mixed: int | None = None,
        windows: tuple[Window, ...] = (None,),
        num_host_blocks: int = 0,
        preemption: Preemption = "auto",
        swap_block_s: float = 0.0,
        min_shared_chunk: int = 256,
        drafts: int = 0,
        pads: bool = False,
        exact: bool = False,
        stages: tuple[int, int] = (1, 8),
        connector: Connector | None = None,
        adapters: tuple[int, int] = (1, 0),
    ) -> None:
        """`drafts`: of each sequence in a step, at most; 0: nobody proposes any. `pads`: the device computes as many as
        planned. `exact`: nothing is planned behind them. `stages`: how many; tokens of a context that cost a row.
        `adapters`: slots; turns that loading takes."""
        self._asked = {name: value for name, value in locals().items() if name != "self"}
        speculation = SpeculationConfig(method="ngram" if drafts else None, num_speculative_tokens=drafts or 10)
        config = SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
            policy=policy,
            max_mixed_prefill_tokens=mixed,
            preemption=preemption,
            min_shared_chunk=min_shared_chunk,
            speculation=speculation,
            stages=stages[0],
            row_tokens=stages[1],
        )
        longest = max(budget, (depth + 1) * (1 + drafts))
        self.kv = KVCache(num_blocks, block_size, caching, windows, longest, num_host_blocks, connector is not None)
        self.grammars, self.begun = ToyGrammars(), list[str]()
        self.executor = ReplayingExecutor(
            num_blocks, block_size, rows, budget, max_model_len, windows, num_host_blocks, config.max_sampled, pads
        )
        self.adapters = ToyAdapters(*adapters, self.executor.adapters)
        parts = swap_block_s, self.grammars, exact, connector, self.adapters, time.monotonic, self.begun.append
        self.scheduler = Scheduler(config, self.kv, *parts)
        self.depth, self.stages, self.max_model_len = depth, stages[0], max_model_len
        self.pending, self.plans, self.num_plain = deque[StepPlan](), list[StepPlan](), list[int]()
        """`num_plain`: rows of each plan that were planned at once"""
        self.sequences, self.requests = dict[str, Sequence](), dict[str, AddRequest]()
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = defaultdict(list)
        self.ends: dict[str, list[SequenceDelta]] = defaultdict(list)
        self.deltas: dict[str, list[SequenceDelta]] = defaultdict(list)

    def __repr__(self) -> str:
        """As hypothesis shows what it has found."""
        return f"Loop({', '.join(f'{name}={value!r}' for name, value in self._asked.items())})"

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        stop: Iterable[int] = (),
        min_tokens: int = 0,
        priority: int = 0,
        salt: str | None = None,
        prompt_logprobs: int | None = None,
        followers: Iterable[str] = (),
        alike: bool = True,
        beams: BeamParams | None = None,
        grammar: str | None = None,
        pooling: Pooling | None = None,
        kv_transfer: KVTransferParams | None = None,
        adapter_number: int = 0,
        tenant: Tenant = NOBODY,
    ) -> None:
        """`alike`: all samples draw the same tokens; else each its own."""
        params = RowParams(
            seed=0,
            stop_token_ids=list(stop),
            min_tokens=min_tokens,
            prompt_logprobs=prompt_logprobs,
            pooling=pooling,
        )
        request = AddRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            max_tokens=max_tokens,
            priority=priority,
            cache_salt=salt,
            followers=[
                Follower(request_id=name, seed=0 if alike else index) for index, name in enumerate(followers, 1)
            ],
            beams=beams,
            grammar=grammar,
            kv_transfer=kv_transfer,
            lora_request=adapter(adapter_number),
            tenant=tenant,
        )
        self.scheduler.add(request)
        self.requests[request_id] = request
        for name in request.request_ids:
            self.sequences[name] = self.scheduler._live[name]

    def abort(self, request_ids: list[str]) -> None:
        self.receive(self.scheduler.abort(request_ids))

    def turn(self) -> bool:
        """Plan and submit one step, collect what is due. False when there was nothing to do."""
        compiled = self.grammars.turn()
        for grammar in compiled:
            self.receive(self.scheduler.grammar_compiled(grammar))
        loaded = self.adapters.turn()
        for each in loaded:
            self.receive(self.scheduler.adapter_loaded(each))
        plan = self.scheduler.plan()
        failed = self.scheduler.end_failed()
        self.receive(failed)
        self.executor.some_failed = bool(failed)
        if plan is not None:
            self.plans.append(plan)
            self.num_plain.append(self.scheduler._steps._steps[-1][1].num_plain)
            self.executor.submit(plan)
            self.adapters.begin(plan)
            self.pending.append(plan)
            if self.stages > 1:
                self._assert_nobody_waits_in_another_step()
        self._send_masks()
        due = len(self.pending) > self.depth or (plan is None and bool(self.pending))
        if due:
            self.pending.popleft()
            self.adapters.end()
            self.receive(self.scheduler.complete(self.executor.collect(), STEP_S))
            self._send_masks()
        return plan is not None or due or bool(failed) or bool(compiled) or bool(loaded)

    def _assert_nobody_waits_in_another_step(self) -> None:
        """The first stage does not know a token before it has arrived."""
        *before, (_, last) = self.scheduler._steps._steps
        in_flight = {seq for _, step in before for seq in step.owners[step.rows.samples > 0]}
        assert in_flight.isdisjoint(last.owners)

    def _send_masks(self) -> None:
        masks = self.scheduler.masks()
        if masks is not None:
            self.executor.sample(masks)
        assert self.scheduler.masks() is None, "once"

    @property
    def waits_elsewhere(self) -> bool:
        """For grammars and adapters."""
        return bool(self.grammars.under_way or self.adapters.under_way)

    def run(self, max_turns: int = 5000) -> None:
        for _ in range(max_turns):
            if not self.scheduler.has_work and not self.waits_elsewhere:
                return
            assert self.turn() or self.waits_elsewhere, "work is left, nothing is in flight, and nothing was planned"
        raise AssertionError(f"not finished after {max_turns} turns")

    def receive(self, deltas: list[Delta]) -> None:
        for delta in each_delta(deltas):
            name = delta.request_id
            news = delta.token_ids or delta.prompt_logprobs or delta.pooled or delta.finish_reason
            assert news, "a delta with nothing new"
            assert not self.ends[name], "a delta after the end"
            self.deltas[name].append(delta)
            self.tokens[name] += delta.token_ids
            self.prompt_logprobs[name] += delta.prompt_logprobs
            if delta.finish_reason is not None:
                self.ends[name].append(delta)

    def reason(self, request_id: str) -> str | None:
        (end,) = self.ends[request_id]
        return end.finish_reason

    def cached(self, request_id: str) -> int:
        return self.deltas[request_id][0].cached_tokens

    def assert_nothing_leaked(self) -> None:
        assert_nothing_leaked(self.scheduler, self.kv, self.executor)
        assert {name: seq.in_flight for name, seq in self.sequences.items() if seq.in_flight} == {}


def assert_nothing_leaked(scheduler: Scheduler, kv: KVCache, executor: ReplayingExecutor) -> None:
    """Nothing lives: no row, no block and no account is anybody's."""
    stats = scheduler.stats()
    assert stats.kv_blocks_used == stats.running == stats.waiting == 0
    assert all(count == 0 for count in kv.pool.ref_counts)
    free = sum(map(kv.pool.size_of, kv.pool.free_blocks()))
    assert free == kv.pool.num_free == kv.pool.num_blocks
    kv.take_transfers()
    assert kv.host is None or kv.host.pool.num_used == 0
    assert sorted(scheduler._rows.free) == list(range(executor.num_rows))
    assert not scheduler._rows.ready.any() and not scheduler._rows.stop_tokens
    assert not scheduler._live and not scheduler._steps
    assert not scheduler._adapted._slots.users and not len(scheduler._adapted)
    if (fair := scheduler._held.fair) is not None:
        assert not fair._queues and not len(fair) and fair.first() is None and not fair._order
        assert all(account.live == account.rows == 0 for account in fair._accounts.values())
    still_on_device = set(executor.rows)
    assert still_on_device == set(scheduler._rows._released), "the device would keep a row that nobody owns"
