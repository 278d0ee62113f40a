"""A line of the log for each request that has ended: what was asked for, what came of it, how long it took."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from engine.pooling import PoolingParams
from engine.request import SamplingParams, StructuredOutputsParams
from entrypoints.server.observers import Ended

logger = logging.getLogger("pageloom.requests")


class RequestLog:
    def __init__(self, texts: int | None) -> None:
        """`texts`: characters of the prompt, and of its answers together, that are shown; None: none."""
        self._texts = texts

    def __call__(self, request: Ended) -> None:
        trouble = request.trouble
        outcome = " and ".join(dict.fromkeys(request.finish_reasons)) if trouble is None else trouble[0]
        logger.info("request %s ended: %s", request.response_id, outcome, extra={"fields": self._fields(request)})

    def _fields(self, request: Ended) -> dict[str, Any]:
        caller, seen, timings = request.caller, request.seen, request.seen.timings
        fields: dict[str, Any] = {
            "response_id": request.response_id,
            "path": None if caller is None else caller.path,
            "model": request.model or request.served_name,
            "stream": request.streams,
            "params": shown_params(request.params),
            "latency_s": round((seen.ended_ns - seen.began_ns) / 1e9, 6),
        }
        if timings is not None:
            fields |= {
                "prompt_tokens": timings.prompt_tokens,
                "cached_tokens": timings.cached_tokens,
                "generated_tokens": timings.generated_tokens,
                "finish_reasons": request.finish_reasons,
                "ttft_s": _rounded(timings.time_to_first_token_s),
                "queue_s": _rounded(timings.queue_s),
            }
        if (trouble := request.trouble) is not None:
            fields["error"] = trouble[0]
        if self._texts is not None:
            fields["prompt"] = shortened(seen.prompt, self._texts)
            fields["answers"] = all_shortened(seen.answers, self._texts)
        return fields


def shown_params(params: SamplingParams | PoolingParams) -> dict[str, Any]:
    """Those that differ from the defaults, and those that everybody wants to know. Of texts and lists the number."""
    given: dict[str, Any] = {}
    if isinstance(params, SamplingParams):
        given = {"n": params.n, "temperature": params.temperature, "max_tokens": params.max_tokens}
    for field in msgspec.structs.fields(params):
        value = getattr(params, field.name)
        if value == field.default:
            continue
        if value is None or isinstance(value, (bool, int, float)):
            given[field.name] = value
        elif isinstance(value, StructuredOutputsParams):
            given[field.name] = value.kind
        else:
            given[field.name] = 1 if isinstance(value, str) else len(value)
    return given


def shortened(text: str | None, most: int) -> str | None:
    """With how much was left out."""
    if text is None or len(text) <= most:
        return text
    return f"{text[:most]}... ({len(text) - most} characters more)"


def all_shortened(texts: list[str], most: int) -> list[str | None]:
    """Each as far as those before it leave room."""
    shown = []
    for text in texts:
        shown.append(shortened(text, most))
        most = max(most - len(text), 0)
    return shown


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
