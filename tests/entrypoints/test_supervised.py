"""A server under a supervisor, at a Unix socket, and with a certificate that is renewed."""

from __future__ import annotations

import contextlib
import os
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
from test_server_process import PROGRAM, process, wait_for_line

from engine.errors import ConfigError
from entrypoints.server.run import listen_at, listening
from entrypoints.server.supervisor import Supervisor


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose name leaves room for a socket's: 107 bytes in all."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp", prefix="pl") as path:
        yield Path(path)


def test_systemd_is_told_ready_alive_and_stopping(
    tiny_server_model: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(short / "notify"))
        heard.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(short / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "3000000")
        with process(tiny_server_model) as (server, _, __):
            first = heard.recv(4096).decode().splitlines()
            assert first[0] == "READY=1" and f"MAINPID={server.pid}" in first and "STATUS=serves tiny" in first
            assert heard.recv(4096) == heard.recv(4096) == b"WATCHDOG=1"
            server.send_signal(signal.SIGTERM)
            while (last := heard.recv(4096)) == b"WATCHDOG=1":
                pass
            assert last == b"STOPPING=1"
            assert server.wait(timeout=60) == 0


def test_nobody_is_told_where_nobody_listens(short: Path) -> None:
    for environment in ({}, {"NOTIFY_SOCKET": str(short / "gone")}, {"NOTIFY_SOCKET": "@nobody-is-here"}):
        supervisor = Supervisor({**environment, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "7"}, 8)
        supervisor.ready("x")
        supervisor.stopping()
        assert not supervisor.watches, "another process is watched"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind("\0pageloom-test-" + str(os.getpid()))
        supervisor = Supervisor({"NOTIFY_SOCKET": f"@pageloom-test-{os.getpid()}", "WATCHDOG_USEC": "1"}, 8)
        supervisor.alive()
        assert heard.recv(100) == b"WATCHDOG=1" and supervisor.watches


def test_at_a_unix_socket(tiny_server_model: Path, short: Path) -> None:
    """Whole and streamed; what was left behind there is taken, a living server's and a file are not."""
    path = short / "socket"
    command = [sys.executable, str(PROGRAM), str(tiny_server_model), "0", f"--uds={path}"]
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    threading.Thread(target=lambda: log.extend(server.stderr or ()), daemon=True).start()
    try:
        wait_for_line(log, f"ready: unix:{path} serves tiny")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://any", timeout=20) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
            body = {"prompt": "x", "max_tokens": 4, "stream": True}
            assert client.post("/v1/completions", json=body).text.endswith("[DONE]\n\n")
        with pytest.raises(ConfigError, match="another server"):
            listen_at(path)
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0 and not path.exists()
    finally:
        server.kill()
        server.wait()
    path.write_text("mine")
    with pytest.raises(ConfigError, match=r"--uds.*no socket"):
        listen_at(path)
    assert path.read_text() == "mine"
    with pytest.raises(ConfigError, match="--uds"):
        listen_at(short / "nowhere" / "socket")


def test_the_path_of_a_server_that_still_loads_is_not_taken(short: Path) -> None:
    with listening("", 0, short / "socket"):
        with pytest.raises(ConfigError, match="another server"), listening("", 0, short / "socket"):
            pass
        assert (short / "socket").is_socket()
    assert not (short / "socket").exists()
    with listening("", 0, short / "socket") as again:
        assert again.getsockname() == str(short / "socket")


def _write_certificate(folder: Path, name: str) -> None:
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(folder / "new.key")]
    made += ["-out", str(folder / "new.crt"), "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(made, check=True, capture_output=True)
    for kind in ("key", "crt"):
        os.replace(folder / f"new.{kind}", folder / f"tls.{kind}")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_a_renewed_certificate_is_shown_to_new_connections_and_old_ones_go_on(
    tiny_server_model: Path, tmp_path: Path
) -> None:
    _write_certificate(tmp_path, "first")
    options = [f"--ssl-keyfile={tmp_path / 'tls.key'}", f"--ssl-certfile={tmp_path / 'tls.crt'}"]
    with process(tiny_server_model, *options, ready=False) as (server, base, log):
        wait_for_line(log, "ready: ")
        port = int(base.rpartition(":")[2])
        first = (tmp_path / "tls.crt").read_text()
        assert ssl.get_server_certificate(("127.0.0.1", port)).split() == first.split()
        with httpx.Client(verify=ssl.create_default_context(cafile=str(tmp_path / "tls.crt")), timeout=20) as client:
            assert client.get(f"https://127.0.0.1:{port}/ready").status_code == 200
            _write_certificate(tmp_path, "second")
            wait_for_line(log, "the certificate was read again")
            assert client.get(f"https://127.0.0.1:{port}/ready").status_code == 200
        second = (tmp_path / "tls.crt").read_text()
        assert second != first and ssl.get_server_certificate(("127.0.0.1", port)).split() == second.split()
        (tmp_path / "tls.key").write_text("damaged")
        server.send_signal(signal.SIGHUP)
        wait_for_line(log, "the ones before stay")
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                assert ssl.get_server_certificate(("127.0.0.1", port)).split() == second.split()
                break
            assert time.monotonic() < deadline
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0
