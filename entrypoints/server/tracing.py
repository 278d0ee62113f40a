"""A span for each request, to an OpenTelemetry collector by OTLP over HTTP, in the words of the GenAI conventions.

A span is made when its request has ended, and sent by a thread of the SDK's, in batches. What the collector does not
take in time is dropped: at most `QUEUE` spans wait. Headers, resource attributes and sampling are set as everywhere,
by the SDK's variables (OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER).
"""

from __future__ import annotations

import asyncio
import threading
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine.errors import ConfigError
from engine.pooling import PoolingParams
from entrypoints.server.observers import Ended
from entrypoints.server.request_log import all_shortened, shortened

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.util.types import AttributeValue

QUEUE = 2048
_BATCH = 256
_EVERY_MS = 2000
_SEND_S = 5.0
_LAST_S = 3.0
"""how long the server's end waits for the last batch"""
_PATH = "/v1/traces"
_PROVIDER = "pageloom"


def traces_url(endpoint: str) -> str:
    """Where spans go: a collector's address alone gets the path that OTLP has for them. Raises `ConfigError`."""
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--otlp-endpoint: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-endpoint must be http://HOST:PORT or https://HOST:PORT, got {endpoint!r} (OTLP over HTTP)"
        )
    if port == 4317:
        raise ConfigError("--otlp-endpoint: 4317 is where collectors take gRPC; OTLP over HTTP is at 4318")
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + _PATH


def check_tracing(endpoint: str) -> None:
    """Before anything is loaded. Raises `ConfigError`."""
    traces_url(endpoint)
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--otlp-endpoint needs OpenTelemetry's SDK and exporter: pip install 'pageloom[otlp]' ({error})"
        ) from error


class Tracing:
    def __init__(self, endpoint: str, texts: int | None) -> None:
        """`texts`: characters of the prompt, and of its answers together, that spans carry; None: none. Raises
        `ConfigError`."""
        check_tracing(endpoint)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._texts = texts
        own = Resource.create({SERVICE_NAME: _PROVIDER, SERVICE_VERSION: version("pageloom")})
        self._provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=_SEND_S),
                max_queue_size=QUEUE,
                schedule_delay_millis=_EVERY_MS,
                max_export_batch_size=_BATCH,
            )
        )
        self._tracer = self._provider.get_tracer("pageloom", version("pageloom"))
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, request: Ended) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        seen = request.seen
        span = self._tracer.start_span(
            f"{request.operation} {request.served_name}",
            context=self._parent(request),
            kind=SpanKind.SERVER,
            attributes=self._attributes(request),
            start_time=seen.began_ns,
        )
        if (trouble := request.trouble) is not None:
            code, message = trouble
            span.set_attribute("error.type", code)
            # A refusal may quote the prompt.
            span.set_status(Status(StatusCode.ERROR, code if self._texts is None else shortened(message, self._texts)))
        span.end(end_time=seen.ended_ns)

    async def close(self) -> None:
        """Sends what is left, as far as the collector takes it at once."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _LAST_S)

    def _parent(self, request: Ended) -> Context:
        """Of the header `traceparent`; one that is no such thing counts as none."""
        from opentelemetry.context import Context

        headers = request.caller.headers if request.caller is not None else ()
        wanted = {name.decode(): value.decode("latin-1") for name, value in headers if name in _TRACE_HEADERS}
        return self._propagator.extract(wanted, Context())

    def _attributes(self, request: Ended) -> dict[str, AttributeValue]:
        found = {**_asked(request), **_answered(request)}
        if self._texts is not None:
            found["gen_ai.prompt"] = shortened(request.seen.prompt, self._texts)
            found["gen_ai.completion"] = all_shortened(request.seen.answers, self._texts)
        return {name: value for name, value in found.items() if value is not None}


_TRACE_HEADERS = (b"traceparent", b"tracestate")


def _asked(request: Ended) -> dict[str, Any]:
    caller = request.caller
    asked = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.system": _PROVIDER,
        "gen_ai.request.model": request.model or request.served_name,
        "gen_ai.request.stream": request.streams,
        "url.path": caller.path if caller is not None else None,
        "pageloom.request_id": caller.request_id if caller is not None else None,
    }
    params = request.params
    if isinstance(params, PoolingParams):
        return asked | {"gen_ai.embeddings.dimension.count": params.dimensions}
    return asked | {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
    }


def _answered(request: Ended) -> dict[str, Any]:
    timings = request.seen.timings
    found: dict[str, Any] = {
        "gen_ai.response.id": request.response_id,
        "gen_ai.response.model": request.served_name,
    }
    if timings is None:
        return found
    return found | {
        "gen_ai.response.finish_reasons": request.finish_reasons,
        "gen_ai.usage.input_tokens": timings.prompt_tokens,
        "gen_ai.usage.output_tokens": timings.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": timings.cached_tokens,
        "gen_ai.response.time_to_first_chunk": timings.time_to_first_token_s,
        "gen_ai.latency.time_to_first_token": timings.time_to_first_token_s,
        "gen_ai.latency.time_in_queue": timings.queue_s,
        "gen_ai.latency.time_in_model_prefill": timings.prefill_s,
        "gen_ai.latency.time_in_model_decode": timings.decode_s,
        "gen_ai.latency.time_in_model_inference": timings.inference_s,
        "gen_ai.latency.e2e": timings.end_to_end_s,
    }
