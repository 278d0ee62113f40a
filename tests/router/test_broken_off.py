"""Answers that break off: clients are told in the words of the API that they asked, and the log has no traceback."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from served import BODY, Served, until

from entrypoints.router import servers

PATHS = ["/v1/chat/completions", "/v1/messages", "/api/chat"]


def events(path: str, text: str) -> list[object]:
    """What a client reads, in which everything is whole."""
    lines = [line for line in text.split("\n") if line and not line.startswith(("event: ", ":"))]
    return [json.loads(line if path == "/api/chat" else line.removeprefix("data: ")) for line in lines]


def message_of(path: str, event: object) -> str:
    assert isinstance(event, dict)
    assert event.get("type") == ("error" if path == "/v1/messages" else None)
    return str(event["error"] if path == "/api/chat" else event["error"]["message"])


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_whose_server_leaves_ends_with_an_error(
    served: Served, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    served.every("breaks")
    answer = served.post({"messages": [], "stream": True, "max_tokens": 5}, path)
    first, last = events(path, answer.text)
    assert first == 0 and "has left" in message_of(path, last)
    assert "\n\nevent: error\n" in answer.text or path != "/v1/messages"
    (line,) = caplog.records
    assert "in the middle of an answer" in line.message and line.exc_info is None


def test_a_stream_of_a_server_that_no_longer_answers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "CHECK_S", 0.1)
    served = Served()
    try:
        served.every("slow")
        body = {"messages": [], "stream": True}
        with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body, timeout=20) as answer:
            parts = answer.iter_raw()
            assert next(parts) == b"data: 0\n\n"
            served.every("stopped")
            assert b"has left" in list(parts)[-1]
    finally:
        served.close()


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_ends_what_runs_with_an_error(signals: int, caplog: pytest.LogCaptureFixture) -> None:
    """After the grace period, or at once where another signal comes. What has begun as a stream, what waits for its
    first token, and what waits for the first hop."""
    caplog.set_level("INFO", "pageloom")
    served = Served(grace_s=0 if signals == 1 else 1000)
    answers: list[httpx.Response] = []
    served.prefill.mode = "stopped"
    bodies = ({**BODY, "max_tokens": 9}, {**BODY, "echo": True})
    try:
        served.every("slow")
        with httpx.stream(
            "POST", f"{served.url}/v1/completions", json={**bodies[1], "stream": True}, timeout=20
        ) as stream:
            lines = stream.iter_lines()
            assert next(lines) == "data: 0"
            served.every("stopped")
            asking = [
                threading.Thread(target=lambda body: answers.append(served.post(body)), args=(body,)) for body in bodies
            ]
            for thread in asking:
                thread.start()
            until(lambda: len(served.prefill.asked) == 1 and len(served.decoded) == 2)
            for _ in range(signals):
                served.signal()
            rest = [line for line in lines if line]
        for thread in asking:
            thread.join()
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert [(answer.status_code, answer.json()["error"]["code"]) for answer in answers] == [
            (503, "shutting_down")
        ] * 2
    finally:
        served.close()
    wait = "; up to 0 s" if signals == 1 else "; up to 1000 s"
    told = [record.message for record in caplog.records if record.name.startswith("pageloom")]  # others may be talking
    assert [line for line in told if "ready" not in line] == [
        f"shutting down{wait} for 3 running requests (again to end them now)"
    ]
    assert served.router.client.is_closed, "the application has ended orderly"
