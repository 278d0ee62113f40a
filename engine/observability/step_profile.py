"""Where a step's time goes: what a core and a runner tell an observer, and the recorder that keeps it.

Marks, not spans: a mark says "from here on this thread's time belongs to …" and so ends the part before it. The parts
of a thread therefore add up to its time by construction; nothing is counted twice, and what has no mark of its own
falls to the part before it. A mark costs a few hundred nanoseconds, half of what a span would.

A device that runs behind its host has a clock of its own (`DeviceClock`): parts are then what the device spent, while a
step's wall time stays the host's, and the difference shows as unaccounted. Torch-free.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import get_ident
from typing import Any, NamedTuple, Protocol

from engine.step import StepPlan

INPUTS = "inputs"
"""the plan's differences to the tables, and the step's batch from them"""
ATTENTION_PLAN = "attention plan"
"""what all layers' attention shares: splits, page lists"""
MODEL = "model"
"""the model where its pieces are not told apart (eager, or one captured graph)"""
ATTENTION = "attention"
"""KV write and attention of all layers"""
LOGITS = "logits"
SAMPLING = "sampling"
RESULTS = "results"
"""what was sampled, as host data"""
HAND_OVER = "hand-over"
"""between a step's end and the next one's start on the runner's thread"""

PLAN = "plan"
SUBMIT = "submit"
WAIT = "wait"
"""for a step"""
IDLE = "idle"
"""there is nothing to do"""
COLLECT = "collect"
COMPLETE = "complete"
PUBLISH = "publish"
"""deltas and figures to the front end, and in process the front end's own work"""
CORE_PARTS = (PLAN, SUBMIT, COLLECT, COMPLETE, PUBLISH, WAIT, IDLE)
"""of the core's thread, in the order of a turn"""

PIECE = "piece "
"""a compiled piece is marked as this and a number that means nothing"""

Seconds = Callable[[], Mapping[str, float]]
"""of each part of a thread's time, so far"""
Boxed = Callable[[list[Any]], Sequence[Any]]
Call = Callable[..., Any]


class FusedSteps(Protocol):
    """As `compilation.split.Fused`."""

    @property
    def function(self) -> Boxed: ...

    @property
    def timed(self) -> Callable[[list[Any]], tuple[Sequence[Any], Sequence[tuple[str, int]]]]: ...

    @property
    def reads(self) -> Mapping[str, Sequence[Any]]: ...


class StepObserver(Protocol):
    """Told by a core and a runner what they do; every call is made on the thread that does it."""

    def step(self, plan: StepPlan) -> bool:
        """A step begins, with `INPUTS`. True: run it through the program whose pieces and calls are wrapped."""
        ...

    def mark(self, part: str) -> None:
        """From here on this thread's time belongs to `part`."""
        ...

    def wrap_piece(self, function: Boxed) -> Boxed:
        """One distinct piece of the model, `[size, *inputs] -> outputs`."""
        ...

    def wrap_call(self, function: Call) -> Call:
        """What stands in the place of attention."""
        ...

    def wrap_fused(self, steps: FusedSteps) -> Boxed:
        """Pieces and attention that one function computes."""
        ...


class PartTimes:
    """Adds up what one thread spends on each part while nobody profiles: a mark is one look at the clock and one
    addition. Programs are not wrapped, so a model's pieces are one part."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds: dict[str, float] = {}
        self._part: str | None = None
        self._since = 0.0

    def seconds(self) -> dict[str, float]:
        """Of the parts that have ended; any thread may ask."""
        return self._seconds.copy()

    def seconds_so_far(self) -> dict[str, float]:
        """With the part that goes on; nearly so where another thread asks."""
        seconds, part, since = self.seconds(), self._part, self._since
        if part is not None:
            seconds[part] = seconds.get(part, 0.0) + self._now() - since
        return seconds

    def step(self, plan: StepPlan) -> bool:
        self.mark(INPUTS)
        return False

    def mark(self, part: str) -> None:
        at = self._now()
        if self._part is not None:
            self._seconds[self._part] = self._seconds.get(self._part, 0.0) + at - self._since
        self._part, self._since = part, at

    def wrap_piece(self, function: Boxed) -> Boxed:
        return function

    def wrap_call(self, function: Call) -> Call:
        return function

    def wrap_fused(self, steps: FusedSteps) -> Boxed:
        return steps.function


def part_table(threads: Mapping[str, Mapping[str, float]], steps: int, wall_s: float) -> str:
    """Text: seconds of each part of each thread's time, and what that is for one of `steps`."""
    lines = [f"{steps} steps in {wall_s:.3f} s"]
    for thread, parts in threads.items():
        lines.append(f"\n{thread:<20}{'seconds':>10}{'ms a step':>12}{'of the time':>13}")
        for part, seconds in sorted(parts.items(), key=lambda each: -each[1]):
            share = seconds / wall_s if wall_s > 0 else 0.0
            lines.append(f"  {part:<18}{seconds:>10.4f}{1e3 * seconds / max(steps, 1):>12.4f}{share:>12.1%}")
    return "\n".join(lines)


class DeviceClock(Protocol):
    """Points in a device's queue. `stamp` does not wait for the device."""

    def stamp(self) -> object: ...

    def read(self, stamps: Sequence[object]) -> list[int]:
        """Nanoseconds since the first of them; waits until the device has passed the last."""
        ...


class Event(NamedTuple):
    thread: int
    at_ns: int
    part: str
    plan: StepPlan | None
    """of the step that begins here"""
    watched: bool
    stamp: object
    """the device clock's, on the runner's thread"""


class Recorder:
    """A `StepObserver` that keeps every mark until `take`.

    `watch` False: of a step only begin and end are kept, and its program is not the wrapped one: the undisturbed time.
    `alternate` n > 0 switches between the two every n steps.
    """

    def __init__(self, *, now: Callable[[], int] = time.perf_counter_ns, device: DeviceClock | None = None) -> None:
        self.active = False
        """nothing is kept while False"""
        self.watch = True
        self.alternate = 0
        self.on_first_call: Callable[[str, list[Any]], None] | None = None
        """called with a piece's mark and arguments before its first watched call; that step is not to be timed"""
        self._now = now
        self._device = device
        self._events: list[Event] = []
        self._runner: int | None = None
        self._watched = False
        self._steps = 0
        self._pieces = 0

    def step(self, plan: StepPlan) -> bool:
        if not self.active:
            return False
        at = self._now()
        self._runner = thread = get_ident()
        if self.alternate:
            self._watched = (self._steps // self.alternate) % 2 == 1
        else:
            self._watched = self.watch
        self._steps += 1
        stamp = self._device.stamp() if self._device is not None else None
        self._events.append(Event(thread, at, INPUTS, plan, self._watched, stamp))
        return self._watched

    def mark(self, part: str) -> None:
        if not self.active:
            return
        thread, stamp = get_ident(), None
        if thread == self._runner:
            if not self._watched and part != HAND_OVER:
                return
            if self._device is not None:
                stamp = self._device.stamp()
        self._events.append(Event(thread, self._now(), part, None, False, stamp))

    def wrap_piece(self, function: Boxed) -> Boxed:
        part, self._pieces = f"{PIECE}{self._pieces}", self._pieces + 1
        mark, seen = self.mark, False

        def piece(arguments: list[Any]) -> Sequence[Any]:
            nonlocal seen
            if not seen:
                seen = True
                if self.on_first_call is not None:
                    self.on_first_call(part, arguments)
            mark(part)
            return function(arguments)

        return piece

    def wrap_call(self, function: Call) -> Call:
        mark, piece_follows = self.mark, self._pieces > 0

        def attention(*arguments: Any, **named: Any) -> Any:
            mark(ATTENTION)
            result = function(*arguments, **named)
            if not piece_follows:
                mark(MODEL)
            return result

        return attention

    def wrap_fused(self, steps: FusedSteps) -> Boxed:
        parts = dict.fromkeys(steps.reads, "")
        for label in parts:
            parts[label], self._pieces = f"{PIECE}{self._pieces}", self._pieces + 1
        seen = False

        def fused(arguments: list[Any]) -> Sequence[Any]:
            nonlocal seen
            if not seen:
                seen = True
                for label, part in parts.items():
                    if self.on_first_call is not None:
                        self.on_first_call(part, list(steps.reads[label]))
            outputs, begins = steps.timed(arguments)
            if self.active and self._watched:
                thread = get_ident()
                for label, at_ns in begins:
                    self._events.append(Event(thread, at_ns, parts.get(label, ATTENTION), None, False, None))
            return outputs

        return fused

    def take(self) -> Timeline:
        """All that was kept, and forget it. No step may be running."""
        events, self._events = self._events, []
        self._steps = 0
        stamped = [i for i, event in enumerate(events) if event.stamp is not None]
        at = [event.at_ns for event in events]
        if self._device is not None and stamped:
            for i, ns in zip(stamped, self._device.read([events[i].stamp for i in stamped]), strict=True):
                at[i] = ns
        return Timeline(events, at)


@dataclass(frozen=True)
class PartTime:
    ns: int
    calls: int


@dataclass(frozen=True)
class StepTimes:
    """One step on the runner's thread."""

    plan: StepPlan
    watched: bool
    start_ns: int
    end_ns: int
    """start of the next step; of the last one, its own end"""
    is_last: bool
    """nothing follows, so there is no hand-over"""
    parts: dict[str, PartTime]
    """on the device's clock where there is one; empty but for `HAND_OVER` where the step was not watched"""

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.start_ns

    def to_its_own_end(self) -> StepTimes:
        """The same without the hand-over to the next step."""
        parts = {part: spent for part, spent in self.parts.items() if part != HAND_OVER}
        after = self.parts.get(HAND_OVER, PartTime(0, 0)).ns
        return dataclasses.replace(self, end_ns=self.end_ns - after, is_last=True, parts=parts)


class Timeline:
    """Marks in the order in which they were made, thread by thread."""

    def __init__(self, events: Sequence[Event], part_ns: Sequence[int]) -> None:
        """`part_ns`: the clock by which parts are measured, where it is not the host's."""
        self._threads: dict[int, list[int]] = {}
        for i, event in enumerate(events):
            self._threads.setdefault(event.thread, []).append(i)
        self._events = events
        self._part_ns = part_ns

    def steps(self) -> list[StepTimes]:
        """Steps in order; what ran on that thread before the first of them is left out."""
        runner = next((event.thread for event in self._events if event.plan is not None), None)
        mine = [] if runner is None else self._threads[runner]
        starts = [k for k, i in enumerate(mine) if self._events[i].plan is not None]
        ends = [*(k + 1 for k in starts[1:]), len(mine)]  # a step ends with the first mark of the next
        return [self._step(mine[first:end]) for first, end in zip(starts, ends)]

    def _step(self, marks: Sequence[int]) -> StepTimes:
        """`marks`: those of the step and the first of the next step, if there is one."""
        first = self._events[marks[0]]
        assert first.plan is not None
        is_last = self._events[marks[-1]].plan is None or len(marks) == 1
        if is_last:
            ends = [k for k, i in enumerate(marks) if self._events[i].part == HAND_OVER]
            marks = marks[: ends[0] + 1] if ends else marks
        parts: dict[str, PartTime] = {}
        kept = marks if first.watched else [i for i in marks if self._events[i].part in (HAND_OVER, INPUTS)]
        for here, after in pairwise(kept):
            part = self._events[here].part
            known = parts.get(part, PartTime(0, 0))
            parts[part] = PartTime(known.ns + self._part_ns[after] - self._part_ns[here], known.calls + 1)
        if not first.watched:
            parts = {part: spent for part, spent in parts.items() if part == HAND_OVER}
        return StepTimes(first.plan, first.watched, first.at_ns, self._events[marks[-1]].at_ns, is_last, parts)

    def beside(self, start_ns: int, end_ns: int) -> dict[str, int]:
        """Nanoseconds of each part of the other threads between two points of the host's clock."""
        runner = next((event.thread for event in self._events if event.plan is not None), None)
        spent: dict[str, int] = {}
        for thread, marks in self._threads.items():
            if thread == runner:
                continue
            for here, after in zip(marks, [*marks[1:], None]):
                begin = max(start_ns, self._events[here].at_ns)
                end = end_ns if after is None else min(end_ns, self._events[after].at_ns)
                if end > begin:
                    part = self._events[here].part
                    spent[part] = spent.get(part, 0) + end - begin
        return spent
