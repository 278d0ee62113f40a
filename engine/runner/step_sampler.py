"""From a step's hidden states to sampled tokens and scores of prompts. What fails for one row is that row's fault."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from engine.errors import EngineError, in_words
from engine.models.heads import HeadForm
from engine.observability import step_profile
from engine.observability.step_profile import StepObserver
from engine.runner.batch import StepBatch
from engine.runner.kernels import InputKernels
from engine.runner.loading import RunnerParts
from engine.runner.request_table import RequestTable
from engine.runner.results import SampledStep
from engine.sampling import LogprobTensors, SampleOutput, Sampler
from engine.sampling.logprobs import joined
from engine.sampling.upload import upload
from engine.step import Rows, ScheduledRow, StepMasks, StepPlan

logger = logging.getLogger(__name__)

_PROMPT_LOGITS_BYTES = 64 << 20
"""logits of prompt positions are made and scored in pieces of at most this size"""

WaitForMasks = Callable[[], StepMasks]


def no_masks() -> StepMasks:
    """For plans without masked rows."""
    raise EngineError("the plan has masked rows, but nobody gives masks")


PromptScores = list[tuple[int, LogprobTensors]]


class StepSampler:
    """The last part of every step of one model."""

    def __init__(self, parts: RunnerParts, sampler: Sampler, table: RequestTable, kernels: InputKernels) -> None:
        self._model, self._head = parts.model, parts.head
        self._sampler, self._table, self._kernels = sampler, table, kernels
        self._prompt_piece = max(1, _PROMPT_LOGITS_BYTES // (4 * parts.facts.vocab_size))

    def run(
        self, plan: StepPlan, batch: StepBatch, hidden: torch.Tensor, observer: StepObserver, masks: WaitForMasks
    ) -> SampledStep:
        """`hidden`: of the step's tokens. The sampled tokens are in the table when this returns (in stream order)."""
        observer.mark(step_profile.LOGITS)
        failures = dict(self._table.failed)
        prompt = self._score_prompts(batch.rows, hidden, failures) if self._table.prompt_logprobs else ()
        pooled = self._pool(batch.rows, hidden) if self._table.pooling else ()
        rows = batch.sample_rows_host
        if not rows:
            return SampledStep(plan.step_id, rows, None, prompt, failures, pooled=pooled)
        last = hidden if batch.every_token_samples else hidden.index_select(0, batch.logits_indices)
        if pooled and self._table.pooling.keys() >= set(rows):
            return SampledStep(plan.step_id, rows, _nothing_sampled(last), prompt, failures, pooled=pooled)
        logits = self._model.compute_logits(last)
        allowed, places = (masks().bits, _places(batch.rows, plan.masked)) if plan.masked else (None, [])
        observer.mark(step_profile.SAMPLING)
        tokens = self._table.tokens
        if allowed is not None:
            self._sampler.restrict(logits, places, allowed)
        try:
            sampled = self._sampler.sample(logits, batch.sample_rows, rows, batch.sample_positions, tokens)
        except Exception:
            logger.exception("step %d could not be sampled at once; its rows are sampled one by one", plan.step_id)
            # What failed may have changed the logits: the same product gives the same bits again.
            logits = self._model.compute_logits(last)
            if allowed is not None:
                self._sampler.restrict(logits, places, allowed)
            sampled = self._sample_each(logits, batch, failures)
        counts, known = _accepted(batch, tokens, sampled)
        self._kernels.post_update(
            tokens, self._table.lengths, batch.sample_rows, batch.sample_positions, sampled.token_ids, known
        )
        return SampledStep(plan.step_id, rows, sampled, prompt, failures, batch.positions_each, counts, pooled)

    def _pool(self, rows: Rows, hidden: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """What this step's tokens bring to rows that are pooled, each float32 [vectors, size], in memory of its own."""
        parts = []
        asked = np.flatnonzero(np.isin(rows.row, list(self._table.pooling)))
        ends = np.cumsum(rows.query_lens)[asked].tolist()
        for end, row in zip(ends, Rows(rows.columns[:, asked]).each(), strict=True):
            kind = self._table.pooling[row.row]
            start, judged = end - row.query_len, kind in ("judge", "judge_all")
            if judged:
                kind = self._form.pooled if kind == "judge" else "all"
            if (kind == "last" and not row.samples) or (kind == "cls" and row.computed):
                continue
            first, past = (end - 1 if kind == "last" else start), (start + 1 if kind == "cls" else end)
            part = self._model.final_states(hidden[first:past]).to(torch.float32, copy=True)
            if kind in ("mean", "max"):
                part = part.sum(dim=0, keepdim=True) if kind == "mean" else part.amax(dim=0, keepdim=True)
            if judged and self._head is not None:
                part = self._head(part / row.query_len if kind == "mean" else part)
            parts.append((row.row, part))
        return parts

    @property
    def _form(self) -> HeadForm:
        if self._head is None:
            raise EngineError("a prompt is to be judged, and the model has no head that does")
        return self._head.spec.form

    def _sample_each(self, logits: torch.Tensor, batch: StepBatch, failures: dict[int, str]) -> SampleOutput:
        """Nothing behind drafts, which then count as wrong."""
        outputs = []
        each = batch.positions_each
        first = range(len(batch.sample_rows_host)) if each is None else (np.cumsum(each) - each).tolist()
        none = torch.zeros(1, dtype=torch.int64, device=logits.device)
        nothing = SampleOutput(none, torch.ones_like(none, dtype=torch.bool), None)
        for at, row in enumerate(batch.sample_rows_host):
            output, one = nothing, slice(at, at + 1)
            try:
                if at in first:
                    output = self._sampler.sample(
                        logits[one], batch.sample_rows[one], [row], batch.sample_positions[one], self._table.tokens
                    )
            except Exception as error:
                logger.exception("row %d could not be sampled", row)
                failures[row] = in_words(error)
            outputs.append(output)
        return SampleOutput(
            token_ids=torch.cat([output.token_ids for output in outputs]),
            faults=torch.cat([output.faults for output in outputs]),
            logprobs=joined([output.logprobs for output in outputs if output.logprobs is not None]),
        )

    def _score_prompts(self, rows: Rows, hidden: torch.Tensor, failures: dict[int, str]) -> PromptScores:
        """The query at position p scores the known token p + 1, for rows that asked, as far as their prompt goes."""
        scores: PromptScores = []
        asked = np.flatnonzero(np.isin(rows.row, list(self._table.prompt_logprobs)))
        ends = np.cumsum(rows.query_lens)[asked].tolist()
        for end, row in zip(ends, Rows(rows.columns[:, asked]).each(), strict=True):
            try:
                k = self._table.prompt_logprobs[row.row]
                scores += self._score_prompt(row, hidden[end - row.query_len : end], k)
            except Exception as error:
                logger.exception("the prompt of row %d could not be scored", row.row)
                failures[row.row] = in_words(error)
        return scores

    def _score_prompt(self, row: ScheduledRow, hidden: torch.Tensor, k: int) -> PromptScores:
        scores: PromptScores = []
        count = min(row.query_len, self._table.prompt_len[row.row] - 1 - row.computed)
        for start in range(0, count, self._prompt_piece):
            end = min(start + self._prompt_piece, count)
            known = self._table.tokens[row.row, row.computed + start + 1 : row.computed + end + 1]
            logits = self._model.compute_logits(hidden[start:end])
            scores.append((row.row, self._sampler.prompt_logprobs(logits, known.to(torch.int64), k)))
        return scores


def _nothing_sampled(last: torch.Tensor) -> SampleOutput:
    """For rows that end with their prompts: whether their hidden states are numbers is all that is to be known."""
    finite = torch.isfinite(last).all(dim=1)
    return SampleOutput(torch.zeros(len(last), dtype=torch.int64, device=last.device), ~finite, None)


def _places(rows: Rows, masked: list[int]) -> list[int]:
    """Of those rows, the positions that sample, counted in the order of all rows."""
    ends = np.cumsum(rows.samples)
    return [place for at in masked for place in range(int(ends[at] - rows.samples[at]), int(ends[at]))]


def _accepted(
    batch: StepBatch, tokens: torch.Tensor, output: SampleOutput
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of each row that sampled at several positions, how many of its tokens count: those before the first draft that is
    not what was sampled in its place, and that one; but none from a fault on, unless it is the first: the request may
    have ended before, or the next step finds it again. With it, of every position, how many tokens its row knows then.
    int64 [rows that sampled] and [positions], without a wait; None: one each."""
    each, sampled = batch.positions_each, output.token_ids
    device = sampled.device
    if each is None:
        return None, None
    ends = np.cumsum(each)
    wrong = tokens[batch.sample_rows, batch.sample_positions] != sampled
    wrong[:-1] |= output.faults[1:]  # of another row's, the last position's: set anyway
    wrong.index_fill_(0, upload(ends - 1, torch.int64, device), True)  # behind the last draft there is none
    at = torch.arange(len(sampled), device=device)
    next_wrong = at.masked_fill(~wrong, len(sampled)).flip(0).cummin(0).values.flip(0)
    first = upload(np.repeat(ends - each, each), torch.int64, device)
    last = next_wrong[first]
    known = batch.sample_positions[last] + 1
    return (last - first + 1)[upload(ends - each, torch.int64, device)], known
