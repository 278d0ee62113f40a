"""Requests of callers who turn the engine themselves: fed to a core whose queue is bounded, and stepped until they end.

Under `LLM`, which waits for all of a batch, and under vLLM's `LLMEngine`, whose user takes step by step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

import msgspec

from engine.errors import EngineError, InvalidRequestError, QueueFullError
from engine.frontend.admission import AdmittedRequest
from engine.request import RequestOutput, RequestOutputKind
from engine.session import Session
from engine.sleeping import is_sleeping


class _Request(msgspec.Struct):
    admitted: AdmittedRequest
    arrival: float
    kind: RequestOutputKind
    told: dict[int, str | None] = {}
    """what was said of the schemas of those samples that have ended"""

    @property
    def size(self) -> int:
        """Sequences that the core holds for it at a time."""
        beams = self.admitted.message.beams
        return max(len(self.admitted.message.request_ids), 0 if beams is None else beams.width)


class Stepper:
    """Not thread-safe, which `step` says to who comes second."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._turning = threading.Lock()
        self._limit = session.config.scheduler.max_waiting
        self._requests: dict[str, _Request] = {}
        """that have not ended"""
        self._waiting: deque[str] = deque()
        """of those, the ones that the core does not know"""
        self._in_flight = 0
        """sequences that it does"""
        self._kept: list[RequestOutput] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, admitted: AdmittedRequest, arrival: float, kind: RequestOutputKind) -> None:
        """Raises `InvalidRequestError` for an id that is in use, `EngineError` where the core sleeps: nobody would wake
        it up."""
        name = admitted.request_id
        if is_sleeping(self._session.client):
            raise EngineError("the engine sleeps: wake it up first")
        if name in self._requests:
            raise InvalidRequestError(f"a request {name!r} is in flight already", "request_id")
        self._requests[name] = _Request(admitted, arrival, kind)
        self._waiting.append(name)

    def step(self) -> list[RequestOutput]:
        """What one step of the core brought, of every request with news; [] where there is none. Raises what ends the
        core, and `QueueFullError` where its queue is full of what nobody here has sent."""
        self._feed()
        if not self._in_flight:
            return []
        if not self._turning.acquire(blocking=False):
            raise EngineError("another thread runs requests of this LLM: it is for one thread at a time")
        outputs = []
        try:
            touched = self._session.take_in(self._session.client.recv())
        finally:
            self._turning.release()
        for name in dict.fromkeys(touched):
            output = self._session.take(name)
            if output is None:
                continue
            self._validate(self._requests[name], output)
            if output.finished:
                self.drop([name])
            outputs.append(output)
        return outputs

    def drop(self, names: Iterable[str]) -> None:
        """End requests, of which nothing more is wanted. Unknown ids are ignored."""
        known = [name for name in names if name in self._requests]
        if waiting := set(known).intersection(self._waiting):
            self._waiting = deque(name for name in self._waiting if name not in waiting)
        for name in known:
            request = self._requests.pop(name)
            if name not in waiting:
                self._in_flight -= request.size
        self._session.forget([name for name in known if name not in waiting])

    def keep(self, output: RequestOutput) -> None:
        """Of a request of somebody else's, who will ask for it."""
        self._kept.append(output)

    @property
    def num_kept(self) -> int:
        return sum(output.finished for output in self._kept)

    def take_kept(self) -> list[RequestOutput]:
        kept, self._kept = self._kept, []
        return kept

    def _feed(self) -> None:
        """Keep the core busy without overfilling its queue."""
        while self._waiting:
            name = self._waiting[0]
            request = self._requests[name]
            if self._in_flight and self._in_flight + request.size > self._limit:
                return
            kind = request.kind
            try:
                self._session.submit(
                    request.admitted,
                    request.arrival,
                    delta=kind is RequestOutputKind.DELTA,
                    final_only=kind is RequestOutputKind.FINAL_ONLY,
                )
            except QueueFullError:
                if not self._in_flight:
                    raise
                return  # what is there will empty it
            self._waiting.popleft()
            self._in_flight += request.size

    def _validate(self, request: _Request, output: RequestOutput) -> None:
        params = request.admitted.params
        if params.structured_outputs is None:
            return
        for part, text in self._session.processor.texts(output):
            if part.index in request.told:
                part.schema_error = request.told[part.index]
            elif part.finished:
                self._session.grammars.validate(params, [(part, text)])
                request.told[part.index] = part.schema_error
