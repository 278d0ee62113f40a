"""What each client of `--keys` has used: under /metrics, and as a log that only grows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.errors import ConfigError
from engine.observability.timings import RequestTimings
from entrypoints.server.keys import Client, Keyring, Used
from entrypoints.server.observers import Ended

_PREFIX = "pageloom_key_"
_COUNTERS: dict[str, tuple[str, Callable[[Used], int]]] = {
    "requests": ("Requests of a key that were admitted", lambda used: used.requests),
    "prompt_tokens": ("Tokens of its prompts", lambda used: used.prompt_tokens),
    "cached_tokens": ("Of those, found in the prefix cache", lambda used: used.cached_tokens),
    "generation_tokens": ("Tokens of its answers", lambda used: used.generated_tokens),
}


class KeyCollector(Collector):
    def __init__(self, keyring: Keyring, model_name: str) -> None:
        self._keyring, self._model_name = keyring, model_name

    def collect(self) -> Iterator[Metric]:
        clients = self._keyring.clients
        labels = ["model_name", "key"]
        for name, (meaning, value) in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, meaning, labels=labels)
            for client in clients:
                counter.add_metric([self._model_name, client.name], value(client.used))
            yield counter
        running = GaugeMetricFamily(_PREFIX + "requests_running", "Requests of a key being answered", labels=labels)
        for client in clients:
            running.add_metric([self._model_name, client.name], client.quotas.running)
        yield running
        refused = CounterMetricFamily(
            _PREFIX + "refused", "Requests of a key beyond a quota", labels=[*labels, "quota"]
        )
        for client in clients:
            for quota, count in sorted(client.used.refused.items()):
                refused.add_metric([self._model_name, client.name, quota], count)
        yield refused


class UsageLog:
    """A line of JSON for each request of a client, at the end of the file. One that is moved away is begun anew."""

    def __init__(self, file: Path) -> None:
        """Raises `ConfigError`."""
        try:
            self._handler = WatchedFileHandler(file, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--usage-log: cannot write {file}: {error.strerror}") from error

    def __call__(self, request: Ended) -> None:
        if request.client is not None and (used := request.used) is not None:
            line = msgspec.json.encode(_told(request, request.client, used)).decode()
            self._handler.handle(logging.makeLogRecord({"msg": line}))

    def close(self) -> None:
        self._handler.close()


def _told(request: Ended, client: Client, used: RequestTimings) -> dict[str, object]:
    caller, trouble = request.caller, request.trouble
    return {
        "time": datetime.fromtimestamp(request.seen.ended_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        "key": client.name,
        "request_id": None if caller is None else caller.request_id,
        "response_id": request.response_id,
        "path": None if caller is None else caller.path,
        "model": request.model or request.served_name,
        "prompt_tokens": used.prompt_tokens,
        "cached_tokens": used.cached_tokens,
        "generated_tokens": used.generated_tokens,
        "finish_reasons": request.finish_reasons,
        "error": None if trouble is None else trouble[0],
    }
