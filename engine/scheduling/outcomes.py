"""What the results of a step mean: tokens, ends, faults, and how beams go on."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from itertools import islice

import numpy as np
from msgspec.structs import replace

from engine.core.wire import Delta, SequenceDelta, TokenDeltas
from engine.kv_transfer.params import KVTransferParams
from engine.request import FinishReason
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.expected import Expected
from engine.scheduling.holdings import Holdings
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.speculation import Speculation
from engine.scheduling.steps_in_flight import PlannedStep
from engine.step import ScheduledRow, StepResult, TokenLogprobs

_Logprobs = dict[int, list[TokenLogprobs]]


class Outcomes:
    def __init__(self, held: Holdings, speculation: Speculation, expected: Expected) -> None:
        self._expected = expected
        self._held, self._speculation, self._rows = held, speculation, held.rows
        self.generated_tokens = 0
        """since the start"""

    def of(self, step: PlannedStep, result: StepResult) -> list[Delta]:
        deltas: list[Delta] = []
        logprobs = result.logprobs.by_row() if len(result.logprobs) else {}
        if step.num_plain:
            deltas += self._of_plain(step, result, logprobs)
        first = step.num_plain
        tokens, counts, drafted = (iter(each[first:]) for each in (result.token_ids, result.counts, result.drafted))
        for seq, row in step.others():
            brought = list(islice(tokens, next(counts, 1))) if row.samples else []
            tried = next(drafted, 0) if row.samples else 0
            deltas += self._of_row(seq, row, brought, result, logprobs, tried)
        return deltas

    def _of_plain(self, step: PlannedStep, result: StepResult, logprobs: _Logprobs) -> list[Delta]:
        """They have brought a token each. Most go on with it, and that is all."""
        rows, num_plain = self._rows, step.num_plain
        numbers, tokens = step.rows.row[:num_plain], result.token_ids[:num_plain]
        special = rows.entries[numbers] != step.entries
        special |= rows.detailed[numbers] | (rows.known[numbers] >= rows.limits[numbers])
        if result.faults:
            special |= np.isin(numbers, result.faults)
        if not rows.stop_tokens.keys().isdisjoint(tokens):
            stops = (token in seq.stop_token_ids for seq, token in zip(step.owners, tokens))
            special |= np.fromiter(stops, dtype=bool, count=num_plain)
        owners = step.owners[:num_plain]
        deltas: list[Delta] = []
        masked = rows.masked[numbers] & ~special
        done = self._of_masked(owners, tokens, np.flatnonzero(masked).tolist(), deltas) if masked.any() else []
        if special.any():
            computed = step.rows.computed
            for index in np.flatnonzero(special).tolist():
                row = ScheduledRow(int(numbers[index]), int(computed[index]), 1, samples=1)
                deltas += self._of_row(owners[index], row, tokens[index : index + 1], result, logprobs)
        if done or special.any():
            plain = ~special
            plain[done] = False
            numbers, owners = numbers[plain], owners[plain]
            tokens = [tokens[index] for index in np.flatnonzero(plain).tolist()]
        for seq, token in zip(owners.tolist(), tokens):
            seq.tokens.append(token)
        rows.appended(numbers)
        self.generated_tokens += len(tokens)
        if tokens:
            deltas.append(TokenDeltas(request_ids=rows.request_ids[numbers].tolist(), token_ids=tokens))
        return deltas

    def _of_masked(self, owners: np.ndarray, tokens: list[int], places: list[int], deltas: list[Delta]) -> list[int]:
        """The grammars of those go on, too. Returns where that was not all: at its end, or where one has failed."""
        done = []
        for place in places:
            seq, token = owners[place], tokens[place]
            goes_on = over = False
            with self._held.failures.isolate(seq):
                seq.matcher.advance(token)
                over = seq.matcher.is_over
                goes_on = not over
            if goes_on:
                continue
            done.append(place)
            self._rows.arrived(seq)
            if over:
                with self._held.failures.isolate(seq):
                    deltas.append(self._deliver(seq, [token], cached_tokens=seq.newly_cached, matched=True))
        return done

    def _of_row(
        self,
        seq: Sequence,
        row: ScheduledRow,
        tokens: list[int],
        result: StepResult,
        logprobs: _Logprobs,
        drafted: int = 0,
    ) -> list[SequenceDelta]:
        """What this raises is the failure of one request. `drafted`: how many drafts it has computed."""
        self._rows.arrived(seq, row.samples)
        if seq.status is Status.FINISHED:
            return []
        try:
            if row.samples > 1:
                self._held.reconcile(seq, row.samples, len(tokens))
                self._speculation.learn(seq, len(tokens) - 1, drafted)
            if row.row in result.faults:
                return self._fault(seq, row, result)
            found = logprobs.get(row.row, [])
            if seq.group is None:
                return self._advance(seq, row, tokens, found, result)
            if found and seq.status is Status.RUNNING and seq.group.bring(seq, found[0]):
                return self._choose(seq.group)
        except Exception as error:
            self._held.failures.note(seq, error)
        return []

    def _fault(self, seq: Sequence, row: ScheduledRow, result: StepResult) -> list[SequenceDelta]:
        """Its KV is not to be trusted: the next request with this prefix computes it itself."""
        cached_tokens = seq.newly_cached
        self._held.end(seq)
        self._held.forget(seq)
        if seq.pin is not None:
            self._held.pins.release(seq.pin)
        delta = SequenceDelta(
            request_id=seq.request_id,
            cached_tokens=cached_tokens,
            finish_reason="error",
            error=result.reasons.get(row.row)
            or f"the logits at position {row.computed + row.query_len - 1} held NaN, or no token was allowed by "
            "grammar, allowed_token_ids, bad_words, logit_bias and min_tokens together",
            error_kind="fault",
        )
        return [delta] if seq.group is None else [replace(delta, request_id=each) for each in seq.group.request_ids]

    def _choose(self, group: BeamGroup) -> list[SequenceDelta]:
        """The candidates of all beams are here: it is decided how each goes on, or that the search is over."""
        choices = group.choose()
        if choices is not None:
            self._rows.settle(group, group.follow(choices, self._held.kv))
            return []
        deltas = group.results(group.members[0])
        self.generated_tokens += sum(len(delta.token_ids) for delta in deltas)
        self._expected.ended(group.members[0], by_itself=True)
        self._held.end(group.members[0])
        return deltas

    def _advance(
        self, seq: Sequence, row: ScheduledRow, tokens: list[int], found: list[TokenLogprobs], result: StepResult
    ) -> list[SequenceDelta]:
        cached_tokens = seq.newly_cached
        prompt_logprobs: list[TokenLogprobs] = []
        if row.row in result.prompt_logprobs:
            prompt_logprobs = seq.undelivered(row.computed, result.prompt_logprobs[row.row])
        if tokens and seq.params.pooling is None:
            return [self._deliver(seq, tokens, found, prompt_logprobs, cached_tokens)]
        delta = SequenceDelta(request_id=seq.request_id, prompt_logprobs=prompt_logprobs, cached_tokens=cached_tokens)
        if seq.params.pooling is None:
            return [delta] if prompt_logprobs else []
        pooled, end = result.pooled.of_row(row.row).tobytes(), "stop" if tokens else None
        if tokens:  # nothing is generated: that was its last part
            self._expected.ended(seq, by_itself=True)
            self._held.end(seq)
        return [replace(delta, pooled=pooled, pooled_from=row.computed, finish_reason=end)] if pooled else []

    def _deliver(
        self,
        seq: Sequence,
        tokens: list[int],
        logprobs: Tokens[TokenLogprobs] = (),
        prompt_logprobs: Tokens[TokenLogprobs] = (),
        cached_tokens: int = 0,
        matched: bool = False,
    ) -> SequenceDelta:
        """The sequence has these tokens more, as far as it does not end among them. `matched`: its grammar knows of
        them."""
        started_at = None
        if len(seq.tokens) == seq.prompt_len:
            started_at = seq.started_at
            self._expected.began(seq)
        delivered: list[int] = []
        stopped, finish_reason = False, None
        handed_over: KVTransferParams | None = None
        for token in tokens:
            stopped = seq.ends_with(token)
            if seq.matcher is not None and not stopped and not matched:
                try:
                    seq.matcher.advance(token)
                except Exception as error:
                    if not delivered:
                        raise
                    self._held.failures.note(seq, error)
                    break
            self._rows.append(seq, token)
            delivered.append(token)
            finish_reason = self._end_of(seq, stopped)
            if finish_reason is not None:
                if seq.hands_over:
                    handed_over = self._held.leases.offer(seq.request_id, seq.tokens)
                self._expected.ended(seq, by_itself=True)
                self._held.end(seq)
                break
        self.generated_tokens += len(delivered)
        return SequenceDelta(
            request_id=seq.request_id,
            token_ids=delivered,
            logprobs=logprobs[: len(delivered)],
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=delivered[-1] if stopped else None,
            cached_tokens=cached_tokens,
            started_at=started_at,
            accepted_tokens=min(len(delivered), len(tokens) - 1),
            kv_transfer=handed_over,
        )

    def _end_of(self, seq: Sequence, stopped: bool) -> FinishReason | None:
        if stopped or (seq.matcher is not None and seq.matcher.is_over):
            return "stop"
        return "length" if len(seq.tokens) >= seq.max_total else None
