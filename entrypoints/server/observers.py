"""Who is told of every generating request when it has ended, whichever route it came by: the log, and traces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import (
    CoreDiedError,
    DeadlineError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    ShutDownError,
    TooShortError,
)
from engine.frontend.failures import CONTROL
from engine.observability.request_watch import RequestWatch
from engine.observability.timings import RequestTimings
from engine.pooling import PoolingParams
from engine.request import SamplingParams
from entrypoints.server.caller import CALLER, Caller
from entrypoints.server.keys import CLIENT, Client

logger = logging.getLogger("pageloom.server")


@dataclass(frozen=True)
class Ended:
    """A request that the engine was asked for, and what became of it."""

    response_id: str
    caller: Caller | None
    """None: nobody's over HTTP"""
    model: str | None
    """as the request names it"""
    served_name: str
    params: SamplingParams | PoolingParams
    streams: bool
    seen: RequestWatch
    error: BaseException | None
    client: Client | None = None
    """whose key it came with"""

    @property
    def operation(self) -> str:
        """One of OpenTelemetry's names of operations."""
        if isinstance(self.params, PoolingParams):
            return "embeddings"
        path = self.caller.path if self.caller is not None else ""
        plain = path.rpartition("/")[2] in ("completions", "completion", "generate", "infill") and "chat" not in path
        return "text_completion" if plain else "chat"

    @property
    def finish_reasons(self) -> list[str]:
        return list(self.seen.timings.finish_reasons) if self.seen.timings is not None else []

    @property
    def used(self) -> RequestTimings | None:
        """What whoever asked is charged for; None: it was refused, and nothing was computed."""
        timings, refused = self.seen.timings, isinstance(self.error, (QueueFullError, InvalidRequestError))
        return None if timings is None or (refused and not timings.generated_tokens) else timings

    @property
    def trouble(self) -> tuple[str, str] | None:
        """(code, message) of what it failed by, or None. The message may quote what the client sent."""
        if self.error is None or isinstance(self.error, CONTROL):  # closed: by a client that left, or by who has enough
            ended = self.finish_reasons and "abort" not in self.finish_reasons
            return None if ended else ("aborted", "the client left, or the server ended")
        return _code(self.error), str(self.error)


def _code(error: BaseException) -> str:
    if isinstance(error, InvalidRequestError):
        return error.code or "invalid_request_error"
    codes = {
        TooShortError: "deadline_unreachable",
        QueueFullError: "queue_full",
        DeadlineError: "deadline_exceeded",
        ShutDownError: "shutting_down",
        CoreDiedError: "engine_dead",
        RequestFailedError: "request_failed",
    }
    return next((code for kind, code in codes.items() if isinstance(error, kind)), type(error).__name__)


class Observers:
    def __init__(self, tell: Sequence[Callable[[Ended], None]], served_name: str) -> None:
        self._tell, self._served_name = tell, served_name

    def watch(
        self, response_id: str, params: SamplingParams | PoolingParams, body: Any, *, streams: bool
    ) -> RequestWatch | None:
        """To be called in the task that serves the request. None: nobody wants to know."""
        client = CLIENT.get()
        if not self._tell and client is None:
            return None
        caller, model = CALLER.get(), getattr(body, "model", None)
        if caller is not None:
            caller.watched.add(response_id)

        def ended(seen: RequestWatch, error: BaseException | None) -> None:
            request = Ended(response_id, caller, model, self._served_name, params, streams, seen, error, client)
            if client is not None and (used := request.used) is not None:
                client.use(used.prompt_tokens, used.cached_tokens, used.generated_tokens)
            for tell in self._tell:
                try:
                    tell(request)
                except Exception:  # what is told of a request is not worth its failure
                    logger.exception("request %s could not be told of", response_id)

        return RequestWatch(ended)
