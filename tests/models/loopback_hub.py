"""A Hugging Face hub on loopback: what `huggingface_hub` asks of one, for folders as repositories.

`breaks`: how often a file's transfer ends half-way. `requests` tells what was asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FETCH = """
import sys
from engine.errors import ConfigError
from engine.hub import fetched, hub_name
model, memory, revision, quantization = sys.argv[1:]
try:
    print(fetched(hub_name(model), revision=revision or None, cache_dir=None,
                  memory_bytes=int(memory) if memory else None, quantization=quantization or None))
except ConfigError as error:
    print("REFUSED", error)
"""


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.breaks = 0
        self.gated = False
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(f"{self.command} {path}")
        if self.server.gated:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path.startswith("api/models/"):
            self._about(path.removeprefix("api/models/"))
        else:
            repo, _, rest = path.partition("/resolve/")
            revision, _, name = rest.partition("/")
            file = self.server.root / repo / name
            if revision not in ("main", COMMIT) or not file.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            else:
                self._file(file, with_body)

    def _about(self, path: str) -> None:
        repo, kind, revision = path, "", "main"
        for word in ("/tree/", "/revision/"):
            if word in path:
                repo, _, revision = path.partition(word)
                kind = word
        folder = self.server.root / repo
        if not folder.is_dir():
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        names = [(str(file.relative_to(folder)), file.stat().st_size, _etag(file)) for file in files]
        if kind == "/tree/":
            found: object = [{"type": "file", "path": name, "size": size, "oid": oid} for name, size, oid in names]
        else:
            siblings = [{"rfilename": name, "size": size, "blobId": oid} for name, size, oid in names]
            found = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "private": False, "gated": False}
        return self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def _file(self, file: Path, with_body: bool) -> None:
        content = file.read_bytes()
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        breaks = with_body and self.server.breaks > 0 and file.suffix in (".safetensors", ".gguf")
        if breaks:
            self.server.breaks -= 1
        self._send(206 if first else 200, content[first:], headers, with_body=with_body, breaks=breaks)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True, breaks: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if breaks else body)
            if breaks:
                self.close_connection = True


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serving_hub(root: Path) -> Iterator[Hub]:
    hub = Hub(root)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


class Home:
    """A user's machine: what it has fetched stays from one run to the next."""

    def __init__(self, hub: Hub, place: Path) -> None:
        self.hub, self.place = hub, place

    def run(self, script: str, *arguments: str, **more: str) -> str:
        environment = {**os.environ, "HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.place), **more}
        environment.pop("HF_TOKEN", None)
        command = [sys.executable, "-c", script, *arguments]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def fetch(self, model: str, memory: int | None = 1 << 40, revision: str = "", quant: str = "", **more: str) -> str:
        return self.run(FETCH, model, "" if memory is None else str(memory), revision, quant, **more)
