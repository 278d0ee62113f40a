"""The OpenAPI document says what is really sent."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from scripted_server import Server, events

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def ask(server: Server, *requests: tuple[str, str, Any], **headers: str) -> list[httpx.Response]:
    async def go() -> list[httpx.Response]:
        async with server.client() as client:
            return [
                await client.request(method, path, json=body, headers={"accept": "*/*", **headers})
                for method, path, body in requests
            ]

    return asyncio.run(asyncio.wait_for(go(), 60))


def check(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "logprobs": 2, "echo": True, "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": ["x", "y"], "n": 2, "stop": "w"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}),
        ("/v1/chat/completions", CHAT | {"n": 2, "stream_options": {"include_usage": True}, "stream": True}),
    ],
)
def test_answers_are_what_the_document_says(server: Server, path: str, body: dict[str, Any]) -> None:
    stream = {k: v for k, v in body.items() if k != "prompt_logprobs"} | {"stream": True}
    wrong = body | {"temperature": -1}
    whole = {k: v for k, v in body.items() if not k.startswith("stream")}
    asked = [("GET", "/openapi.json", None), *(("POST", path, one) for one in (whole, stream, wrong))]
    described, answer, streamed, refused = ask(server, *asked)
    document = described.json()
    responses = document["paths"][path]["post"]["responses"]
    content = responses["200"]["content"]
    check(document, content["application/json"]["schema"], answer.json())
    for event in events(streamed.text):
        check(document, content["text/event-stream"]["schema"], event)
    check(document, responses["400"]["content"]["application/json"]["schema"], refused.json())
    with pytest.raises(jsonschema.ValidationError):
        check(document, content["application/json"]["schema"], refused.json())


def test_every_reference_is_there_and_errors_of_others_are_not(server: Server) -> None:
    (described,) = ask(server, ("GET", "/openapi.json", None))
    text, schemas = described.text, described.json()["components"]["schemas"]
    assert set(re.findall(r'"#/components/schemas/([^"]+)"', text)) <= set(schemas)
    assert "HTTPValidationError" not in text and "securitySchemes" not in text
    assert "422" not in json.dumps(described.json()["paths"])


def test_a_server_with_a_key_says_so(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model, api_key="secret")
    asked = [("GET", path, None) for path in ("/openapi.json", "/v1/models", "/docs", "/docs/static/swagger-ui.css")]
    described, *_ = ask(server, *asked, authorization="Bearer secret")
    document = described.json()
    assert document["components"]["securitySchemes"] == {
        "key": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    assert document["paths"]["/v1/models"]["get"]["security"] == [{"key": []}, {"x-api-key": []}]
    assert "security" not in document["paths"]["/live"]["get"]
    assert [reply.status_code for reply in ask(Server(tiny_server_model, api_key="secret"), *asked)] == [401] * 4


def test_the_page_of_documents_asks_no_other_host(server: Server) -> None:
    """What it asks for lies beside it, whatever stands before its path (`--root-path`)."""
    page, *_ = ask(server, ("GET", "/docs", None))
    urls = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(urls) == 3 and all(url.startswith("docs/static/") for url in urls)
    assert re.search(r"url: '([^']+)'", page.text)[1] == "openapi.json"  # type: ignore[index]
    assert "https://" not in page.text


def test_what_the_page_needs_is_sent(server: Server) -> None:
    names = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
    for reply in ask(server, *(("GET", f"/docs/static/{name}", None) for name in names)):
        assert reply.status_code == 200 and len(reply.content) > 100
