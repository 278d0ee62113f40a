"""How a request becomes sequences: checked against what can be served at all, opened, queued."""

from __future__ import annotations

from msgspec.structs import replace

from engine.beam_search import BeamSearch
from engine.config import SchedulerConfig
from engine.core.wire import AddRequest, BeamParams
from engine.errors import InvalidRequestError, QueueFullError
from engine.grammars.interface import Matcher
from engine.kv_transfer.interface import FetchDone
from engine.scheduling.adapted import Adapted
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.constrained import Constrained
from engine.scheduling.expected import Expected
from engine.scheduling.fetches import Fetches
from engine.scheduling.holdings import Holdings
from engine.scheduling.limits import check_servable
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.shares import most_of_one
from engine.step import RowParams


class Arrivals:
    def __init__(
        self,
        config: SchedulerConfig,
        held: Holdings,
        constrained: Constrained,
        fetches: Fetches,
        adapted: Adapted,
        expected: Expected,
    ) -> None:
        self._config, self._expected = config, expected
        self._fetches = fetches
        self._held = held
        self._constrained, self._adapted = constrained, adapted
        self._number = 0
        """of the next sequence"""

    @property
    def num_waiting(self) -> int:
        """Those that wait for their grammar, their adapter or pages, too."""
        elsewhere = len(self._constrained) + len(self._adapted) + len(self._fetches)
        return len(self._held.waiting) + self._held.following + elsewhere

    def add(self, request: AddRequest) -> None:
        """Queue a request. `InvalidRequestError` if it can never be served, `QueueFullError` if too many wait, or it
        could not be served in time."""
        held = self._held
        pools = request.params.pooling is not None  # what follows its prompt is never computed
        max_total = min(len(request.prompt_token_ids) + request.max_tokens, self._config.max_model_len + pools)
        for request_id in request.request_ids:
            if request_id in held.live:
                raise InvalidRequestError(f"request id {request_id!r} is in use by a live request", "request_id")
        need = check_servable(request, max_total, self._config, held.kv, held.pins.num_blocks)
        self._adapted.check(request.lora_request)
        if not request.accepted and (full := self._full(request)) is not None:
            raise QueueFullError(
                f"{full} (--max-waiting {self._config.max_waiting})", self._expected.when_room(request)
            )
        promised = self._expected.check(request)
        start = None if request.grammar is None else self._constrained.start(request.grammar, request.request_id)
        if request.pin is not None:
            prompt_len = len(request.prompt_token_ids)
            needs = [seq.max_blocks for seq in held.live.values()]
            held.pins.reserve(request.pin, prompt_len, self._config.max_model_len, needs)
        if request.beams is not None:
            first = self._open_beams(request, request.beams, max_total)
            first.max_blocks = need
            assert first.group is not None
            for member in first.group.members:
                member.promised = promised
            self._queue(request, first.group.members, start)
            return
        leader = self._open(request, request.request_id, request.params, max_total)
        alike = replace(request.params, prompt_logprobs=None)  # equal for all samples: computed once
        others = [
            self._open(request, each.request_id, replace(alike, seed=each.seed), max_total)
            for each in request.followers
        ]
        samples = [leader, *others]
        for seq in samples:
            seq.siblings, seq.max_blocks, seq.promised = samples, need, promised
        for seq, had in zip(samples, request.resumed, strict=False):  # none: all are new
            seq.tokens += had.token_ids
            seq.next_prompt_logprob += had.prompt_logprobs
        leader.pin = request.pin
        leader.hands_over = request.kv_transfer is not None and request.kv_transfer.do_remote_decode
        held.live.update(zip(request.request_ids, samples, strict=True))
        if not self._fetches.begin(request, samples):
            self._queue(request, samples, start)

    def _full(self, request: AddRequest) -> str | None:
        """Why it may not wait: too many do already for whom there is no row, or, where the policy is fair, too many of
        one tenant."""
        waiting, new = self.num_waiting, 1 + len(request.followers) if request.beams is None else 1
        rows, most = len(self._held.rows.free), self._config.max_waiting
        beyond = waiting - rows
        if waiting and beyond + new > most:
            more = f", and these are {new} more" if new > 1 else ""
            return f"{_sequences(max(beyond, 0))} already for a row{more}"
        own = 0 if self._held.fair is None else self._held.fair.waiting_of(request.tenant)
        if self._held.fair is not None and own - rows + new > most_of_one(most - beyond, new):
            return f"{_sequences(own)} of this client already, and some places are for others"
        return None

    def landed(self, done: FetchDone) -> tuple[Sequence, str] | None:
        """Pages have come, or will not: who waited for them goes on. Returns who fails, and why: its grammar did."""
        goes_on = self._fetches.ended(done)
        if goes_on is None:
            return None
        request, samples = goes_on
        try:
            start = None if request.grammar is None else self._constrained.start(request.grammar, request.request_id)
            self._queue(request, samples, start)
        except InvalidRequestError as error:
            return samples[0], str(error)
        return None

    def _queue(self, request: AddRequest, samples: list[Sequence], start: Matcher | None) -> None:
        if request.grammar is not None and start is None:
            self._constrained.prepare(request.grammar, samples)
        else:
            self._constrained.queue(samples, start)

    def _open(self, request: AddRequest, request_id: str, params: RowParams, max_total: int) -> Sequence:
        key = (0 if self._config.policy == "fcfs" else request.priority, self._number)
        blocks = self._held.kv.open(request.cache_salt, request.adapter_key)
        seq = Sequence(request_id, params, list(request.prompt_token_ids), key, max_total, blocks)
        seq.adapter, seq.tenant, seq.cache_salt = request.lora_request, request.tenant.name, request.cache_salt
        seq.arrived_at, seq.begun = self._expected.clock(), request.begun
        if request.deadline_s is not None:
            seq.deadline = seq.arrived_at + request.deadline_s
        if self._held.fair is not None:
            self._held.fair.join(seq, request.tenant)
        self._number += 1
        return seq

    def _open_beams(self, request: AddRequest, beams: BeamParams, max_total: int) -> Sequence:
        new_tokens = max_total - len(request.prompt_token_ids)
        search = BeamSearch(beams, frozenset(request.params.stop_token_ids), new_tokens)
        params = replace(request.params, temperature=0.0, logprobs=search.num_candidates)
        members = [self._open(request, request.request_id, params, max_total) for _ in range(beams.width)]
        group = BeamGroup(request.request_ids, search, members)
        for member in members:
            member.siblings, member.group, member.status = members, group, Status.FOLLOWING
        self._held.live.update((request_id, members[0]) for request_id in request.request_ids)
        return members[0]


def _sequences(count: int) -> str:
    return f"{count} sequence{'s wait' if count > 1 else ' waits'}"
