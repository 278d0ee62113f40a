"""The few exception types of the engine. Every message says what, where, the limit, and the setting to change."""

from __future__ import annotations

from typing import ClassVar


class EngineError(Exception):
    """Base of every error that Pageloom raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A setting that cannot hold on this machine or with this model."""


TOO_LONG = "context_length_exceeded"
"""the code of what the context does not hold"""


class InvalidRequestError(EngineError, ValueError):
    """A request that can never be served as written.

    ``field`` names the parameter at fault (OpenAI's ``param``), or is None when no single one is. ``code`` is OpenAI's,
    where there is one that clients look for.
    """

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class QueueFullError(EngineError):
    """The bounded waiting queue is full; the request may be sent again after ``retry_after_s`` seconds."""

    kind: ClassVar = "queue_full"
    """as the core tells it"""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooShortError(QueueFullError):
    """By what runs and waits, its deadline cannot be kept, or another's could not beside it."""

    kind: ClassVar = "too_short"


class DeadlineError(EngineError):
    """The time is over that a request was given; what of it had come was delivered."""


class UnsupportedModelError(EngineError):
    """A model that no family covers; the message lists those that are."""


class WeightsError(EngineError):
    """A weight file that is damaged, incomplete, or does not match the model's configuration."""


class CoreDiedError(EngineError):
    """The engine core stopped; the message's last line is the root cause."""


class ShutDownError(CoreDiedError):
    """Somebody shut the engine down: nothing has failed."""


class RankLostError(EngineError):
    """A rank's connection to another one has ended. Who watches the ranks says why, within `RANK_GRACE_S`."""


RANK_GRACE_S = 3.0


class RequestFailedError(EngineError):
    """One request failed inside the core (for example NaN logits); others go on."""


def in_words(error: BaseException) -> str:
    """An unexpected error on one line that any message can carry."""
    text = " ".join(f"internal error: {type(error).__name__}: {error}".split())
    return text.encode(errors="backslashreplace").decode()
