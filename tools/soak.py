"""Random traffic for minutes on the real scheduler and KV cache, and after every lull: is anything still held?

Each way of preemption (recompute, swap, auto) runs with one layer group and with several, on an engine that lives as
long as the soak; a device without a model answers plans with random tokens. Requests come in bursts: greedy, sampled
one or several at a time, beams, with priorities, shared prefixes, log-probabilities, faults and aborts, more than the
pool and the rows have room for. When a burst has been served no block of either tier, no row and no request may be
left, and every request has ended once. Exits non-zero on a leak; the last line is JSON.
Usage: ``python tools/soak.py [--minutes 10] [--seed 0]``.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Words
from itertools import count, product
from typing import get_args

from engine.config import Preemption, SchedulerConfig
from engine.core.wire import AddRequest, BeamParams, Delta, Follower, each_delta
from engine.kv_cache.kv_cache import KVCache
from engine.scheduling.scheduler import Scheduler
from engine.step import NewRow, RowLogprobs, RowParams, ScheduledRow, StepPlan, StepResult, TokenLogprobs

BLOCK_SIZE = 8
ROWS = 12
BUDGET = 64
MAX_MODEL_LEN = 160
MAX_PROMPT_LEN = 96
WIDTH = 3
"""beams of a search, at most; the pool has room for as many that share nothing"""
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None, 24, 24))
VOCAB = 64
TOKEN_S = 1e-4
SWAP_BLOCK_S = 5e-4
"""so that `auto` finds swapping cheaper for some and not for others"""
MAX_GROWTH_MIB = 16
"""of resident memory, after every engine has served a burst"""


class LeakError(Exception):
    """Something is held that nobody owns, or a request did not end exactly once."""


class Device:
    """Answers plans. Keeps of a row what its answers depend on."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rows: dict[int, NewRow] = {}

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.released:
            del self._rows[row]
        self._rows.update((new.row, new) for new in plan.added)
        rows = plan.rows.each()
        sampling = [row for row in rows if row.samples]
        logprobs = {row.row: found for row in sampling if (found := self._logprobs(row)) is not None}
        return StepResult(
            step_id=plan.step_id,
            token_ids=[self._rng.randrange(VOCAB) for _ in sampling],
            logprobs=RowLogprobs.of(logprobs),
            prompt_logprobs={
                row.row: self._prompt_logprobs(row)
                for row in rows
                if self._rows[row.row].params.prompt_logprobs is not None
            },
            faults=[row.row for row in sampling if self._rng.random() < 0.0005],
        )

    def _logprobs(self, row: ScheduledRow) -> TokenLogprobs | None:
        number = self._rows[row.row].params.logprobs
        if number is None:
            return None
        best = self._rng.sample(range(VOCAB), number)
        falling = sorted((-8 * self._rng.random() for _ in best), reverse=True)
        return TokenLogprobs(token_ids=[*best[:1], *best], logprobs=[*falling[:1], *falling], rank=1)

    def _prompt_logprobs(self, row: ScheduledRow) -> list[TokenLogprobs]:
        last = min(row.computed + row.query_len, self._rows[row.row].prompt_len - 1)
        return [TokenLogprobs(token_ids=[0], logprobs=[-1.0], rank=1) for _ in range(row.computed, last)]


class Engine:
    """A scheduler with its cache and device, and the requests that it owes an end."""

    def __init__(self, preemption: Preemption, windows: tuple[int | None, ...], rng: random.Random) -> None:
        self.name = f"{preemption}, {len(windows)} layer group(s)"
        most = KVCache(1, BLOCK_SIZE, True, windows, BUDGET).blocks_for(MAX_MODEL_LEN)
        self._kv = KVCache(WIDTH * most, BLOCK_SIZE, True, windows, BUDGET, num_host_blocks=rng.choice((1, 4)) * most)
        config = SchedulerConfig(
            max_num_seqs=ROWS,
            max_num_batched_tokens=BUDGET,
            max_model_len=MAX_MODEL_LEN,
            max_waiting=10_000,
            policy=rng.choice(("fcfs", "priority")),
            preemption=preemption,
        )
        self.scheduler = Scheduler(config, self._kv, SWAP_BLOCK_S)
        self._device = Device(rng)
        self._rng = rng
        self._names = count()
        self._heads = [_words(rng, 64) for _ in range(4)]
        self._owed: dict[str, int] = {}
        """tokens that a live request may still bring"""
        self._in_flight: deque[StepPlan] = deque()
        self.ends: Counter[str] = Counter()

    def burst(self, num_requests: int, steps_ahead: int) -> None:
        """Serve requests that arrive while others run, until all have ended; then nothing may be held."""
        rng, aborts = self._rng, Counter[int]()
        for turn in count():
            while num_requests and rng.random() < 0.4:
                self._add(self._request())
                num_requests -= 1
                aborts[turn + rng.randrange(40)] += rng.random() < 0.2
            for _ in range(min(aborts[turn], len(self._owed))):
                self._abort()
            if rng.random() < 0.001:
                self.scheduler.reset_prefix_cache()
            if not self._turn(steps_ahead) and not num_requests:
                break
        self._check_nothing_is_held()
        self._check_every_row_is_free()

    def _add(self, request: AddRequest) -> None:
        self.scheduler.add(request)
        self._owed.update(dict.fromkeys(request.request_ids, request.max_tokens))

    def _request(self) -> AddRequest:
        rng = self._rng
        prompt = rng.choice(self._heads)[: rng.randrange(65)] + _words(rng, rng.randint(1, 32))
        samples = rng.choice((1, 1, 1, 2, 3, 6))
        beams = BeamParams(width=rng.randint(1, WIDTH), length_penalty=0.5) if rng.random() < 0.2 else None
        names = [str(next(self._names)) for _ in range(samples if beams is None else rng.randint(1, beams.width))]
        asked = rng.random() < 0.1 and beams is None
        params = RowParams(
            seed=rng.getrandbits(32),
            temperature=rng.choice((0.0, 1.0)),
            stop_token_ids=[0, 1] if rng.random() < 0.5 else [],
            logprobs=2 if asked else None,
            prompt_logprobs=0 if asked else None,
        )
        return AddRequest(
            request_id=names[0],
            prompt_token_ids=prompt,
            params=params,
            max_tokens=rng.randint(1, MAX_MODEL_LEN - MAX_PROMPT_LEN),
            priority=rng.randint(0, 2),
            cache_salt=rng.choice((None, None, None, "salt")),
            followers=[Follower(request_id=name, seed=rng.getrandbits(32)) for name in names[1:]],
            beams=beams,
        )

    def _abort(self) -> None:
        names = self._rng.sample(sorted(self._owed), 1)
        self._receive(self.scheduler.abort(names))

    def _turn(self, steps_ahead: int) -> bool:
        """Plan a step and take the result that is due. False: there was nothing to do."""
        plan = self.scheduler.plan()
        if plan is not None:
            self._in_flight.append(plan)
        if not self._in_flight:
            if self.scheduler.has_work:
                raise LeakError(f"{self.name}: requests wait, nothing is in flight, and nothing can be planned")
            return False
        if plan is None or len(self._in_flight) > steps_ahead:
            due = self._in_flight.popleft()
            self._receive(self.scheduler.complete(self._device.run(due), due.num_tokens * TOKEN_S))
        return True

    def _receive(self, deltas: Iterable[Delta]) -> None:
        for delta in each_delta(deltas):
            if delta.request_id not in self._owed:
                raise LeakError(f"{self.name}: request {delta.request_id} was told something after its end")
            self._owed[delta.request_id] -= len(delta.token_ids)
            if self._owed[delta.request_id] < 0:
                raise LeakError(f"{self.name}: request {delta.request_id} got more tokens than it asked for")
            if delta.finish_reason is not None:
                del self._owed[delta.request_id]
                self.ends[delta.finish_reason] += 1

    def _check_nothing_is_held(self) -> None:
        stats, pool, host = self.scheduler.stats(), self._kv.pool, self._kv.host
        assert host is not None
        held = {
            "requests without an end": len(self._owed),
            "sequences": stats.running + stats.waiting,
            "blocks": stats.kv_blocks_used + sum(pool.ref_counts) + pool.num_blocks - len(set(pool.free_blocks())),
            "host blocks": stats.host_blocks_used
            + sum(host.pool.ref_counts)
            + host.pool.num_blocks
            - len(set(host.pool.free_blocks())),
        }
        if any(held.values()):
            raise LeakError(f"{self.name}: after all requests are over, {held} are left")

    def _check_every_row_is_free(self) -> None:
        """As many sequences as there are rows run in one step."""
        for _ in range(ROWS):
            params = RowParams(seed=0)
            self._add(AddRequest(request_id=str(next(self._names)), prompt_token_ids=[0], params=params, max_tokens=1))
        plan = self.scheduler.plan()
        rows = 0 if plan is None else len(plan.rows)
        if plan is None or rows < ROWS:
            raise LeakError(f"{self.name}: {ROWS - rows} of {ROWS} rows are held though nothing runs")
        self._receive(self.scheduler.complete(self._device.run(plan)))


def _words(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(number)]


def soak(seconds: float, seed: int) -> dict[str, float]:
    """Figures of the run. Raises `LeakError`."""
    rng = random.Random(seed)
    modes: tuple[Preemption, ...] = get_args(Preemption)
    engines = [Engine(mode, windows, rng) for mode, windows in product(modes, WINDOWS)]
    start, before, bursts = time.monotonic(), 0.0, 0
    while bursts < len(engines) or time.monotonic() - start < seconds:
        engines[bursts % len(engines)].burst(rng.randint(10, 60), rng.randrange(3))
        bursts += 1
        if bursts == len(engines):
            before = _resident_mib()
    elapsed = time.monotonic() - start
    stats = [engine.scheduler.stats() for engine in engines]
    ends = sum((engine.ends for engine in engines), Counter[str]())
    growth = _resident_mib() - before
    if growth > MAX_GROWTH_MIB:
        raise LeakError(
            f"resident memory has grown by {growth:.1f} MiB in {bursts} bursts (limit {MAX_GROWTH_MIB} MiB)"
        )
    return {
        "minutes": round(elapsed / 60, 2),
        "bursts": bursts,
        "requests": sum(ends.values()),
        **{f"ended: {reason}": number for reason, number in sorted(ends.items())},
        "steps": sum(each.steps for each in stats),
        "preemptions": sum(each.preemptions for each in stats),
        "swaps": sum(each.preemptions_swapped for each in stats),
        "blocks swapped out": sum(each.blocks_swapped_out for each in stats),
        "blocks swapped in": sum(each.blocks_swapped_in for each in stats),
        "prefix tokens found": sum(each.prefix_hit_tokens for each in stats),
        "steps per second": round(sum(each.steps for each in stats) / elapsed),
        "resident memory growth, MiB": round(growth, 1),
    }


def _resident_mib() -> float:
    """The most that was resident so far."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / 2**20 if sys.platform == "darwin" else size / 2**10


def main(argv: Words[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same traffic")
    args = parser.parse_args(argv)
    try:
        figures = soak(args.minutes * 60, args.seed)
    except LeakError as leak:
        print(f"leak (seed {args.seed}): {leak}", file=sys.stderr)
        return 1
    print(", ".join(f"{name} {value:,}" for name, value in figures.items()))
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
