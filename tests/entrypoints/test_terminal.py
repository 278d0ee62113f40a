"""The doors in a terminal: Ctrl-C while they import, and `engine-chat` with a terminal and with pipes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from entrypoints import chat

HANG_GUARD_S = 60

SLOW_IMPORT = """
import runpy, sys, time
class Slow:
    def find_spec(self, name, *rest):
        if name == "engine.errors":
            print("importing", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
door, sys.argv = sys.argv[1], sys.argv[1:]
runpy.run_module(door, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("door", "name", "arguments"),
    [
        ("entrypoints.serve", "engine-serve", ["--port", "0"]),
        ("entrypoints.chat", "engine-chat", []),
        ("entrypoints.batch", "engine-batch", ["run", "-i", "none", "-o", "none"]),
        ("entrypoints.bench.cli", "engine-bench", ["latency"]),
    ],
)
def test_an_interrupt_during_imports_is_one_line(door: str, name: str, arguments: list[str]) -> None:
    command = [sys.executable, "-c", SLOW_IMPORT, door, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HANG_GUARD_S)
    assert (process.returncode, errors) == (130, f"{name}: interrupted\n")


class Model(ThreadingHTTPServer):
    """Streams "one " to the first message of a conversation and then nothing more; answers later ones."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.stalls = True
        self.key: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Model

    def log_message(self, *args: object) -> None:
        pass

    def _begin(self, kind: str) -> None:
        self.server.paths.append(self.path)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def do_GET(self) -> None:
        if self.server.key is not None and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "who are you"}}')
            return
        self._begin("application/json")
        self.wfile.write(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self._begin("text/event-stream")
        first = self.server.stalls and len(body["messages"]) == 1
        piece = {"choices": [{"index": 0, "delta": {"content": "one " if first else "whole"}}]}
        self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
        if first:
            select.select([self.connection], [], [], HANG_GUARD_S)  # until whoever asked is gone
            self.server.left.set()
        else:
            self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def model() -> Iterator[Model]:
    with Model() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()


class Terminal:
    """What a program wrote to its terminal so far, and what is typed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.text = ""

    def expect(self, wanted: str) -> None:
        """Reads on until what came since the last call ends so."""
        seen, deadline = "", time.monotonic() + HANG_GUARD_S
        while not seen.endswith(wanted):
            ready = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"{wanted!r} did not come: {self.text + seen!r}"
            seen += os.read(self._fd, 4096).decode().replace("\r\n", "\n")
        self.text += seen

    def type(self, line: str) -> None:
        os.write(self._fd, line.encode())


def test_an_interrupt_ends_the_answer_and_one_at_the_prompt_the_program(model: Model) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "entrypoints.chat", "--url", model.url]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    terminal = Terminal(ours)
    try:
        terminal.expect("> ")
        terminal.type("hi\n")
        terminal.expect("one ")
        process.send_signal(signal.SIGINT)
        terminal.expect("\n> ")
        assert model.left.wait(HANG_GUARD_S)
        terminal.type("again\n")
        terminal.expect("whole\n> ")
        deadline = time.monotonic() + HANG_GUARD_S
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)  # one that comes between the prompt and the read behind it is lost
            time.sleep(0.3)
        assert process.poll() == 130
        assert "Traceback" not in terminal.text
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert [(m["role"], m["content"]) for m in model.bodies[1]["messages"]] == [
        ("user", "hi"),
        ("assistant", "one "),
        ("user", "again"),
    ]


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_piped_output_is_the_answers_alone_and_a_url_may_end_in_v1(
    ending: str, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.stalls = False
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n\nsecond\n"))
    assert chat.main(["--url", model.url + ending]) == 0
    assert capsys.readouterr() == ("whole\nwhole\n", "")
    assert model.paths == ["/v1/models", "/v1/chat/completions", "/v1/chat/completions"]


def test_a_url_where_no_such_server_answers_is_one_line(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("http://[::1", "127.0.0.1:1", "http://127.0.0.1:1"):
        assert chat.main(["--url", url, "--quick", "x"]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_a_server_with_a_key_says_what_is_missing(
    model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.key, model.stalls = "secret", False
    monkeypatch.delenv("PAGELOOM_API_KEY", raising=False)
    assert chat.main(["--url", model.url, "--quick", "x"]) == 1
    told = capsys.readouterr().err
    assert "HTTP 401: who are you" in told and "--api-key" in told and "PAGELOOM_API_KEY" in told
    assert chat.main(["--url", model.url, "--quick", "x", "--api-key", "secret"]) == 0


def test_a_second_interrupt_ends_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the first one's answer is still being ended."""

    @asynccontextmanager
    async def stubborn(options: object) -> AsyncGenerator[chat.Reply, None]:
        async def reply(messages: chat.Messages) -> AsyncGenerator[str, None]:
            interrupt = (os.kill, os.getpid(), signal.SIGINT)
            yield "a"
            try:
                asyncio.get_running_loop().call_soon(*interrupt)
                await asyncio.sleep(HANG_GUARD_S)
            finally:
                asyncio.get_running_loop().call_soon(*interrupt)
                await asyncio.sleep(HANG_GUARD_S)

        yield reply

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(chat, "_remote", stubborn)
        monkeypatch.setattr(sys, "stdin", io.StringIO("first\nsecond\n"))
        assert chat.main(["--url", "http://x"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ("a", "engine-chat: interrupted\n")
