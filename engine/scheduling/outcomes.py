"""What the results of a step mean: tokens, ends, faults, and how beams go on."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from msgspec.structs import replace

from engine.core.wire import Delta, SequenceDelta, TokenDeltas
from engine.request import FinishReason
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.holdings import Holdings
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.steady_rows import SteadyStep
from engine.scheduling.steady_searches import SearchesStep
from engine.scheduling.steps_in_flight import PlannedRows, Rows
from engine.step import ScheduledRow, StepResult, TokenLogprobs


class Outcomes:
    def __init__(self, held: Holdings) -> None:
        self._held = held
        self.generated_tokens = 0
        """since the start"""

    def of(self, rows: PlannedRows, result: StepResult) -> list[Delta]:
        """`rows`: of the plan that has this result, with their owners at the time."""
        deltas: list[Delta] = []
        if rows.steady is not None:
            deltas += self._of_steady(rows.steady, result.token_ids[: len(rows.steady)], result)
        for step in rows.searches:
            for search in step.table.take(step, result):
                with self._held.failures.isolate(step.beams[search, 0]):
                    deltas += self._of_search(step, search, result)
        return deltas + self._of_each(rows.others, result.token_ids[rows.num_steady :], result)

    def _of_search(self, step: SearchesStep, search: int, result: StepResult) -> list[SequenceDelta]:
        """One of a step that has not simply gone on."""
        beams: list[Sequence] = step.beams[search].tolist()
        group = beams[0].group
        assert group is not None
        goes_on = step.holds(search)
        if goes_on:
            step.table.leave(group)
        for beam in beams:
            beam.in_flight -= 1
        if beams[0].status is Status.FINISHED:
            return []
        rows = [step.row_of(search, index) for index in range(len(beams))]
        for beam, row in zip(beams, rows, strict=True):
            if row.row in result.faults:
                return self._fault(beam, row, result)
        if not goes_on:
            return []
        for beam, row in zip(beams, rows, strict=True):
            group.bring(beam, result.logprobs[row.row])
        return self._choose(group)

    def _of_steady(self, step: SteadyStep, tokens: list[int], result: StepResult) -> list[Delta]:
        """They have brought one token each, not their last one but for a stop token, and nothing else."""
        faults = result.faults
        request_ids, plain, special = self._held.rows.steady.take(step, tokens, faults)
        deltas: list[Delta] = [TokenDeltas(request_ids=request_ids, token_ids=plain)] if plain else []
        for seq, token, row in special:
            seq.in_flight -= 1
            if seq.status is Status.FINISHED:
                continue
            with self._held.failures.isolate(seq):
                if row.row in faults:
                    deltas += self._fault(seq, row, result)
                else:
                    deltas.append(self._deliver(seq, token))
                    self.generated_tokens += 1
        self.generated_tokens += len(plain)
        return deltas

    def _of_each(self, rows: Rows, token_ids: list[int], result: StepResult) -> list[SequenceDelta]:
        deltas: list[SequenceDelta] = []
        tokens = iter(token_ids)
        for seq, row in rows:
            token = None
            if row.samples:
                seq.in_flight -= 1
                token = next(tokens)
            if seq.status is not Status.FINISHED:
                try:
                    deltas += self._of_one(seq, row, token, result)
                except Exception as error:
                    self._held.failures.note(seq, error)
        return deltas

    def _of_one(self, seq: Sequence, row: ScheduledRow, token: int | None, result: StepResult) -> list[SequenceDelta]:
        if row.row in result.faults:
            return self._fault(seq, row, result)
        if seq.group is None:
            delta = self._advance(seq, row, token, result)
            return [] if delta is None else [delta]
        if row.samples and seq.status is Status.RUNNING and seq.group.bring(seq, result.logprobs[row.row]):
            return self._choose(seq.group)
        return []

    def _fault(self, seq: Sequence, row: ScheduledRow, result: StepResult) -> list[SequenceDelta]:
        """Its KV is not to be trusted: the next request with this prefix computes it itself."""
        cached_tokens = seq.newly_cached
        if seq.steady:
            self._held.rows.steady.leave(seq)
            seq.in_flight -= 1  # the token that was no good
        self._held.end(seq)
        self._held.forget(seq)
        if seq.pin is not None:
            self._held.pins.release(seq.pin)
        delta = SequenceDelta(
            request_id=seq.request_id,
            cached_tokens=cached_tokens,
            finish_reason="error",
            error=result.reasons.get(row.row)
            or f"the logits at position {row.computed + row.query_len - 1} held NaN, or no token was allowed",
            error_kind="fault",
        )
        return [delta] if seq.group is None else [replace(delta, request_id=each) for each in seq.group.request_ids]

    def _choose(self, group: BeamGroup) -> list[SequenceDelta]:
        """The candidates of all beams are here: it is decided how each goes on, or that the search is over."""
        choices = group.choose()
        if choices is not None:
            others = len(group.beams) < len(choices)
            idle = group.follow(choices, self._held.kv)
            if idle or others:
                self._held.rows.settle(group, idle)
            self._held.rows.went_on(group)
            return []
        deltas = group.results(group.members[0].cached_tokens or 0)
        self.generated_tokens += sum(len(delta.token_ids) for delta in deltas)
        self._held.end(group.members[0])
        return deltas

    def _advance(self, seq: Sequence, row: ScheduledRow, token: int | None, result: StepResult) -> SequenceDelta | None:
        cached_tokens = seq.newly_cached
        prompt_logprobs: list[TokenLogprobs] = []
        if row.row in result.prompt_logprobs:
            prompt_logprobs = seq.undelivered(row.computed, result.prompt_logprobs[row.row])
        if token is None and not prompt_logprobs:
            return None
        if token is None:
            return SequenceDelta(
                request_id=seq.request_id, prompt_logprobs=prompt_logprobs, cached_tokens=cached_tokens
            )
        self.generated_tokens += 1
        logprobs = result.logprobs.get(row.row)
        return self._deliver(seq, token, [logprobs] if logprobs is not None else [], prompt_logprobs, cached_tokens)

    def _deliver(
        self,
        seq: Sequence,
        token: int,
        logprobs: Tokens[TokenLogprobs] = (),
        prompt_logprobs: Tokens[TokenLogprobs] = (),
        cached_tokens: int = 0,
    ) -> SequenceDelta:
        """The sequence has one token more, and may end with it."""
        stopped = seq.ends_with(token)
        seq.tokens.append(token)
        finish_reason: FinishReason | None = "stop" if stopped else None
        if not stopped and len(seq.tokens) >= seq.max_total:
            finish_reason = "length"
        if finish_reason is not None:
            self._held.end(seq)
        return SequenceDelta(
            request_id=seq.request_id,
            token_ids=[token],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=token if stopped else None,
            cached_tokens=cached_tokens,
        )
