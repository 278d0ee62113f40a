"""What the policy `fair` and deadlines do under load: the engine's scheduler on a virtual clock, with steps that cost
what OPT-13B's cost on an A100 (`entrypoints/bench/paper/cost.py`), or SmolLM2's on two cores. Nothing is computed, so a
minute of load takes seconds, and the same seed gives the same figures on any machine.

Run: python tools/bench_fairness.py [--seconds 60] [--seed 1] [--only flood]. Prints one JSON object a line. Nine
tenants send some sixty requests a minute, so the 99th percentile takes ten minutes (`--seconds 600 --only flood`).

`flood`: nine tenants that send little, alone and beside a tenth that sends 100 times as much. `overload`: more than can
be served, all with a deadline; goodput is what ended within it, peak what a load of 1.0 brings. `exact`: answers are as
long as `max_tokens`; else all say 1,000, and answers end when they end. `slower`: the machine is, now and then.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.config import Policy, SchedulerConfig
from engine.core.wire import AddRequest, SequenceDelta, each_delta
from engine.errors import QueueFullError
from engine.kv_cache.kv_cache import KVCache
from engine.request import Tenant
from engine.scheduling.scheduler import Scheduler
from engine.step import RowParams, StepPlan, StepResult
from entrypoints.bench.paper.cost import OPT_13B, StepCost

BLOCK, ROWS, BUDGET, CONTEXT = 16, 128, 512, 2048
HONEST = 9
END, LOOSE = 9, 1000
"""the token that ends an answer; what may be asked for where it does"""


class TwoCores:
    """Compute is scarce, not bandwidth: what a step takes is by its tokens, nearly."""

    def of_plan(self, plan: StepPlan) -> float:
        return 0.012 + 0.0047 * int(plan.rows.query_lens.sum())


@dataclass(frozen=True)
class Served:
    """A server, and requests a second of these lengths that it sustains."""

    cost: StepCost | TwoCores
    capacity: float
    deadline_s: float


class Slower:
    """Two cores that others want, too: in one of three parts of 10 to 40 s every step takes 1.35 times as long."""

    def __init__(self, seed: int) -> None:
        dice, at = random.Random(f"{seed} pace"), 0.0
        self.parts: list[tuple[float, float]] = []
        while at < 86400.0:
            at += dice.uniform(10.0, 40.0)
            self.parts.append((at, dice.choice([1.0, 1.0, 1.35])))

    def __call__(self, now: float) -> float:
        return next((times for until, times in self.parts if until > now), 1.0)


SERVERS = {
    "A100": Served(StepCost(OPT_13B, BLOCK), 5.0, 20.0),
    "two cores": Served(TwoCores(), 0.47, 30.0),
}
CAPACITY = SERVERS["A100"].capacity


@dataclass
class Request:
    at: float
    tenant: str
    prompt: int
    output: int
    deadline_s: float | None = None
    first: float | None = None
    end: float | None = None
    dropped: bool = False
    """while it waited: it could not be in time any more"""
    refused: float | None = None
    """when to ask again"""


@dataclass
class Run:
    """One load on one scheduler."""

    policy: Policy
    requests: Sequence[Request]
    cost: StepCost | TwoCores = SERVERS["A100"].cost
    exact: bool = True
    """`max_tokens` is how long each answer is"""
    pace: Callable[[float], float] = lambda now: 1.0
    """times as long as `cost` says takes a step that begins then"""
    now: float = field(default=0.0, init=False)
    busy: float = field(default=0.0, init=False)
    given: dict[str, float] = field(default_factory=lambda: defaultdict(float), init=False)
    """tokens that each tenant was given, prompts and answers, while all of them come"""
    preemptions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        kv = KVCache(OPT_13B.num_slots // BLOCK, BLOCK, False, (None,), BUDGET, 0, False)
        config = SchedulerConfig(
            max_num_seqs=ROWS,
            max_num_batched_tokens=BUDGET,
            max_model_len=CONTEXT,
            max_waiting=100_000,
            policy=self.policy,
        )
        self.scheduler = Scheduler(config, kv, clock=lambda: self.now)

    def go(self) -> None:
        coming, live = deque(enumerate(self.requests)), dict[str, Request]()
        last = self.requests[-1].at
        while coming or live:
            while coming and coming[0][1].at <= self.now:
                self._add(live, *coming.popleft())
            plan = self.scheduler.plan()
            self._end(live, self.scheduler.end_failed())
            if plan is None:
                if not coming:
                    break
                self.now = coming[0][1].at
                continue
            seconds = self.cost.of_plan(plan) * self.pace(self.now)
            self.now += seconds
            self.busy += seconds
            result = StepResult(step_id=plan.step_id, token_ids=self._sampled(plan, live))
            for delta in each_delta(self.scheduler.complete(result, seconds)):
                request = live[delta.request_id]
                if request.first is None and delta.token_ids:
                    request.first = self.now
                    self._give(request, request.prompt, last)
                self._give(request, len(delta.token_ids), last)
                if delta.finish_reason is not None:
                    request.end = self.now
                    del live[delta.request_id]
            late = [name for name, each in live.items() if each.deadline_s and self.now > each.at + each.deadline_s]
            self.scheduler.abort(late)  # as the front end does
            for name in late:
                del live[name]
        self.preemptions = self.scheduler.stats().preemptions

    def _sampled(self, plan: StepPlan, live: dict[str, Request]) -> list[int]:
        """The last one of an answer ends it."""
        rows, tokens = self.scheduler._rows, []
        for row in plan.rows.row[plan.rows.samples > 0].tolist():
            seq = rows.owners[row]
            request = live.get(seq.request_id) if seq is not None else None
            last = request is not None and len(seq.tokens) - seq.prompt_len + 1 >= request.output
            tokens.append(END if last else 7)
        return tokens

    def _end(self, live: dict[str, Request], deltas: Sequence[SequenceDelta]) -> None:
        """They were too late to begin."""
        for delta in deltas:
            live.pop(delta.request_id).dropped = True

    def _give(self, request: Request, tokens: int, last: float) -> None:
        if self.now <= last:
            self.given[request.tenant] += tokens

    def _add(self, live: dict[str, Request], index: int, request: Request) -> None:
        message = AddRequest(
            request_id=str(index),
            prompt_token_ids=[1] * request.prompt,
            params=RowParams(seed=0, stop_token_ids=[END]),
            max_tokens=request.output if self.exact else LOOSE,
            tenant=Tenant(request.tenant),
            deadline_s=None if request.deadline_s is None else request.deadline_s - (self.now - request.at),
        )
        try:
            self.scheduler.add(message)
            live[str(index)] = request
        except QueueFullError as error:
            request.refused = error.retry_after_s


def load(rates: dict[str, float], seconds: float, seed: int, deadline_s: float | None = None) -> list[Request]:
    """Poisson arrivals of each tenant, in order."""
    found = []
    for name, rate in rates.items():
        dice, at = random.Random(f"{seed} {name}"), 0.0
        while (at := at + dice.expovariate(rate)) < seconds:
            found.append(Request(at, name, dice.randint(50, 400), dice.randint(50, 350), deadline_s))
    return sorted(found, key=lambda each: each.at)


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def flood(seconds: float, seed: int) -> None:
    honest = {f"tenant {index}": CAPACITY / 40 for index in range(HONEST)}
    loads = {"alone": honest, "flooded": {**honest, "flood": 100 * CAPACITY / 40}}
    p99 = {}
    for policy in ("fcfs", "fair"):
        for name, rates in loads.items():
            run = Run(policy, load(rates, seconds, seed))
            run.go()
            theirs = [each for each in run.requests if each.tenant != "flood" and each.first is not None]
            ttft = [(each.first or 0.0) - each.at for each in theirs]
            p99[policy, name] = quantile(ttft, 0.99)
            shares = [
                run.given[tenant] / sum(e.prompt + e.output for e in theirs if e.tenant == tenant) for tenant in honest
            ]
            line = {
                "case": "flood",
                "policy": policy,
                "load": name,
                "honest_ttft_p50_s": round(quantile(ttft, 0.5), 4),
                "honest_ttft_p99_s": round(p99[policy, name], 4),
                "over_alone": round(p99[policy, name] / p99[policy, "alone"], 2),
                "tokens_per_s": round(sum(run.given.values()) / seconds, 1),
                "jain_of_honest": round(sum(shares) ** 2 / (len(shares) * sum(x * x for x in shares)), 4),
                "preemptions": run.preemptions,
            }
            print(json.dumps(line), flush=True)


def overload(name: str, exact: bool, seconds: float, seed: int, slower: bool = False) -> None:
    served, peak = SERVERS[name], 0.0
    for factor in (0.8, 1.0, 1.2, 2.0, 4.0):
        requests = load({"all": factor * served.capacity}, seconds, seed, served.deadline_s)
        run = Run("fcfs", requests, served.cost, exact, Slower(seed) if slower else lambda now: 1.0)
        run.go()
        admitted = [each for each in run.requests if each.refused is None]
        kept = [each for each in admitted if each.end is not None]
        goodput = sum(each.output for each in kept) / run.now
        peak = max(peak, goodput) if factor <= 1.2 else peak
        line = {
            "case": "overload",
            "server": name,
            "exact": exact,
            "slower": slower,
            "load": factor,
            "requests": len(run.requests),
            "refused": len(run.requests) - len(admitted),
            "dropped": sum(each.dropped for each in admitted),
            "kept_of_admitted": round(len(kept) / len(admitted), 4),
            "goodput_tokens_per_s": round(goodput, 1),
            "over_peak": round(goodput / peak, 3),
            "retry_after_p50_s": round(
                quantile([each.refused or 0.0 for each in run.requests if each.refused] or [0.0], 0.5), 2
            ),
        }
        print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("flood", "overload"))
    options = parser.parse_args()
    if options.only != "overload":
        flood(options.seconds, options.seed)
    if options.only == "flood":
        return 0
    for name, longer in (("A100", 5), ("two cores", 20)):
        for exact in (True, False):
            overload(name, exact, longer * options.seconds, options.seed)
            overload(name, exact, longer * options.seconds, options.seed, slower=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
