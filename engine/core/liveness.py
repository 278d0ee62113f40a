"""Is a core that says nothing slow, idle or hung? Decided from its heartbeats alone, without a clock of its own."""

from __future__ import annotations

import threading

from engine.core.wire import Heartbeat, Phase

_DOING: dict[Phase, str] = {
    "start": "starting",
    "idle": "waiting for requests",
    "plan": "planning a step",
    "submit": "handing a step to the executor",
    "collect": "waiting for the device",
    "complete": "completing a step",
}


STALL_S = 10.0
"""silence that is a stall for every core, however quick its steps"""
STALL_STEPS = 20
"""how many of its slow steps' durations one step may take"""
SETTLED_STEPS = 64
"""steps before which little is known of the next one's duration: the first ones load code, and are few"""
UNSETTLED_STALL_S = 60.0
"""what counts as a stall among them"""


class Liveness:
    """What the front end knows about the core's progress; times are seconds of one monotonic clock. Thread-safe.

    An idle core owes nothing. From the moment a message is sent to it until it reports that it is idle again, it owes
    heartbeats, and, once it has started, turns.
    """

    def __init__(self, hang_timeout_s: float, now: float) -> None:
        self._limit_s = hang_timeout_s
        self._heard_at = now
        self._progress_at = now
        self._turns = 0
        self._phase: Phase = "start"
        self._sent = 0
        self._steps = 0
        self._step_s = 0.0
        self._lock = threading.Lock()

    def sent(self, now: float) -> None:
        """A message goes to the core."""
        with self._lock:
            self._sent += 1
            if self._phase == "idle":
                self._phase = "plan"
                self._heard_at = self._progress_at = now

    def not_sent(self) -> None:
        """What `sent` told was refused."""
        with self._lock:
            self._sent -= 1

    def progressed(self, now: float) -> None:
        """A message came that only a turning loop sends."""
        with self._lock:
            if self._phase in ("start", "idle"):
                self._phase = "plan"
            self._heard_at = self._progress_at = now

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """A heartbeat came."""
        with self._lock:
            self._heard_at = now
            if heartbeat.turns != self._turns:
                self._turns = heartbeat.turns
                self._progress_at = now
            self._steps, self._step_s = heartbeat.steps, heartbeat.step_s
            starting = heartbeat.phase == "start" and self._phase != "start"  # it overlapped with `CoreReady`
            outdated = heartbeat.phase == "idle" and heartbeat.received < self._sent
            if not starting and not outdated:
                self._phase = heartbeat.phase

    @property
    def idle(self) -> bool:
        return self._phase == "idle"

    def verdict(self, now: float) -> str | None:
        """Why the core counts as hung, or None."""
        if self.idle:
            return None
        limit = f"the limit is hang_timeout_s = {self._limit_s:g}"
        if now - self._heard_at > self._limit_s:
            return f"hung: no heartbeat for {now - self._heard_at:.1f} s while {_DOING[self._phase]}; {limit}"
        if self._phase != "start" and now - self._progress_at > self._limit_s:
            return f"hung: no turn of the loop for {now - self._progress_at:.1f} s while {_DOING[self._phase]}; {limit}"
        return None

    def stalled(self, now: float, *, compiling: bool = False) -> str | None:
        """Why the core seems hung, long before `verdict` gives it up, or None: nothing heard for `STALL_S`, or no turn
        for that long and for `STALL_STEPS` slow steps. While it starts or compiles nothing is expected of its turns."""
        if self._phase in ("start", "idle"):
            return None
        doing = _DOING[self._phase]
        if now - self._heard_at > STALL_S:
            return f"no heartbeat for {now - self._heard_at:.1f} s while {doing}"
        settled = self._steps >= SETTLED_STEPS
        limit = max(STALL_S if settled else UNSETTLED_STALL_S, STALL_STEPS * self._step_s)
        if compiling or now - self._progress_at <= limit:
            return None
        silence = f"no turn of the loop for {now - self._progress_at:.1f} s while {doing}"
        return f"{silence}; its slow steps take {self._step_s:.3f} s"
