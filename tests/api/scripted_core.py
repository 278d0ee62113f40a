"""A core that says what the test wants: every sequence repeats its prompt, one token a step, until its limit."""

from __future__ import annotations

import asyncio
from collections import deque

from engine.config import EngineConfig
from engine.core.wire import (
    AbortRequests,
    AddRequest,
    CoreReady,
    CoreStats,
    SequenceDelta,
    StepOutputs,
    ToCore,
    UnpinPrefix,
    Vocabulary,
)
from engine.errors import CoreDiedError, QueueFullError


class EchoCore:
    """Implements the client's protocol. Dead after `die_after` steps; prompts that begin with `poison` fail alone."""

    def __init__(self, config: EngineConfig, *, die_after: int | None = None, poison: int | None = None) -> None:
        self.config = config
        self.running: dict[str, tuple[AddRequest, int]] = {}
        self.added: list[AddRequest] = []
        self.aborted: list[str] = []
        self.vocabularies: list[tuple[Vocabulary, int]] = []
        """and how many requests came before each"""
        self.pinned: set[str] = set()
        self.most_at_once = 0
        self.steps = 0
        self.closed = False
        self.paused = False
        self.die_after = die_after
        self.poison = poison
        self.room: int | None = None
        """messages that the queue holds until the next step; None: any number"""
        self._inbox: deque[ToCore] = deque()
        self._sent = asyncio.Event()

    def start(self) -> CoreReady:
        return CoreReady(
            num_blocks=10,
            block_size=16,
            max_model_len=self.config.model.max_model_len,
            attention_backend="echo",
            ledger="",
            distinct_pieces=0,
            pieces_compiled=0,
            startup_seconds=0.0,
        )

    def send(self, message: ToCore) -> None:
        if self.room is not None and isinstance(message, AddRequest) and len(self._inbox) >= self.room:
            raise QueueFullError("at most so many frames")
        self._inbox.append(message)
        self._sent.set()

    def recv(self) -> StepOutputs:
        self._drain()
        assert self.running, "recv without work would wait for ever"
        return self._step()

    async def recv_async(self) -> StepOutputs:
        while True:
            await asyncio.sleep(0)
            self._sent.clear()
            self._drain()
            if self.running and not self.paused:
                return self._step()
            await self._sent.wait()

    def stalled(self) -> str | None:
        return None

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def _drain(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, AddRequest):
                self.added.append(message)
                if message.pin is not None:
                    assert message.pin not in self.pinned
                    self.pinned.add(message.pin)
                for request_id in message.request_ids:
                    self.running[request_id] = (message, 0)
            elif isinstance(message, AbortRequests):
                self.aborted += message.request_ids
                for request_id in message.request_ids:
                    self.running.pop(request_id, None)
            elif isinstance(message, Vocabulary):
                self.vocabularies.append((message, len(self.added)))
            elif isinstance(message, UnpinPrefix):
                self.pinned.discard(message.name)
        self.most_at_once = max(self.most_at_once, len(self.running))

    def _step(self) -> StepOutputs:
        if self.die_after is not None and self.steps >= self.die_after:
            raise CoreDiedError("Traceback …\nRuntimeError: the disk is on fire")
        self.steps += 1
        deltas = [self._next(name, request, done) for name, (request, done) in list(self.running.items())]
        stats = CoreStats(running=len(self.running), steps=self.steps, kv_blocks_total=10, kv_blocks_used=5)
        return StepOutputs(deltas=deltas, stats=stats)

    def _next(self, name: str, request: AddRequest, done: int) -> SequenceDelta:
        prompt = request.prompt_token_ids
        if prompt[0] == self.poison:
            del self.running[name]
            return SequenceDelta(request_id=name, finish_reason="error", error="NaN logits", error_kind="fault")
        last = done + 1 == request.max_tokens
        if last:
            del self.running[name]
        else:
            self.running[name] = (request, done + 1)
        return SequenceDelta(
            request_id=name, token_ids=[prompt[done % len(prompt)]], finish_reason="length" if last else None
        )
