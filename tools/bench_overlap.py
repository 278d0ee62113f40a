"""Does one-step-ahead hide the host? A device of 5 ms a step and a host side of 4 ms, through the real `CoreLoop`.

The device sleeps in a thread of its own, as a real one computes outside the interpreter; the host side is Python that
holds the interpreter for that long by the clock on the wall, spread over plan, complete and publish. Serially a step
costs their sum; one step ahead it costs the larger of the two. What the machine makes of a 5 ms sleep and of 4 ms of
Python is measured beside it ("alone").

Overlap needs two free cores, so each round also counts how long its threads waited for one. The verdict rests on the
rounds in which they did not; that choice never looks at a step's cost, and the figures of all rounds stand beside it.
Prints a table, and JSON as the last line; exits 0 passed, 1 failed, 2 inconclusive (no quiet round).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import msgspec

from engine.adapters.request import LoRARequest
from engine.core.loop import CoreLoop
from engine.core.process import SWITCH_INTERVAL_S
from engine.core.wire import AddRequest, CoreStats, SequenceDelta, Shutdown, StepOutputs
from engine.executor.interface import CompileState
from engine.kv_transfer.interface import News
from engine.reports import LoadReport, WarmUpReport
from engine.step import RowParams, Rows, ScheduledRow, StepMasks, StepPlan, StepResult

PLAN_SHARE, COMPLETE_SHARE, PUBLISH_SHARE = 0.5, 0.375, 0.125
LIMIT_AHEAD = 1.1
"""step cost one step ahead, as a multiple of the device's time: 5.5 ms for 5 ms"""
WARM_UP_STEPS = 5
ROUND_STEPS = 40
QUIET_CPU_WAIT_MS = 0.2
"""per step; the gap between the device's 5 ms and the limit is 0.5"""


class SleepingDevice:
    """Takes `step_s` for a step, in order, in its own thread."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._work: SimpleQueue[tuple[StepPlan, Callable[[], None]] | None] = SimpleQueue()
        self._done: SimpleQueue[StepResult] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def load(self) -> LoadReport:
        return LoadReport(
            weight_bytes=0,
            activation_bytes=0,
            workspace_bytes=0,
            block_bytes=1,
            device_bytes_total=1,
            device_bytes_free=1,
            attention_backend="none",
        )

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Nothing to keep."""

    def warm_up(self) -> WarmUpReport:
        return WarmUpReport()

    def submit(self, plan: StepPlan, done: Callable[[], None]) -> None:
        self._work.put((plan, done))

    def sample(self, masks: StepMasks) -> None:
        """No request has a grammar."""

    def collect(self) -> StepResult:
        return self._done.get()

    def compile_state(self) -> CompileState:
        return "done"

    def watch_compilation(self, changed: Callable[[], None]) -> None:
        changed()

    def compiles_after_ready(self) -> int:
        return 0

    def part_seconds(self) -> dict[str, float]:
        return {}

    def team(self) -> None:
        return None

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            plan, done = work
            time.sleep(self._step_s)
            self._done.put(StepResult(step_id=plan.step_id, token_ids=[0] * len(plan.rows)))
            done()


class BusyScheduler:
    """One endless sequence whose planning and completing cost `host_s` of Python a step."""

    def __init__(self, host_s: float) -> None:
        self._host_s = host_s
        self._requests: list[str] = []
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    is_busy = has_work

    def add(self, request: AddRequest) -> None:
        self._requests.append(request.request_id)

    def abort(self, request_ids: list[str]) -> list[SequenceDelta]:
        self._requests = [r for r in self._requests if r not in request_ids]
        return []

    def plan(self) -> StepPlan | None:
        burn(PLAN_SHARE * self._host_s)
        self._steps += 1
        row = ScheduledRow(row=0, computed=self._steps, query_len=1, samples=True)
        return StepPlan(step_id=self._steps, rows=Rows.of([row]))

    def end_failed(self) -> list[SequenceDelta]:
        return []

    def masks(self) -> StepMasks | None:
        return None

    def grammar_compiled(self, grammar: str) -> list[SequenceDelta]:
        return []

    def adapter_loaded(self, adapter: LoRARequest) -> list[SequenceDelta]:
        return []

    def steps_changed(self) -> None: ...

    def transferred(self, news: News) -> list[SequenceDelta]:
        return []

    def has_begun(self, request_id: str) -> bool:
        return True

    def give_up(self, request_id: str) -> list[SequenceDelta]:
        return []

    def complete(self, result: StepResult, seconds: float = 0.0) -> list[SequenceDelta]:
        burn(COMPLETE_SHARE * self._host_s)
        return [SequenceDelta(request_id=r, token_ids=result.token_ids) for r in self._requests]

    def stats(self) -> CoreStats:
        return CoreStats(running=len(self._requests), steps=self._steps)

    def unpin(self, name: str) -> None: ...

    def reset_prefix_cache(self) -> int:
        return 0


def burn(seconds: float) -> None:
    """Keep the interpreter busy for `seconds`."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the loop."""

    step_ms: list[float]
    """between the publications of successive steps"""
    cpu_wait_ms: float
    """per step: how long threads that could run waited for a core, because others had it"""

    @property
    def quiet(self) -> bool:
        return self.cpu_wait_ms <= QUIET_CPU_WAIT_MS


def measure(device_s: float, host_s: float, async_scheduling: bool) -> Round:
    device = SleepingDevice(device_s)
    loop = CoreLoop(BusyScheduler(host_s), device, 1 + async_scheduling)
    published: list[float] = []
    waited: list[float] = []

    def publish(outputs: StepOutputs) -> None:
        burn(PUBLISH_SHARE * host_s)
        published.append(time.perf_counter())
        if len(published) in (WARM_UP_STEPS, WARM_UP_STEPS + ROUND_STEPS):
            waited.append(cpu_wait_ms())
        if len(published) == WARM_UP_STEPS + ROUND_STEPS:
            loop.inbox.put(Shutdown())

    loop.inbox.put(AddRequest(request_id="r", prompt_token_ids=[0], params=RowParams(seed=0), max_tokens=1 << 30))
    loop.run(publish)
    device.close()
    steps = zip(published[WARM_UP_STEPS - 1 :], published[WARM_UP_STEPS:])
    return Round(step_ms=[1000 * (b - a) for a, b in steps], cpu_wait_ms=(waited[1] - waited[0]) / ROUND_STEPS)


def cpu_wait_ms() -> float:
    """Time that this process's threads have spent runnable but without a core (Linux, second field of schedstat)."""
    return sum(int(path.read_text().split()[1]) for path in Path("/proc/self/task").glob("*/schedstat")) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-ms", type=float, default=5.0)
    parser.add_argument("--host-ms", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=10, help=f"quiet rounds of {ROUND_STEPS} steps to collect")
    parser.add_argument("--max-seconds", type=float, default=60.0, help="stop looking for quiet rounds after this")
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as the core process does
    device_s, host_s = args.device_ms / 1000, args.host_ms / 1000
    cases = {
        "device_alone": (device_s, 0.0, False),
        "host_alone": (0.0, host_s, False),
        "serial": (device_s, host_s, False),
        "one_step_ahead": (device_s, host_s, True),
    }
    rounds: dict[str, list[Round]] = {name: [] for name in cases}
    deadline = time.monotonic() + args.max_seconds
    while time.monotonic() < deadline and any(sum(r.quiet for r in done) < args.rounds for done in rounds.values()):
        for name, case in cases.items():
            rounds[name].append(measure(*case))
    print(f"device {args.device_ms:g} ms, host {args.host_ms:g} ms, rounds of {ROUND_STEPS} steps\n")
    return report(rounds, args.device_ms, args.host_ms)


def report(rounds: dict[str, list[Round]], device_ms: float, host_ms: float) -> int:
    """Print the table and the verdict; the exit status."""
    figures: dict[str, float | str | None] = {"device_ms": device_ms, "host_ms": host_ms}
    print(
        f"{'ms a step':<18}{'quiet rounds':>14}{'median':>9}{'mean':>9}{'p99':>9}"
        f"{'| all rounds: median':>22}{'CPU wait':>10}"
    )
    for name, done in rounds.items():
        quiet = [t for r in done if r.quiet for t in r.step_ms]
        every = [t for r in done for t in r.step_ms]
        wait = statistics.fmean(r.cpu_wait_ms for r in done)
        median, mean, p99 = (
            (statistics.median(quiet), statistics.fmean(quiet), statistics.quantiles(quiet, n=100)[-1])
            if quiet
            else (None, None, None)
        )
        cells = "".join(f"{'-' if v is None else format(v, '.2f'):>9}" for v in (median, mean, p99))
        count = f"{sum(r.quiet for r in done)} of {len(done)}"
        print(f"{name.replace('_', ' '):<18}{count:>14}{cells}{statistics.median(every):>22.2f}{wait:>10.2f}")
        figures |= {
            f"{name}_quiet_rounds": sum(r.quiet for r in done),
            f"{name}_rounds": len(done),
            f"{name}_median_ms": median,
            f"{name}_mean_ms": mean,
            f"{name}_p99_ms": p99,
            f"{name}_all_rounds_median_ms": statistics.median(every),
            f"{name}_cpu_wait_ms": wait,
        }
    limit = LIMIT_AHEAD * max(device_ms, host_ms)
    ahead = [t for r in rounds["one_step_ahead"] if r.quiet for t in r.step_ms]
    if not ahead:
        verdict = "inconclusive"
        print("\ninconclusive: in no round were two cores free; run it again on a quieter machine")
    else:
        verdict = "passed" if statistics.median(ahead) < limit else "failed"
        print(f"\none step ahead must cost under {limit:g} ms: {verdict}")
    print(json.dumps(figures | {"limit_ms": limit, "verdict": verdict}))
    return {"passed": 0, "failed": 1, "inconclusive": 2}[verdict]


if __name__ == "__main__":
    sys.exit(main())
