"""Spans as a collector gets them, of a front end over a scripted core: what was asked, what came of it, and no text."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from collector import Collector, attributes_of, collecting
from observed_server import served
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from scripted_server import ANSWER, Server

from engine.errors import ConfigError
from entrypoints.server.app import create_app
from entrypoints.server.context import ServerSettings
from entrypoints.server.tracing import QUEUE, check_tracing, traces_url

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "tell nobody"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}


@asynccontextmanager
async def client_of(server: Server, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The application begins and ends as it does under a server."""
    await server.engine.start()
    server.script.answer = server.ids(ANSWER)
    app = create_app(server.engine, "tiny", settings=ServerSettings(**settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://traced", timeout=60) as client,
    ):
        yield client


def spans_of(server: Server, *requests: tuple[str, dict[str, Any], dict[str, str]], **settings: Any) -> Collector:
    async def go() -> None:
        async with client_of(server, otlp_endpoint=collector.url, **settings) as client:
            for path, body, headers in requests:
                await client.post(path, json=body, headers=headers)

    with collecting() as collector:
        asyncio.run(go())
    return collector


@pytest.fixture
def server(tiny_model: Path) -> Server:
    return Server(tiny_model)


def test_a_chats_span_says_what_was_asked_and_what_came_of_it(server: Server) -> None:
    server.script.cached_tokens = 3
    body = {**CHAT, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 11, "n": 2}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b", "x-request-id": "mine"}
    collector = spans_of(server, ("/v1/chat/completions", body, headers))
    assert collector.paths == {"/v1/traces"}
    (span,) = collector.spans
    assert (span.name, span.kind, span.status.code) == ("chat tiny", Span.SPAN_KIND_SERVER, Status.STATUS_CODE_UNSET)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, "a=b")
    assert 0 < span.start_time_unix_nano < span.end_time_unix_nano
    found = attributes_of(span)
    prompt = len(server.ids(f"<|user|>{SECRET}<|assistant|>"))
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pageloom",
        "gen_ai.system": "pageloom",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 11,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": False,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.output_tokens": 10,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "url.path": "/v1/chat/completions",
        "pageloom.request_id": "mine",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found["gen_ai.response.id"].startswith("chatcmpl-")
    first, whole = found["gen_ai.latency.time_to_first_token"], found["gen_ai.latency.e2e"]
    assert 0 < first <= whole and found["gen_ai.latency.time_in_model_decode"] <= whole
    (resource,) = collector.resources
    assert resource["service.name"] == "pageloom"
    assert not any(SECRET.encode() in each or ANSWER[:5].encode() in each for each in collector.bodies)


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 3}, "text_completion"),
        ("/v1/completions", {"prompt": [SECRET, "b", "c"], "max_tokens": 3}, "text_completion"),
        ("/v1/chat/completions", {**CHAT, "stream": True}, "chat"),
        ("/v1/messages", {**CHAT, "stream": True}, "chat"),
        ("/v1/messages", CHAT, "chat"),
        ("/v1/responses", {"model": "tiny", "input": SECRET, "max_output_tokens": 4}, "chat"),
        ("/v1/responses", {"model": "tiny", "input": SECRET, "max_output_tokens": 4, "stream": True}, "chat"),
        ("/v1/responses/compact", {"model": "tiny", "input": SECRET}, "chat"),
    ],
)
def test_whatever_generates_has_a_span_for_each_prompt(
    server: Server, path: str, body: dict[str, Any], operation: str
) -> None:
    collector = spans_of(server, (path, body, {}))
    prompts = body.get("prompt", SECRET)
    assert len(collector.spans) == (1 if isinstance(prompts, str) else len(prompts))
    for span in collector.spans:
        assert span.name == f"{operation} tiny" and not span.parent_span_id
        assert attributes_of(span)["url.path"] == path
        assert attributes_of(span)["gen_ai.usage.output_tokens"] > 0


def test_vectors_have_spans_of_their_own_kind_and_a_real_engine_tells_all_times(tiny_model: Path) -> None:
    async def go() -> None:
        async with served(tiny_model, ServerSettings(otlp_endpoint=collector.url)) as client:
            await client.post("/v1/embeddings", json={"input": [SECRET, "b"], "dimensions": 4})
            await client.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 4, "ignore_eos": True})

    with collecting() as collector:
        asyncio.run(go())
    *pooled, generated = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert [span.name for span in pooled] == ["embeddings tiny"] * 2
    for span in pooled:
        found = attributes_of(span)
        assert found["gen_ai.response.finish_reasons"] == ["stop"] and "error.type" not in found
        assert found["gen_ai.embeddings.dimension.count"] == 4
    found = attributes_of(generated)
    latency = {name: found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")}
    assert 0 <= latency["time_in_queue"] < latency["time_to_first_token"] < latency["e2e"]
    prefill, decode = found["gen_ai.latency.time_in_model_prefill"], found["gen_ai.latency.time_in_model_decode"]
    assert prefill + decode == pytest.approx(found["gen_ai.latency.time_in_model_inference"])


def test_texts_are_there_when_they_are_asked_for_and_no_longer_than_that(server: Server) -> None:
    collector = spans_of(server, ("/v1/chat/completions", {**CHAT, "max_tokens": 60, "n": 2}, {}), log_prompts=True)
    found = attributes_of(collector.spans[0])
    assert found["gen_ai.prompt"] == f"<|user|>{SECRET}<|assistant|>"
    assert found["gen_ai.completion"] == [ANSWER, ANSWER]


def test_long_texts_are_cut(server: Server) -> None:
    request = ("/v1/chat/completions", {**CHAT, "max_tokens": 60, "n": 2}, {})
    found = attributes_of(spans_of(server, request, log_prompts=True, max_log_len=6).spans[0])
    assert found["gen_ai.prompt"].startswith("<|user... (")
    assert found["gen_ai.completion"] == [f"{ANSWER[:6]}... (4 characters more)", "... (10 characters more)"]


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("fault", "request_failed"),
        ("queue_full", "queue_full"),
        ("too_short", "deadline_unreachable"),
        ("invalid", "invalid_request_error"),
    ],
)
def test_what_fails_is_an_error_without_the_text_of_its_message(server: Server, kind: str, code: str) -> None:
    server.script.refuse = (kind, f"it said {SECRET}")
    (span,) = spans_of(server, ("/v1/chat/completions", CHAT, {})).spans
    assert (span.status.code, span.status.message) == (Status.STATUS_CODE_ERROR, code)
    assert attributes_of(span)["error.type"] == code
    assert SECRET not in str(span)


def test_what_the_engine_refuses_has_a_span(server: Server) -> None:
    (span,) = spans_of(server, ("/v1/completions", {"prompt": "x" * 999}, {})).spans
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert attributes_of(span)["error.type"] == "context_length_exceeded"
    assert "gen_ai.usage.input_tokens" not in attributes_of(span)


def test_a_client_that_leaves_has_a_span_of_what_there_was(server: Server) -> None:
    async def go() -> None:
        async with client_of(server, otlp_endpoint=collector.url) as client:
            server.script.stall_at = 3
            request = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 9}))
            while not server.core.added:
                await asyncio.sleep(0.01)
            while server.engine.metrics.stats.running == 0:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    with collecting() as collector:
        asyncio.run(go())
    (span,) = collector.spans
    found = attributes_of(span)
    assert (span.status.code, found["error.type"]) == (Status.STATUS_CODE_ERROR, "aborted")
    assert found["gen_ai.response.finish_reasons"] == ["abort"] and found["gen_ai.usage.output_tokens"] == 3


@pytest.mark.parametrize(
    "header", ["", "00", "00-" + "0" * 32 + f"-{PARENT}-01", f"00-{TRACE}-{PARENT}-01-x", "x" * 4000, "ÿþ\x7f"]
)
def test_a_damaged_traceparent_counts_as_none(server: Server, header: str) -> None:
    headers = {"traceparent": header.encode("latin-1")}
    (span,) = spans_of(server, ("/v1/completions", {"prompt": "x"}, headers)).spans  # type: ignore[arg-type]
    assert not span.parent_span_id and span.trace_id.hex() != TRACE


def test_a_parent_that_is_not_sampled_is_not_traced(server: Server) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert spans_of(server, ("/v1/completions", {"prompt": "x"}, headers)).spans == []


def test_a_collector_that_is_not_there_hurts_nobody(server: Server) -> None:
    with socket.socket() as taken:  # bound and not listening: refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"

        async def go() -> list[httpx.Response]:
            async with client_of(server, otlp_endpoint=endpoint) as client:
                body = {"prompt": ["x"] * 100, "max_tokens": 1}
                return [await client.post("/v1/completions", json=body) for _ in range(QUEUE // 100 + 2)]

        assert all(reply.status_code == 200 for reply in asyncio.run(go()))


def test_without_an_endpoint_nothing_is_watched_and_no_sdk_is_loaded(tiny_model: Path) -> None:
    program = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from scripted_server import COMPLETIONS, Server, post_all
server = Server(Path(sys.argv[1]))
seen = []
generate = server.engine.generate
server.engine.generate = lambda *given, **named: (seen.append(named["watch"]), generate(*given, **named))[1]
assert post_all(server, (COMPLETIONS, {"prompt": "x"}))[0].status_code == 200
assert seen == [None]
assert "opentelemetry.sdk" not in sys.modules
"""
    paths = [str(Path(__file__).parents[1] / "entrypoints"), *sys.path]
    done = subprocess.run([sys.executable, "-c", program, str(tiny_model), *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_its_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'pageloom\[otlp\]'"):
        check_tracing("http://localhost:4318")


def test_a_collectors_address_gets_otlps_path() -> None:
    assert traces_url("http://a:4318") == traces_url("http://a:4318/") == "http://a:4318/v1/traces"
    assert traces_url("https://a.example/otlp/v1/traces") == "https://a.example/otlp/v1/traces"


@pytest.mark.parametrize("endpoint", ["a:4318", "grpc://a:4317", "http://a:4317", "http://", "http://a:x", ""])
def test_what_is_no_otlp_over_http_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        traces_url(endpoint)
