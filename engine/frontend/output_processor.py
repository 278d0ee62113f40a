"""From the core's per-sequence deltas to the `RequestOutput`s that callers see.

There is no queue of outputs: a request's state grows as deltas come in, and `take` renders it when its consumer is
ready. A consumer that is slower than the engine therefore gets fewer, larger outputs, and memory stays proportional to
the text. Where only the end is wanted (`final_only`), nothing is rendered before it.

Whatever one request's deltas raise here ends that request (`engine.frontend.failures`), and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.core.wire import Delta, SequenceDelta, TokenDeltas
from engine.errors import EngineError, InvalidRequestError, QueueFullError, RequestFailedError, TooShortError
from engine.frontend.admission import AdmittedRequest
from engine.frontend.detokenizer import Detokenizers
from engine.frontend.failures import fails_alone
from engine.frontend.pooled_prompt import PooledPrompt
from engine.frontend.sample import Sample, to_logprobs
from engine.frontend.tokenizer import Tokenizer
from engine.kv_transfer.params import as_answer
from engine.observability.request_watch import RequestWatch
from engine.observability.timings import RequestTimings
from engine.request import CompletionOutput, LogprobsAt, RequestMetrics, RequestOutput
from engine.step import TokenLogprobs


class Progress(msgspec.Struct, kw_only=True):
    """What a batch of deltas led to."""

    touched: list[str]
    """requests with something new to take"""
    aborts: list[str]
    """core ids that the core must be told to stop: a stop string matched, or the request failed"""
    finished: list[RequestTimings]
    gaps: dict[tuple[float, int], int]
    """(when a sequence's tokens before these came, how many these are) → of how many sequences"""


class _Request:
    """One request and its samples."""

    def __init__(
        self,
        admitted: AdmittedRequest,
        delta: bool,
        final_only: bool,
        metrics: RequestMetrics,
        tokenizer: Tokenizer,
        detokenizers: Detokenizers,
    ) -> None:
        self.admitted = admitted
        self.delta = delta
        self.only_end_counts = final_only or admitted.params.chooses
        self.samples = [
            Sample(i, core_id, admitted.prompt_token_ids, admitted.params, tokenizer, detokenizers)
            for i, core_id in enumerate(admitted.message.request_ids)
        ]
        self.metrics = metrics
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs_shown: list[LogprobsAt | None] | None = None
        kind = admitted.message.params.pooling
        self.pooled = None if kind is None else PooledPrompt(kind, len(admitted.prompt_token_ids))
        self.cached_tokens = self.accepted_tokens = 0
        self.kv_transfer: dict[str, Any] | None = None
        self.error: EngineError | None = None
        self.news = False

    @property
    def running(self) -> list[str]:
        return [s.core_id for s in self.samples if s.finish_reason is None]

    @property
    def ended(self) -> bool:
        for sample in self.samples:  # noqa: SIM110  # twice for every token: a generator costs as much as all the rest
            if sample.finish_reason is None:
                return False
        return True

    def outputs(self) -> list[CompletionOutput]:
        if len(self.samples) == 1:
            output = self.samples[0].output(self.delta)
            return [] if output is None else [output]
        return [output for sample in self.samples if (output := sample.output(self.delta)) is not None]

    def best(self) -> list[CompletionOutput]:
        """The `n` best samples of a request that has ended, numbered anew. Equals keep their order."""
        ranked = sorted(self.samples, key=lambda sample: -sample.score)[: self.admitted.params.n]
        return [replace(output, index=i) for i, s in enumerate(ranked) if (output := s.output(delta=False)) is not None]

    def timings(self, now: float) -> RequestTimings:
        return RequestTimings(
            times=self.metrics,
            finished_time=now,
            prompt_tokens=len(self.admitted.prompt_token_ids),
            cached_tokens=self.cached_tokens,
            sample_tokens=[len(s.token_ids) for s in self.samples],
            n=self.admitted.params.n,
            max_tokens=self.admitted.message.max_tokens,
            finish_reasons=[self._reason(sample) for sample in self.samples],
            pooled=self.pooled is not None,
        )

    def _reason(self, sample: Sample) -> str:
        """Where one fails none of the others is given out; "refused": there was no room, or no time."""
        if sample.finish_reason in ("stop", "length"):
            return sample.finish_reason
        if self.error is None:
            return sample.finish_reason or "abort"
        return "refused" if isinstance(self.error, QueueFullError) else "error"


class OutputProcessor:
    """Owns the state of every request in flight. Not thread-safe: one thread or event loop drives it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizers = Detokenizers(tokenizer.backend)
        self._requests: dict[str, _Request] = {}
        self._owners: dict[str, tuple[_Request, Sample]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(
        self,
        admitted: AdmittedRequest,
        *,
        now: float,
        arrival: float | None = None,
        delta: bool = False,
        final_only: bool = False,
    ) -> None:
        """`arrival`: when its caller came with it, if that was before it was tokenized. `delta`: its outputs hold what
        is new; `final_only`: it has one output, when it has ended.

        Raises `InvalidRequestError` when a request of the same id is in flight.
        """
        if admitted.request_id in self._requests:
            raise InvalidRequestError(f"a request {admitted.request_id!r} is in flight already", "request_id")
        metrics = RequestMetrics(arrival_time=now if arrival is None else arrival, queued_time=now)
        request = _Request(admitted, delta, final_only, metrics, self._tokenizer, self._detokenizers)
        self._requests[admitted.request_id] = request
        for sample in request.samples:
            self._owners[sample.core_id] = (request, sample)

    def process(self, deltas: Iterable[Delta], now: float) -> Progress:
        """Take in one step. Deltas of requests that are gone (aborted, stopped) are dropped."""
        progress = Progress(touched=[], aborts=[], finished=[], gaps={})
        for delta in deltas:
            if isinstance(delta, TokenDeltas):
                for core_id, token in zip(delta.request_ids, delta.token_ids, strict=True):
                    self._take_token(core_id, token, now, progress)
            else:
                self._take_delta(delta, now, progress)
        return progress

    def take(self, request_id: str) -> RequestOutput | None:
        """What the consumer has not seen (or, cumulative, all so far); None when there is nothing new.

        Raises `RequestFailedError` when that cannot be rendered; the request is to be removed then.
        """
        request = self._requests[request_id]
        if not request.news:
            return None
        request.news = False
        with fails_alone("rendering an output"):
            return self._render(request)

    def texts(self, output: RequestOutput) -> Iterator[tuple[CompletionOutput, str]]:
        """Each part of what `take` has returned, with all of its text so far."""
        request = self._requests[output.request_id]
        for each in output.outputs:
            whole = not request.delta or request.admitted.params.chooses
            yield each, each.text if whole else request.samples[each.index].text

    def take_failed(self, request_id: str, error: EngineError) -> RequestOutput:
        """What there is of a request that failed, with finish_reason "error"; nothing of it is rendered anew."""
        request = self._requests[request_id]
        return self._output(request, [sample.failed(str(error)) for sample in request.samples], None)

    def show(self, request_id: str, watch: RequestWatch, now: float) -> None:
        """What there is of it, which nobody will go on with."""
        request = self._requests[request_id]
        ended = request.metrics.finished_time
        watch.timings = request.timings(now if ended is None else ended)
        watch.prompt = request.admitted.prompt
        watch.answers = [sample.text for sample in request.samples]

    def finished(self, request_id: str) -> bool:
        return self._requests[request_id].ended

    def error(self, request_id: str) -> EngineError | None:
        """Why the request failed inside the core, if it did."""
        return self._requests[request_id].error

    def abort(self, request_id: str, now: float) -> tuple[list[str], RequestTimings | None]:
        """End a request where it stands; its consumer still takes what there is. Returns the core ids to stop."""
        request = self._requests.get(request_id)
        if request is None or not (running := request.running):
            return [], None
        self._end_samples(request)
        request.metrics.finished_time = now
        request.news = True
        return running, request.timings(now)

    def remove(self, request_id: str, now: float) -> tuple[list[str], RequestTimings | None]:
        """Forget a request (its consumer is gone, or has everything). Returns what `abort` does."""
        running, timings = self.abort(request_id, now)
        self._requests.pop(request_id, None)
        return running, timings

    def request_ids(self) -> list[str]:
        return list(self._requests)

    def _take_delta(self, delta: SequenceDelta, now: float, progress: Progress) -> None:
        owner = self._owners.get(delta.request_id)
        if owner is None:
            return
        try:
            with fails_alone("taking in the core's outputs"):
                self._apply(delta, *owner, now, progress)
        except EngineError as error:
            self._fail(owner[0], error, now, progress)

    def _take_token(self, core_id: str, token: int, now: float, progress: Progress) -> None:
        """As `_take_delta` of it, which most tokens need not pass: a sequence goes on by one."""
        owner = self._owners.get(core_id)
        if owner is None:
            return
        request, sample = owner
        if sample.latest is None or not sample.append(token):
            self._take_delta(SequenceDelta(request_id=core_id, token_ids=[token]), now, progress)
            return
        gap = (sample.latest, 1)
        progress.gaps[gap] = progress.gaps.get(gap, 0) + 1
        sample.latest = now
        if not request.news and not request.only_end_counts:
            request.news = True
            progress.touched.append(request.admitted.request_id)

    def _apply(self, delta: SequenceDelta, request: _Request, sample: Sample, now: float, progress: Progress) -> None:
        if sample is request.samples[0]:
            request.prompt_logprobs.extend(delta.prompt_logprobs)
            if request.pooled is not None and delta.pooled:
                request.pooled.add(delta.pooled, delta.pooled_from)
            request.cached_tokens = delta.cached_tokens or request.cached_tokens
            if delta.kv_transfer is not None:
                request.kv_transfer = as_answer(delta.kv_transfer)
        request.accepted_tokens += delta.accepted_tokens
        if delta.moved:
            sample.moves += 1
            request.metrics.num_moves = max(request.metrics.num_moves, sample.moves)
        if delta.token_ids:
            if request.metrics.first_token_time is None:
                self._first_tokens(request.metrics, delta, now)
            if sample.latest is not None:
                gap = (sample.latest, len(delta.token_ids))
                progress.gaps[gap] = progress.gaps.get(gap, 0) + 1
            sample.latest = now
        if sample.extend(delta):
            progress.aborts.append(sample.core_id)
        if sample.finish_reason is not None:
            del self._owners[sample.core_id]
        if delta.finish_reason == "error":
            request.error = _exception(delta)
            progress.aborts.extend(request.running)
            self._end_samples(request)
        if not delta.token_ids and sample.finish_reason is None:
            return
        ended = request.ended
        if not ended and request.only_end_counts:
            return
        if ended or not request.news:  # with unseen news its consumer has been told already, but not of the end
            request.news = True
            progress.touched.append(request.admitted.request_id)
        if ended:
            request.metrics.finished_time = now
            progress.finished.append(request.timings(now))

    def _first_tokens(self, metrics: RequestMetrics, delta: SequenceDelta, now: float) -> None:
        metrics.first_token_time = now
        if delta.started_at is not None and metrics.queued_time is not None:
            metrics.first_scheduled_time = min(max(delta.started_at, metrics.queued_time), now)

    def _fail(self, request: _Request, error: EngineError, now: float, progress: Progress) -> None:
        """The front end's own failure. The core is told of every sample, also of one that it has ended itself."""
        request.error = error
        for sample in request.samples:
            if self._owners.pop(sample.core_id, None) is not None:
                progress.aborts.append(sample.core_id)
                sample.fail(str(request.error))
        request.news = True
        request.metrics.finished_time = now
        progress.touched.append(request.admitted.request_id)
        progress.finished.append(request.timings(now))

    def _end_samples(self, request: _Request) -> None:
        for sample in request.samples:
            if sample.finish_reason is None:
                self._owners.pop(sample.core_id, None)
                try:
                    with fails_alone("ending a sequence"):
                        sample.finish("abort")
                except EngineError as error:
                    sample.fail(str(error))

    def _render(self, request: _Request) -> RequestOutput:
        outputs = request.best() if request.admitted.params.chooses else request.outputs()
        asked_prompt = request.admitted.params.prompt_logprobs is not None
        return self._output(request, outputs, self._prompt_logprobs(request) if asked_prompt else None)

    def _output(
        self, request: _Request, outputs: list[CompletionOutput], prompt_logprobs: list[LogprobsAt | None] | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=request.admitted.request_id,
            prompt=request.admitted.prompt,
            prompt_token_ids=request.admitted.prompt_token_ids,
            outputs=outputs,
            finished=request.ended,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.cached_tokens,
            num_accepted_tokens=request.accepted_tokens,
            pooled=None if request.pooled is None else request.pooled.vectors(),
            kv_transfer_params=request.kv_transfer,
            metrics=request.metrics,
            lora_request=request.admitted.message.lora_request,
        )

    def _prompt_logprobs(self, request: _Request) -> list[LogprobsAt | None] | None:
        """Converted once: cumulative outputs share them, and of deltas one has them."""
        if request.prompt_logprobs_shown is not None:
            return None if request.delta else request.prompt_logprobs_shown
        if len(request.prompt_logprobs) < len(request.admitted.prompt_token_ids) - 1:
            return None
        shown = [None, *(to_logprobs(entry, self._tokenizer) for entry in request.prompt_logprobs)]
        request.prompt_logprobs_shown = shown
        return shown


def _exception(delta: SequenceDelta) -> EngineError:
    message = delta.error or "the engine core gave no reason"
    for refused in (QueueFullError, TooShortError):
        if delta.error_kind == refused.kind:
            return refused(message, delta.retry_after_s)
    if delta.error_kind == "invalid":
        return InvalidRequestError(message)
    return RequestFailedError(message)
