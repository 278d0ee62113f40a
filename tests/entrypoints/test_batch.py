"""`engine-batch run`: every line answered once, by the server's own handlers, whatever ended the run before."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from batch_program import options_of, run
from fastapi.routing import APIRoute
from scripted_server import CHATS, COMPLETIONS, Server, post_all

from engine.errors import ConfigError, CoreDiedError
from engine.limits import Limits
from entrypoints.batch_lines import STREAMING, ResultFile, numbered_lines

pytestmark = pytest.mark.timeout(120)
PROGRAM = Path(__file__).with_name("batch_program.py")
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}


def line(custom_id: str, url: str = CHATS, body: Any = None, **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": CHAT if body is None else body, **more}


class Folder:
    def __init__(self, place: Path, lines: list[Any]) -> None:
        self.input, self.output = place / "in.jsonl", place / "out.jsonl"
        texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
        self.input.write_text("\n".join(texts) + "\n", errors="surrogateescape")

    def arguments(self, *more: str) -> list[str]:
        return ["-i", str(self.input), "--output", str(self.output), *more]

    def run(self, server: Server, *more: str) -> int:
        return run(server, options_of(self.arguments(*more)))

    def results(self) -> list[dict[str, Any]]:
        text = self.output.read_text()
        assert text == "" or text.endswith("\n")
        return [json.loads(each) for each in text.splitlines()]

    def by_id(self) -> dict[str, dict[str, Any]]:
        results = self.results()
        assert len({each["custom_id"] for each in results}) == len(results)
        return {each["custom_id"]: each for each in results}


def without_names(body: Any) -> Any:
    """What is the same of two answers to one request."""
    if isinstance(body, dict):
        return {k: without_names(v) for k, v in body.items() if k not in ("id", "created", "created_at", "request_id")}
    return [without_names(each) for each in body] if isinstance(body, list) else body


def test_answers_are_the_servers(tiny_server_model: Path, tmp_path: Path) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        (CHATS, CHAT),
        (CHATS, {**CHAT, "n": 2, "logprobs": True}),
        (CHATS, {**CHAT, "model": "another"}),
        (CHATS, {**CHAT, "temperature": -1}),
        (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 3}),
        ("/v1/messages", CHAT),
        ("/tokenize", {"prompt": "abc"}),
        ("/v1/nothing", {}),
        (CHATS, {"messages": []}),
    ]
    folder = Folder(tmp_path, [line(f"r{i}", url, body) for i, (url, body) in enumerate(requests)])
    assert folder.run(Server(tiny_server_model)) == 3
    served = post_all(Server(tiny_server_model), *requests)
    found = folder.by_id()
    assert len(found) == len(requests)
    for i, reply in enumerate(served):
        result = found[f"r{i}"]
        assert set(result) == {"id", "custom_id", "response", "error"} and result["error"] is None
        assert result["id"] == f"batch_req_{i + 1}" and result["response"]["request_id"]
        assert result["response"]["status_code"] == reply.status_code
        assert without_names(result["response"]["body"]) == without_names(reply.json())


def test_ollamas_answers_are_objects_though_its_routes_stream_by_default(
    tiny_server_model: Path, tmp_path: Path
) -> None:
    chat = {"messages": CHAT["messages"], "options": {"num_predict": 3}}
    prompt = {"prompt": "hi", "options": {"num_predict": 3}, "stream": None}
    asked = [("/api/chat", chat), ("/api/generate", prompt), ("/api/generate?x=1", {**prompt, "stream": False})]
    folder = Folder(tmp_path, [line(f"r{i}", url, body) for i, (url, body) in enumerate(asked)])
    server = Server(tiny_server_model)
    assert folder.run(server) == 0
    bodies = [folder.by_id()[f"r{i}"]["response"]["body"] for i in range(3)]
    assert all(body["done"] and body["eval_count"] == 3 for body in bodies)
    assert bodies[0]["message"]["content"] and bodies[1]["response"]


def test_all_routes_that_stream_by_default_are_known(tiny_server_model: Path) -> None:
    async def served() -> list[Any]:
        async with Server(tiny_server_model).client() as client:
            return list(client._transport.app.routes)  # type: ignore[attr-defined]

    found = set()
    for route in asyncio.run(served()):
        for field in route.dependant.body_params if isinstance(route, APIRoute) else ():
            fields = getattr(field.field_info.annotation, "model_fields", {})
            if isinstance(route, APIRoute) and "stream" in fields and fields["stream"].default:
                found.add(route.path)
    assert found == STREAMING


def test_all_succeeded_is_status_0(tiny_server_model: Path, tmp_path: Path) -> None:
    folder = Folder(tmp_path, [line(f"r{i}") for i in range(20)])
    server = Server(tiny_server_model)
    assert folder.run(server, "--max-in-flight", "3") == 0
    assert set(folder.by_id()) == {f"r{i}" for i in range(20)} and len(server.core.added) == 20


def test_lines_that_cannot_be_asked_are_errors_and_no_others_suffer(tiny_server_model: Path, tmp_path: Path) -> None:
    lines = [
        line("good"),
        "{broken",
        "",
        '"text"',
        line("get", method="GET"),
        {"custom_id": "no-url", "body": {}},
        line("body", body=[1]),
        line("stream", body={**CHAT, "stream": True}),
        line("background", "/v1/responses", body={"input": "x", "background": True}),
        line("url", "http://elsewhere/v1"),
        line("good"),
        line("x" * 1000),
        "\udcff",
        line("long", body={**CHAT, "user": "x" * 200_000}),
        line("last", extra=1),
    ]
    folder = Folder(tmp_path, lines)
    arguments = ("--limit", "body_bytes=100000")
    server = Server(tiny_server_model, limits=Limits(body_bytes=100_000))
    assert folder.run(server, *arguments) == 3
    results = folder.results()
    answered = [each for each in results if each["error"] is None]
    assert {each["custom_id"] for each in answered} == {"good", "last"}
    errors = {each["id"]: each for each in results if each["error"] is not None}
    assert set(errors) == {f"batch_req_{number}" for number in (2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)}
    assert all(each["response"] is None and each["error"]["message"] for each in errors.values())
    assert errors["batch_req_11"]["error"]["code"] == "duplicate_custom_id"
    assert errors["batch_req_11"]["custom_id"] == "good" and errors["batch_req_8"]["custom_id"] == "stream"
    assert "stream" in errors["batch_req_8"]["error"]["message"]
    assert errors["batch_req_2"]["custom_id"] is None and errors["batch_req_14"]["custom_id"] is None
    again = Server(tiny_server_model, limits=Limits(body_bytes=100_000))
    assert folder.run(again, *arguments) == 3 and folder.results() == results and not again.core.added


def test_what_was_answered_is_skipped_and_a_half_written_line_cut(tiny_server_model: Path, tmp_path: Path) -> None:
    folder = Folder(tmp_path, [line(f"r{i}") for i in range(6)])
    folder.run(Server(tiny_server_model))
    whole = folder.output.read_bytes().splitlines(keepends=True)
    folder.output.write_bytes(b"".join(whole[:3]) + whole[3][:40])
    server = Server(tiny_server_model)
    assert folder.run(server) == 0
    assert len(server.core.added) == 3 and set(folder.by_id()) == {f"r{i}" for i in range(6)}
    assert folder.output.read_bytes().startswith(b"".join(whole[:3]))
    server = Server(tiny_server_model)
    folder.run(server, "--overwrite")
    assert len(server.core.added) == 6 and len(folder.by_id()) == 6


def test_a_killed_run_is_taken_up(tiny_server_model: Path, tmp_path: Path) -> None:
    """By Ctrl-C, SIGTERM and SIGKILL in turn: in the end every line is answered once."""
    folder = Folder(tmp_path, [line(f"r{i}") for i in range(60)])
    command = [sys.executable, str(PROGRAM), str(tiny_server_model), "step_s=0.02", "--"]
    command += folder.arguments("--max-in-flight", "2", "--no-progress")
    for number, lines, status in ((signal.SIGINT, 5, 130), (signal.SIGTERM, 15, 143), (signal.SIGKILL, 25, -9)):
        program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not folder.output.exists() or folder.output.read_bytes().count(b"\n") < lines:
            assert program.poll() is None
            time.sleep(0.01)
        program.send_signal(number)
        assert program.wait(timeout=60) == status
        assert folder.output.read_bytes().count(b"\n") < 60
    subprocess.run(command, check=True, timeout=60, stderr=subprocess.DEVNULL)
    assert set(folder.by_id()) == {f"r{i}" for i in range(60)}


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_model_loads_ends_the_run(
    tiny_server_model: Path, tmp_path: Path, number: int, status: int
) -> None:
    folder = Folder(tmp_path, [line("a")])
    command = [sys.executable, str(PROGRAM), str(tiny_server_model), "start_s=1000", "--", *folder.arguments()]
    program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not folder.output.exists():
        time.sleep(0.01)
    time.sleep(0.5)
    program.send_signal(number)
    assert program.wait(timeout=60) == status and folder.output.read_bytes() == b""


def test_what_finds_no_place_is_sent_again(tiny_server_model: Path, tmp_path: Path) -> None:
    folder = Folder(tmp_path, [line(f"r{i}", url) for i, url in enumerate([CHATS, "/v1/messages", CHATS])])
    server = Server(tiny_server_model)
    server.script.refuse = ("queue_full", "the queue is full")

    async def make_room() -> None:
        while len(server.core.added) < 9:
            await asyncio.sleep(0.01)
        server.script.refuse = None

    start = server.engine.start

    async def started() -> Any:
        server.room = asyncio.get_running_loop().create_task(make_room())  # type: ignore[attr-defined]
        return await start()

    server.engine.start = started  # type: ignore[method-assign]
    assert folder.run(server) == 0 and len(folder.by_id()) == 3


def test_a_place_that_never_comes_is_an_error_in_the_end(
    tiny_server_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("entrypoints.batch._PAUSE_S", (0.001, 0.001))
    folder = Folder(tmp_path, [line("a"), line("b")])
    server = Server(tiny_server_model)
    server.script.refuse = ("queue_full", "the queue is full")
    assert folder.run(server) == 3
    assert [each["response"]["status_code"] for each in folder.results()] == [503, 503]
    assert folder.run(Server(tiny_server_model)) == 0
    assert [each["response"]["status_code"] for each in folder.results()] == [200, 200]


def test_what_failed_for_a_reason_of_the_servers_is_asked_again(tiny_server_model: Path, tmp_path: Path) -> None:
    folder = Folder(tmp_path, [line("good"), line("bad", body={**CHAT, "temperature": -1}), "{broken", line("busy")])
    folder.run(Server(tiny_server_model))
    lines = folder.output.read_bytes().splitlines(keepends=True)
    busy = next(each for each in lines if b'"busy"' in each)
    kept = [each for each in lines if each is not busy]
    for status in (500, 503, 529):
        failed = json.loads(busy) | {"response": {"status_code": status, "request_id": "x", "body": {}}}
        folder.output.write_bytes(json.dumps(failed).encode() + b"\n" + b"".join(kept) + b'{"half')
        folder.output.chmod(0o640)
        server = Server(tiny_server_model)
        assert folder.run(server) == 3 and len(server.core.added) == 1
        *first, last = folder.output.read_bytes().splitlines(keepends=True)
        assert first == kept and json.loads(last)["response"]["status_code"] == 200
        assert json.loads(last)["custom_id"] == "busy"
        assert folder.output.stat().st_mode & 0o777 == 0o640
        assert sorted(each.name for each in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_file_that_is_gone_on_with_stays_locked(tmp_path: Path) -> None:
    place = tmp_path / "out"
    answer = {"status_code": 503, "request_id": "x", "body": {}}
    place.write_text(json.dumps({"id": "batch_req_1", "custom_id": "a", "response": answer, "error": None}) + "\n")
    link = tmp_path / "link"
    link.symlink_to(place)
    first = ResultFile(link, overwrite=False)
    assert not first.answered and not first.num_failed and place.read_bytes() == b"" and link.is_symlink()
    with pytest.raises(ConfigError, match="another process"):
        ResultFile(place, overwrite=False)
    first.close()
    ResultFile(place, overwrite=False).close()


def test_a_core_that_dies_ends_the_run_and_blames_no_line(tiny_server_model: Path, tmp_path: Path) -> None:
    folder = Folder(tmp_path, [line(f"r{i}") for i in range(8)])
    server = Server(tiny_server_model)
    server.script.die_at = 2
    with pytest.raises(CoreDiedError, match="killed by the script"):
        folder.run(server)
    assert folder.results() == []
    assert folder.run(Server(tiny_server_model)) == 0 and len(folder.by_id()) == 8


def test_other_files_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from entrypoints.batch import main

    notes = tmp_path / "notes"
    notes.write_text("not an answer\n")
    with pytest.raises(ConfigError, match="line 1 is no answer"):
        ResultFile(notes, overwrite=False)
    assert notes.read_text() == "not an answer\n"
    first = ResultFile(tmp_path / "out", overwrite=False)
    with pytest.raises(ConfigError, match="another process"):
        ResultFile(tmp_path / "out", overwrite=True)
    first.close()
    for arguments in (["-i", str(tmp_path / "none"), "-o", "x"], ["-i", str(notes), "-o", str(notes)]):
        assert main(["run", "--model", str(tmp_path), *arguments]) == 1
    assert "no such file" in (told := capsys.readouterr().err) and "is the input" in told
    with pytest.raises(SystemExit):
        main(["run", "-i", "x"])


def test_long_lines_are_read_past(tmp_path: Path) -> None:
    limits = Limits(body_bytes=10)
    long = b"x" * 200_000
    (tmp_path / "in").write_bytes(b"a\n\n" + long + b"\nb\n" + long)
    with open(tmp_path / "in", "rb") as file:
        assert list(numbered_lines(file, limits)) == [(1, b"a\n"), (3, None), (4, b"b\n"), (5, None)]
