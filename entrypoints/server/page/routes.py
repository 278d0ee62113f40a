"""The page at `/` and its files, which are those of `files/` and no others. They hold no secret, so nobody needs the
key for them; what they show comes from routes that do."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from entrypoints.server.context import ServerContext
from entrypoints.server.page import board
from entrypoints.server.paths import route_path

FILES = Path(__file__).parent / "files"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""what is sent; licences and the like are only beside it"""
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""the last two: no script can make text into HTML, whatever a model writes"""
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Cache-Control": "no-cache",  # asked for again each time, and answered with 304
    "Vary": "Accept-Encoding",
}


class PageFile(msgspec.Struct, frozen=True):
    content: bytes
    zipped: bytes
    media_type: str
    tag: str

    def response(self, request: Request) -> Response:
        zips = "gzip" in request.headers.get("accept-encoding", "")
        tag = f'"{self.tag}{"-gzip" * zips}"'
        headers = {**HEADERS, "ETag": tag}
        known = request.headers.get("if-none-match", "")
        if tag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers=headers)
        if zips:
            headers["Content-Encoding"] = "gzip"
        return Response(self.zipped if zips else self.content, headers=headers, media_type=self.media_type)


def page_files() -> Mapping[str, PageFile]:
    """By path."""
    found = {}
    for file in sorted(FILES.rglob("*")):
        if file.suffix not in _TYPES:
            continue
        content, name = file.read_bytes(), file.relative_to(FILES).as_posix()
        tag = hashlib.sha256(content).hexdigest()[:32]
        path = "/" if name == _INDEX else f"/page/{name}"
        found[path] = PageFile(content, gzip.compress(content, mtime=0), _TYPES[file.suffix], tag)
    return found


def add_routes(app: FastAPI, context: ServerContext) -> frozenset[str]:
    """Returns the paths for which nobody needs a key."""
    files = page_files()

    async def send(request: Request) -> Response:
        return files[route_path(request.scope)].response(request)

    for path in files:
        app.add_route(path, send, methods=["GET"], include_in_schema=False)
    board.add_routes(app, context)
    return frozenset(files)
