"""How fast real steps are beside a table: the machine of another hour, and what its processes take from each other."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.wire import StepOutputs, each_delta
from entrypoints.bench.cluster.costs import StepCosts, StepWork
from entrypoints.bench.cluster.traffic import Arrival


class Pace:
    """Of steps that only decode: what they compute is known from their outputs."""

    def __init__(self, costs: StepCosts, arrivals: Sequence[Arrival]) -> None:
        self._costs = costs
        self._context = {each.message.request_id: len(each.message.prompt_token_ids) for each in arrivals}
        self._began: set[str] = set()
        self._real = self._told = 0.0

    @property
    def found(self) -> float | None:
        return self._real / self._told if self._told else None

    def take_in(self, outputs: StepOutputs) -> None:
        """A step's, of one replica."""
        names = [delta.request_id for delta in each_delta(outputs.deltas) for _ in delta.token_ids]
        if not names or outputs.step is None:
            return
        if outputs.step.tokens == len(names) and self._began.issuperset(names):
            work = StepWork(len(names), len(names), sum(self._context[name] for name in names), 0)
            self._real += outputs.step.seconds
            self._told += self._costs.seconds(work)
        self._began.update(names)
        for name in names:
            self._context[name] += 1
