"""What the results of a step mean: tokens, ends, faults, and how beams go on."""

from __future__ import annotations

from msgspec.structs import replace

from engine.core.wire import SequenceDelta
from engine.request import FinishReason
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.holdings import Holdings
from engine.scheduling.sequence import Sequence, Status
from engine.scheduling.steps_in_flight import Rows
from engine.step import ScheduledRow, StepResult, TokenLogprobs


class Outcomes:
    def __init__(self, held: Holdings) -> None:
        self._held = held
        self.generated_tokens = 0
        """since the start"""

    def of(self, rows: Rows, result: StepResult) -> list[SequenceDelta]:
        """`rows`: of the plan that has this result, with their owners at the time."""
        tokens = iter(result.token_ids)
        deltas = []
        for seq, row in rows:
            token = None
            if row.samples:
                seq.in_flight -= 1
                token = next(tokens)
            if seq.status is Status.FINISHED:
                continue
            if row.row in result.faults:
                deltas += self._fault(seq, row)
            elif seq.group is not None:
                deltas += self._choose(seq, seq.group, result.logprobs[row.row]) if row.samples else []
            else:
                delta = self._advance(seq, row, token, result)
                if delta is not None:
                    deltas.append(delta)
        return deltas

    def _fault(self, seq: Sequence, row: ScheduledRow) -> list[SequenceDelta]:
        """Its KV is not to be trusted: the next request with this prefix computes it itself."""
        self._held.kv.forget(seq.blocks)
        self._held.end(seq)
        if seq.pin is not None:
            self._held.pins.release(seq.pin)
        delta = SequenceDelta(
            request_id=seq.request_id,
            cached_tokens=seq.newly_cached,
            finish_reason="error",
            error=f"the logits at position {row.computed + row.query_len - 1} held NaN, or no token was allowed",
            error_kind="fault",
        )
        return [delta] if seq.group is None else [replace(delta, request_id=each) for each in seq.group.request_ids]

    def _choose(self, beam: Sequence, group: BeamGroup, found: TokenLogprobs) -> list[SequenceDelta]:
        """A beam's candidates are here; with those of all beams it is decided how each goes on, or that the search is
        over."""
        if beam.status is not Status.RUNNING or not group.bring(beam, found):
            return []
        choices = group.choose()
        if choices is not None:
            self._held.rows.settle(group, group.follow(choices, self._held.kv))
            return []
        deltas = group.results(group.members[0].cached_tokens or 0)
        self.generated_tokens += sum(len(delta.token_ids) for delta in deltas)
        self._held.end(beam)
        return deltas

    def _advance(self, seq: Sequence, row: ScheduledRow, token: int | None, result: StepResult) -> SequenceDelta | None:
        cached_tokens = seq.newly_cached
        prompt_logprobs: list[TokenLogprobs] = []
        if row.row in result.prompt_logprobs:
            prompt_logprobs = seq.undelivered(row.computed, result.prompt_logprobs[row.row])
        if token is None and not prompt_logprobs:
            return None
        finish_reason, stopped = self._append_token(seq, token) if token is not None else (None, False)
        logprobs = result.logprobs.get(row.row) if token is not None else None
        return SequenceDelta(
            request_id=seq.request_id,
            token_ids=[token] if token is not None else [],
            logprobs=[logprobs] if logprobs is not None else [],
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_token_id=token if stopped else None,
            cached_tokens=cached_tokens,
        )

    def _append_token(self, seq: Sequence, token: int) -> tuple[FinishReason | None, bool]:
        """Returns why the sequence ended, if it did, and whether this token ended it."""
        stopped = seq.ends_with(token)
        seq.tokens.append(token)
        self.generated_tokens += 1
        # A block that a planned step fills with this token is findable from now on, even if the sequence ends here.
        self._held.kv.register(seq.blocks, seq.tokens)
        if not stopped and len(seq.tokens) < seq.max_total:
            return None, False
        self._held.end(seq)
        return ("stop" if stopped else "length"), stopped
