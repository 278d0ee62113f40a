"""Does one-step-ahead hide the host? A device of 5 ms a step and a host side of 4 ms, through the real `CoreLoop`.

The device sleeps in a thread of its own, as a real one computes outside the interpreter; the host side is Python that
holds the interpreter for that long by the clock on the wall, spread over plan, complete and publish. Serially a step
costs their sum; one step ahead it costs the larger of the two. What the machine makes of a 5 ms sleep and of 4 ms of
Python is measured beside it ("alone"). Prints a table, and JSON as the last line; exits 1 when the limit is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from queue import SimpleQueue

from engine.core.loop import CoreLoop
from engine.core.process import SWITCH_INTERVAL_S
from engine.core.wire import AddRequest, CoreStats, SequenceDelta, Shutdown, StepOutputs
from engine.step import LoadReport, RowParams, ScheduledRow, StepPlan, StepResult, WarmUpReport

PLAN_SHARE, COMPLETE_SHARE, PUBLISH_SHARE = 0.5, 0.375, 0.125
LIMIT_AHEAD = 1.1
"""step cost one step ahead, as a multiple of the device's time: 5.5 ms for 5 ms"""
WARM_UP_STEPS = 20


class SleepingDevice:
    """Takes `step_s` for a step, in order, in its own thread."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._work: SimpleQueue[StepPlan | None] = SimpleQueue()
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

    def allocate(self, num_blocks: int) -> None:
        """Nothing to keep."""

    def warm_up(self) -> WarmUpReport:
        return WarmUpReport()

    def submit(self, plan: StepPlan) -> None:
        self._work.put(plan)

    def collect(self) -> StepResult:
        return self._done.get()

    def compiles_after_ready(self) -> int:
        return 0

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (plan := self._work.get()) is not None:
            time.sleep(self._step_s)
            self._done.put(StepResult(step_id=plan.step_id, token_ids=[0 for _ in plan.rows]))


class BusyScheduler:
    """One endless sequence whose planning and completing cost `host_s` of Python a step."""

    def __init__(self, host_s: float) -> None:
        self._host_s = host_s
        self._requests: list[str] = []
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: AddRequest) -> None:
        self._requests.append(request.request_id)

    def abort(self, request_ids: list[str]) -> list[SequenceDelta]:
        self._requests = [r for r in self._requests if r not in request_ids]
        return []

    def plan(self) -> StepPlan | None:
        burn(PLAN_SHARE * self._host_s)
        self._steps += 1
        row = ScheduledRow(row=0, computed=self._steps, query_len=1, samples=True)
        return StepPlan(step_id=self._steps, rows=[row])

    def complete(self, result: StepResult) -> list[SequenceDelta]:
        burn(COMPLETE_SHARE * self._host_s)
        return [SequenceDelta(request_id=r, token_ids=result.token_ids) for r in self._requests]

    def stats(self) -> CoreStats:
        return CoreStats(running=len(self._requests), steps=self._steps)

    def reset_prefix_cache(self) -> int:
        return 0


def burn(seconds: float) -> None:
    """Keep the interpreter busy for `seconds`."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def measure(device_s: float, host_s: float, steps: int, async_scheduling: bool) -> list[float]:
    """Seconds between the publications of successive steps."""
    device = SleepingDevice(device_s)
    loop = CoreLoop(BusyScheduler(host_s), device, async_scheduling)
    published: list[float] = []

    def publish(outputs: StepOutputs) -> None:
        burn(PUBLISH_SHARE * host_s)
        published.append(time.perf_counter())
        if len(published) == steps + WARM_UP_STEPS:
            loop.inbox.put(Shutdown())

    loop.inbox.put(AddRequest(request_id="r", prompt_token_ids=[0], params=RowParams(seed=0), max_tokens=1 << 30))
    loop.run(publish)
    device.close()
    return [b - a for a, b in zip(published[WARM_UP_STEPS - 1 :], published[WARM_UP_STEPS:])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-ms", type=float, default=5.0)
    parser.add_argument("--host-ms", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as the core process does
    device_s, host_s = args.device_ms / 1000, args.host_ms / 1000
    runs = {
        "device_alone": measure(device_s, 0.0, args.steps, False),
        "host_alone": measure(0.0, host_s, args.steps, False),
        "serial": measure(device_s, host_s, args.steps, False),
        "one_step_ahead": measure(device_s, host_s, args.steps, True),
    }
    report: dict[str, float | bool] = {"device_ms": args.device_ms, "host_ms": args.host_ms, "steps": args.steps}
    print(f"device {args.device_ms:g} ms, host {args.host_ms:g} ms, {args.steps} steps\n")
    print(f"{'':<18}{'median ms':>11}{'mean ms':>11}{'p99 ms':>11}")
    for key, seconds in runs.items():
        name, times = key.replace("_", " "), [1000 * s for s in seconds]
        median, mean, p99 = statistics.median(times), statistics.fmean(times), statistics.quantiles(times, n=100)[-1]
        print(f"{name:<18}{median:>11.2f}{mean:>11.2f}{p99:>11.2f}")
        report |= {f"{key}_median_ms": median, f"{key}_mean_ms": mean, f"{key}_p99_ms": p99}
    limit = LIMIT_AHEAD * max(args.device_ms, args.host_ms)
    serial_floor = args.device_ms + args.host_ms
    passed = report["one_step_ahead_median_ms"] < limit and report["serial_median_ms"] >= serial_floor
    print(f"\none step ahead must cost under {limit:g} ms: {'yes' if passed else 'NO'}")
    print(json.dumps(report | {"limit_ms": limit, "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
