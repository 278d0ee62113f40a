"""The server as a process: its ready line, its end by signals, a taken port, a core that dies."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

PROGRAM = Path(__file__).with_name("scripted_server.py")


@contextlib.contextmanager
def process(model: Path, *settings: str, ready: bool = True) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """(process, base URL, lines of its log so far) of a server that is ready, or that has begun to start."""
    command = [sys.executable, str(PROGRAM), str(model), "0", *settings]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    try:
        assert server.stdout is not None and server.stderr is not None
        port = server.stdout.readline().split()[-1]
        stderr = server.stderr
        threading.Thread(target=lambda: log.extend(stderr), daemon=True).start()
        deadline = time.monotonic() + 60
        while ready:
            assert server.poll() is None and time.monotonic() < deadline, log
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/ready", timeout=2).raise_for_status()
                break
            time.sleep(0.05)
        yield server, f"http://127.0.0.1:{port}", log
    finally:
        server.kill()
        server.wait()


def wait_for_line(log: list[str], text: str) -> None:
    """A thread reads the log: the process may have ended before its last lines are here."""
    deadline = time.monotonic() + 60
    while not any(text in line for line in log):
        assert time.monotonic() < deadline, log
        time.sleep(0.01)


def stream_lines(reply: httpx.Response) -> list[str]:
    return [line for line in reply.iter_lines() if line]


STREAM = {"prompt": "x", "max_tokens": 50, "stream": True}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_running_requests_with_an_error_and_the_process_with_0(
    tiny_server_model: Path, number: int
) -> None:
    """At once where nothing shall be waited for, or where a second signal says so."""
    timeout = "0" if number == signal.SIGTERM else "1000"
    with process(tiny_server_model, "stall_at=2", f"--shutdown-timeout={timeout}") as (server, base, log):
        with httpx.stream("POST", f"{base}/v1/completions", json=STREAM, timeout=60) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            server.send_signal(number)
            if number == signal.SIGINT:
                wait_for_line(log, "shutting down")
                server.send_signal(number)
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert server.wait(timeout=60) == 0, log
        assert not any("Traceback" in line for line in log), log


def test_sighup_reads_the_keys_again_and_a_change_is_seen_without_it(tiny_server_model: Path, tmp_path: Path) -> None:
    def write(*names: str) -> None:
        (tmp_path / "new").write_text(
            "".join(
                f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n' for name in names
            )
        )
        (tmp_path / "new").rename(tmp_path / "keys.toml")

    def status(key: str) -> int:
        return httpx.get(f"{base}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

    write("one")
    with process(tiny_server_model, f"--keys={tmp_path / 'keys.toml'}") as (server, base, log):
        assert (status("one"), status("two")) == (200, 401)
        server.send_signal(signal.SIGHUP)
        wait_for_line(log, "1 keys were read")
        write("one", "two")
        wait_for_line(log, "2 keys were read")
        assert (status("one"), status("two")) == (200, 200)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0


def test_running_requests_go_on_after_sigterm_and_the_server_ends_with_the_last(tiny_server_model: Path) -> None:
    with process(tiny_server_model, "step_s=0.03", "--shutdown-timeout=1000") as (server, base, log):
        idle = httpx.Client(base_url=base)
        assert idle.get("/live").status_code == 200  # a connection that is kept open holds nothing up
        with httpx.stream("POST", f"{base}/v1/completions", json=STREAM, timeout=60) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            server.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait(timeout=60) == 0, log
        wait_for_line(log, "1 running requests")


def test_until_the_delay_is_over_requests_are_taken_and_ready_says_no(tiny_server_model: Path) -> None:
    with process(tiny_server_model, "--drain-delay=1000") as (server, base, log):
        before = httpx.get(f"{base}/ready")
        assert before.status_code == 200 and "connection" not in before.headers
        server.send_signal(signal.SIGTERM)
        wait_for_line(log, "shutting down in 1000 s")
        refused = httpx.get(f"{base}/ready")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert httpx.get(f"{base}/health").status_code == 200
        answer = httpx.post(f"{base}/v1/completions", json={"prompt": "x", "max_tokens": 3}, timeout=60)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
        assert answer.headers["connection"] == "close"  # a pool asks elsewhere from now on
        server.send_signal(signal.SIGTERM)  # again: nothing is waited for
        assert server.wait(timeout=60) == 0, log
    with process(tiny_server_model, "--drain-delay=0.2") as (server, base, log):
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0, log
    with process(tiny_server_model, "--drain-delay=1000", "die_at=1") as (server, base, log):
        server.send_signal(signal.SIGTERM)
        wait_for_line(log, "shutting down in 1000 s")
        assert httpx.post(f"{base}/v1/completions", json={"prompt": "x"}, timeout=20).status_code == 500
        assert server.wait(timeout=60) == 1, log  # nobody is left who could answer


def test_sigterm_waits_for_no_thread_that_tokenizes(tiny_server_model: Path) -> None:
    with process(tiny_server_model, "tokenize_s=1000", "--shutdown-timeout=1000") as (server, base, log):
        answers: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{base}/v1/completions", json={"prompt": "x"}, timeout=60))
        )
        asking.start()
        assert server.stdout is not None and server.stdout.readline() == "tokenizing\n"
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0, log
        asking.join()
        assert answers[0].status_code in (500, 503) and answers[0].json()["error"]["code"] != "internal_error"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads_ends_the_process(tiny_server_model: Path, number: int) -> None:
    with process(tiny_server_model, "start_s=1000", ready=False) as (server, _, log):
        time.sleep(0.5)  # somewhere in imports, in the configuration or in the core's start
        server.send_signal(number)
        assert server.wait(timeout=60) in (128 + number, -number), log


def test_a_core_that_dies_ends_the_process_with_its_cause(tiny_server_model: Path) -> None:
    with process(tiny_server_model, "die_at=1") as (server, base, log):
        reply = httpx.post(f"{base}/v1/completions", json={"prompt": "x"}, timeout=20)
        assert reply.status_code == 500 and reply.json()["error"]["code"] == "engine_dead"
        assert server.wait(timeout=30) == 1
        wait_for_line(log, "the core was killed by the script")


def test_the_ready_line_says_what_is_served(tiny_server_model: Path) -> None:
    with process(tiny_server_model) as (_, base, log):
        ready = [line for line in log if "ready:" in line]
        assert len(ready) == 1
        assert all(part in ready[0] for part in (base, "tiny", "256 tokens", "64 blocks of 16"))


def test_the_ready_line_of_an_encoder_tells_of_no_kv_cache(tiny_server_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "encoder"
    shutil.copytree(tiny_server_model, model)
    config = json.loads((model / "config.json").read_text())
    for name in ("head_dim", "num_key_value_heads"):
        config.pop(name, None)
    config |= {"architectures": ["BertModel"], "model_type": "bert"}
    (model / "config.json").write_text(json.dumps(config))
    with process(model) as (_, _, log):
        [ready] = [line for line in log if "ready:" in line]
        assert "no KV cache" in ready and "blocks" not in ready


def test_a_broken_connection_frees_its_request(tiny_server_model: Path) -> None:
    """Over real TCP: the socket closes, the engine's gauge of unfinished requests returns to none."""
    with process(tiny_server_model, "stall_at=0") as (_, base, _log):
        host, port = base.removeprefix("http://").split(":")
        body = b'{"prompt": "x", "max_tokens": 50}'
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            time.sleep(0.3)
        deadline = time.monotonic() + 30
        wanted = 'pageloom_request_success_total{finished_reason="abort",model_name="tiny"} 1.0'
        while wanted not in httpx.get(f"{base}/metrics", timeout=5).text:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_taken_port_is_told_before_the_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from entrypoints.serve import main

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main([str(tmp_path / "no-model"), "--port", str(taken.getsockname()[1])]) == 1
    assert "in use" in caplog.text + capsys.readouterr().err


def test_sockets_send_tokens_without_waiting_for_acknowledgements() -> None:
    """asyncio sets TCP_NODELAY only on sockets that name their protocol."""
    from entrypoints.server.run import listen

    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_https_under_a_proxys_path(tiny_server_model: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, *names]
    subprocess.run(made, check=True, capture_output=True)
    options = [f"--ssl-keyfile={key}", f"--ssl-certfile={certificate}", "--root-path=llm/"]
    with process(tiny_server_model, *options, ready=False) as (_, base, log):
        deadline = time.monotonic() + 180
        while not any("ready:" in line for line in log):
            assert time.monotonic() < deadline, log
            time.sleep(0.05)
        secure = base.replace("http:", "https:")
        assert any(secure in line for line in log)
        with httpx.Client(verify=ssl.create_default_context(cafile=certificate), timeout=20) as client:
            for path in ("/llm/v1/completions", "/v1/completions"):
                with client.stream("POST", f"{secure}{path}", json=STREAM) as reply:
                    assert stream_lines(reply)[-1] == "data: [DONE]"
