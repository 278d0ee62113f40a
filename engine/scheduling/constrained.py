"""Requests with a grammar: they wait for it without holding up those behind them, and every step that samples for them
is told what it may."""

from __future__ import annotations

from collections.abc import Callable

from engine.errors import InvalidRequestError
from engine.grammars.interface import Grammars, Matcher
from engine.scheduling.adapted import Adapted
from engine.scheduling.holdings import Holdings
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.steps_in_flight import StepsInFlight
from engine.step import StepMasks


class Constrained:
    def __init__(
        self,
        held: Holdings,
        steps: StepsInFlight,
        grammars: Grammars | None,
        adapted: Adapted,
        begun: Callable[[str], None],
    ) -> None:
        """`begun`: is told for whom a grammar is compiled."""
        self._held, self._adapted, self._begun = held, adapted, begun
        self._steps = steps
        self._grammars = grammars
        self._preparing: dict[str, list[list[Sequence]]] = {}
        """by their grammar: the sequences of each request that waits for it"""

    def __len__(self) -> int:
        """Sequences that wait for a grammar."""
        return sum(len(samples) for requests in self._preparing.values() for samples in requests)

    def start(self, grammar: str, request_id: str) -> Matcher | None:
        """Where outputs begin in it; None: it compiles, and the request is to be prepared. Raises `InvalidRequestError`
        if it did not compile."""
        if self._grammars is None:
            raise InvalidRequestError("this engine compiles no grammars", "structured_outputs")
        if self._grammars.begin(grammar):
            return self._grammars.start(grammar)
        if grammar not in self._preparing:
            self._begun(request_id)
        return None

    def prepare(self, grammar: str, samples: list[Sequence]) -> None:
        """A new request's sequences take their places when the grammar is compiled."""
        for seq in samples:
            seq.status = Status.PREPARING
        self._preparing.setdefault(grammar, []).append(samples.copy())

    def compiled(self, grammar: str) -> list[tuple[Sequence, str]]:
        """It is at hand, or has failed. Returns the requests that fail with it."""
        failed = []
        for samples in self._preparing.pop(grammar, ()):
            alive = [seq for seq in samples if seq.status is Status.PREPARING]
            if alive:
                try:
                    start = self.start(grammar, alive[0].request_id)
                    if start is None:
                        self.prepare(grammar, alive)
                        continue
                    self.queue(alive, start)
                except InvalidRequestError as error:
                    failed.append((alive[0], str(error)))
        return failed

    def queue(self, samples: list[Sequence], start: Matcher | None) -> None:
        """A request's sequences, or the members of its search, take their places, or wait for their adapter first."""
        for seq in samples:
            seq.matcher = None if start is None else start.copy()
            if seq.matcher is not None:
                with self._held.failures.isolate(seq):
                    for token in seq.tokens[seq.prompt_len :]:  # of what is resumed
                        seq.matcher.advance(token)
        if self._adapted.enter(samples):
            self.place(samples)

    def place(self, samples: list[Sequence]) -> None:
        """Nothing is missing any more."""
        leader, *others = samples
        if leader.group is not None:
            for seq in others:
                seq.status = Status.FOLLOWING
            others = []
        self._held.queue(leader, others)

    def masks(self) -> StepMasks | None:
        """What the oldest step in flight waits for, once."""
        waiting = self._steps.oldest_masked()
        if waiting is None or self._grammars is None:
            return None
        step_id, step = waiting
        owners, samples = step.owners[step.masked].tolist(), step.rows.samples[step.masked].tolist()
        drafts = [seq.drafts[: count - 1] for seq, count in zip(owners, samples)]
        bits, failed = self._grammars.fill([seq.matcher for seq in owners], drafts)
        for index, reason in failed.items():
            if owners[index].status is not Status.FINISHED:
                self._held.failures.note(owners[index], InvalidRequestError(reason, "structured_outputs"))
        self._steps.last_masked = step_id
        return StepMasks(step_id, bits)
