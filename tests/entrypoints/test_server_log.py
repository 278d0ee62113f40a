"""The log of a server that hostile clients use: entries that no client can forge, and a line for each request."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_server_process import process

from entrypoints.serve import main

FORGED = 'x\n{"level":"critical","message":"forged"}\r\n\x1b[31m2026-01-01 00:00:00,000 INFO forged\u2028\u202e'
SECRET = "tell nobody of this"


def hostile_use(base: str) -> None:
    body = {"prompt": SECRET, "max_tokens": 3, FORGED: 1, "stop": [SECRET]}
    for path in ("/v1/completions", "/v1/none%0A%1B[31mforged"):
        httpx.post(base + path, json=body)
    httpx.post(f"{base}/v1/completions", json={**body, "model": FORGED})
    httpx.post(f"{base}/v1/completions", content=b'{"prompt": "\x1b[31m', headers={"content-type": "application/json"})
    host, port = base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET /\x1b[31m HTTP/1.1\r\nHost: x\r\nx-request-id: a\x1b[2J\r\n\r\n")
        raw.settimeout(10)
        raw.recv(1000)


def log_after(model: Path, *options: str) -> list[str]:
    with process(model, "--log-level=debug", *options) as (server, base, log):
        hostile_use(base)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 2, "n": 2}
        httpx.post(f"{base}/v1/chat/completions", json=chat, headers={"x-request-id": "mine"}).raise_for_status()
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0, log
        while not any("shutting down" in line for line in log):
            time.sleep(0.01)
    return list(log)


def test_every_line_is_an_object_and_says_whose_request_it_is_of(tiny_server_model: Path) -> None:
    lines = log_after(tiny_server_model, "--log-format=json", "--log-requests")
    entries = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "process", "message"} <= entry.keys() for entry in entries)
    assert all(re.fullmatch(r"[ -~]+\n?", line) for line in lines)
    assert not any(entry["level"] == "critical" or SECRET in line for entry, line in zip(entries, lines, strict=True))
    refused = [entry for entry in entries if "refused" in entry["message"] and entry["logger"] == "pageloom.requests"]
    assert [(each["path"], each["status"], each["error"]) for each in refused] == [
        ("/v1/completions", 404, "model_not_found"),
        ("/v1/completions", 400, "invalid_request_error"),
    ]
    (chat,) = [entry for entry in entries if entry.get("path") == "/v1/chat/completions"]
    expected: dict[str, Any] = {
        "logger": "pageloom.requests",
        "level": "info",
        "request_id": "mine",
        "model": "tiny",
        "stream": False,
        "generated_tokens": 4,
        "finish_reasons": ["length", "length"],
    }
    assert {name: chat[name] for name in expected} == expected
    assert chat["message"] == f"request {chat['response_id']} ended: length"
    assert (chat["params"]["n"], chat["params"]["max_tokens"]) == (2, 2)
    assert 0 < chat["ttft_s"] <= chat["latency_s"] and chat["prompt_tokens"] > len(SECRET)
    unknown = [entry for entry in entries if "fields that nobody knows" in entry["message"]]
    assert unknown and all(len(entry["request_id"]) == 16 for entry in unknown)
    (first, *_) = [entry for entry in entries if entry.get("path") == "/v1/completions"]
    assert first["params"]["stop"] == 1
    assert any(entry["logger"] == "uvicorn.access" for entry in entries)


def test_in_text_no_line_that_a_client_wrote_begins_at_the_left_edge(tiny_server_model: Path) -> None:
    lines = log_after(tiny_server_model, "--log-requests")
    for line in lines:
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [\w.]+: |    ", line), line
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e]", line) and SECRET not in line
    (chat,) = [line for line in lines if 'path="/v1/chat/completions"' in line]
    assert 'params={"n":2,' in chat and "generated_tokens=4" in chat


@pytest.mark.parametrize(("most", "shown"), [(2000, SECRET), (9, "<|user|>t... (")])
def test_texts_are_shown_when_they_are_asked_for(tiny_server_model: Path, most: int, shown: str) -> None:
    options = ("--log-requests", "--log-prompts", f"--max-log-len={most}", "--log-format=json")
    entries = [json.loads(line) for line in log_after(tiny_server_model, *options)]
    (chat,) = [entry for entry in entries if entry.get("path") == "/v1/chat/completions"]
    assert shown in chat["prompt"] and len(chat["answers"]) == 2
    assert chat["prompt"].startswith("<|user|>")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--log-prompts"], "--log-prompts has no effect without --log-requests or --otlp-endpoint"),
        (["--max-log-len", "-1"], "'-1' is not a number of characters"),
        (["--max-log-len", "99999999"], "0 to 65536"),
        (["--log-format", "xml"], "invalid choice"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["none", *options])
    assert said in capsys.readouterr().err


def test_vllms_names_of_these_options_are_taken() -> None:
    from entrypoints.serve import build_parser

    given = ["--enable-log-requests", "--otlp-traces-endpoint", "http://a:4318", "--max-log-len", "5"]
    options = build_parser().parse_args(given)
    assert (options.log_requests, options.otlp_endpoint, options.max_log_len) == (True, "http://a:4318", 5)
