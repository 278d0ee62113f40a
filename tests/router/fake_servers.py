"""A prefill and a decode server without a model: small HTTP servers in threads that say what they were asked."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_STATUS = {"refuses": 400, "fails": 500, "busy": 503}


class FakeServer:
    """`mode`: "well"; "refuses", "fails" or is "busy", with a status; "leaves" in the middle of an answer; "nothing" is
    handed over; "slow": a part of a stream every 0.02 s; "breaks": in the middle of a stream's second part; "stopped":
    nothing is answered any more, its health neither; "hangs": its health says so."""

    def __init__(self, **moves: object) -> None:
        """`moves`: what its health says of pages."""
        self.mode, self.moves = "well", moves
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.broken = threading.Event()
        """a client has left in the middle"""
        self.goes_on = threading.Event()
        """who was "stopped" does"""
        handler = type("Handler", (_Handler,), {"outer": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.goes_on.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    outer: FakeServer
    protocol_version = "HTTP/1.1"

    log_message = lambda *given: None  # type: ignore[assignment]  # noqa: E731

    def do_GET(self) -> None:
        if self.outer.mode == "stopped":
            self.outer.goes_on.wait(60)
            self.close_connection = True
            return
        self._answer(503 if self.outer.mode == "hangs" else 200, {"path": self.path, **self.outer.moves})

    def do_OPTIONS(self) -> None:
        self.send_response(200)
        self.send_header("access-control-allow-origin", self.headers["origin"])
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["content-length"]))
        is_form = self.headers["content-type"].startswith("multipart/form-data")
        body = {"form": sent.decode()} if is_form else json.loads(sent)
        self.outer.asked.append(body)
        self.outer.headers.append({name.lower(): value for name, value in self.headers.items()})
        if self.outer.mode in ("stopped", "hangs"):
            self.outer.goes_on.wait(60)
            self.close_connection = True
        elif self.outer.mode in _STATUS:
            self._answer(_STATUS[self.outer.mode], {"error": {"message": self.outer.mode}})
        elif self.outer.mode == "leaves":
            self.close_connection = True
        elif body.get("stream"):
            self._stream()
        else:
            asked = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
            params = {"do_remote_prefill": True, "remote_request_id": "1.x", "proxys_own": 3}
            handed = params if asked and self.outer.mode != "nothing" else None
            self._answer(200, {"text": "answer", "kv_transfer_params": handed})

    def _stream(self) -> None:
        self.send_response(200)
        lines = self.path.startswith("/api/")
        self.send_header("content-type", "application/x-ndjson" if lines else "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for index in range(500 if self.outer.mode == "slow" else 3):
                data = f"{index}\n".encode() if lines else f"data: {index}\n\n".encode()
                if index == 1 and self.outer.mode == "breaks":
                    data = data[:-1] if lines else data[:3]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.flush()
                time.sleep(0.02)
                if index == 1 and self.outer.mode == "breaks":
                    self.close_connection = True
                    return
                if self.outer.mode == "stopped":
                    self.outer.goes_on.wait(60)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.outer.broken.set()

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(data)
