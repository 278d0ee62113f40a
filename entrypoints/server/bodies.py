"""JSON bodies, bounded before they are parsed: their bytes while they arrive, then values and nesting.

Parsers hold the interpreter's lock, so a thread alone keeps no other stream alive while one works: what bounds a stall
is `json_values` (a million take some 50 ms). A body that is long all the same is counted and parsed in a thread, one at
a time, so that what Python does between the parser's calls does not add up on the event loop.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Callable, Coroutine, Iterator
from json import JSONDecodeError
from typing import Any, NoReturn, Protocol, TypeAlias

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from engine.limits import Limits, about
from entrypoints.server.error_shape import error_body

IN_PLACE_BYTES = 64 * 1024
"""parsed on the event loop, in less than handing it to a thread would take"""
BOM = b"\xef\xbb\xbf"

# An unterminated string counts as one too: looking for its end again from every quote within would take for ever.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\Z)', re.DOTALL)
_CONTAINERS = (dict, list)
_HALF = "half of a surrogate pair (\\ud800 to \\udfff) is no character"
_TOO_LARGE = "the number is too large: at most 1.7e308"
_SHOWN_DEPTH = 16
_Way: TypeAlias = "tuple[_Way, object] | None"
"""to a value: what holds it, and its key there; no list of keys each, which a deep body would make large"""


class Holder(Protocol):
    """Whose body it is."""

    def discard(self) -> None:
        """It gives way to others."""


class Bodies:
    """All bodies that are arriving or being parsed."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._parsing = asyncio.Lock()
        self._held: dict[Holder, int] = {}
        self._total = 0
        self._evicted: set[Holder] = set()

    async def decode(self, request: Holder, raw: bytes) -> Any:
        """In a thread, when it is its turn. Raises as `decode` does, and as `add`."""
        try:
            self.add(request, len(raw))
            async with self._parsing:
                self.add(request, 0)
                return await asyncio.to_thread(decode, raw, self.limits)
        finally:
            self.drop(request)

    def add(self, request: Holder, size: int) -> None:
        """`size` bytes more of it have come. Raises the answer to a body that must give way to others, the longest."""
        self._held[request] = self._held.get(request, 0) + size
        self._total += size
        while self._total > self.limits.bodies_bytes:
            longest = max(self._held, key=self._held.__getitem__)
            self.drop(longest)
            longest.discard()
            self._evicted.add(longest)
        if request in self._evicted:
            self._evicted.discard(request)
            raise _refusal(self.limits, "bodies_bytes")

    def drop(self, request: Holder) -> None:
        self._total -= self._held.pop(request, 0)
        self._evicted.discard(request)


class BoundedRequest(Request):
    """What FastAPI reads a body from. Raises `HTTPException` with the error's body, since FastAPI hides all else."""

    def __init__(self, scope: Any, receive: Any, bodies: Bodies) -> None:
        super().__init__(scope, receive)
        self._bodies = bodies
        self._pieces = bytearray()

    def discard(self) -> None:
        self._pieces = bytearray()

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = await self._read()
        return self._body

    async def json(self) -> Any:
        """Raises `JSONDecodeError`, which FastAPI expects, for what is not JSON."""
        raw = await self.body()
        if len(raw) <= IN_PLACE_BYTES:
            return decode(raw, self._bodies.limits)
        try:
            return await self._bodies.decode(self, raw)
        finally:
            self._body = b""  # the parsed one takes its place

    async def _read(self) -> bytes:
        limits = self._bodies.limits
        announced = self.headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > limits.body_bytes:
            raise _refusal(limits, "body_bytes", int(announced[:20]))
        read = 0
        try:
            async for piece in self.stream():
                read += len(piece)
                if read > limits.body_bytes:
                    raise _refusal(limits, "body_bytes")
                self._pieces += piece
                self._bodies.add(self, len(piece))
            return bytes(self._pieces)
        finally:
            self._bodies.drop(self)
            self.discard()


def bounded_route(bodies: Bodies) -> type[APIRoute]:
    """Routes whose bodies are bounded, all together too."""

    class BoundedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def bounded(request: Request) -> Response:
                return await handle(BoundedRequest(request.scope, request.receive, bodies))

            return bounded

    return BoundedRoute


def decode(raw: bytes, limits: Limits) -> Any:
    """Raises `HTTPException` (400) for what exceeds a limit, and for text that is not Unicode and numbers that are too
    large, naming the field, and `JSONDecodeError` for what is not JSON."""
    if _marks(raw) > limits.json_values and values_in(raw, limits.json_values) > limits.json_values:
        raise _refusal(limits, "json_values")
    try:
        value = msgspec.json.decode(raw.removeprefix(BOM))
    except RecursionError:
        raise _refusal(limits, "json_depth") from None
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        _refuse_value(raw, error)
    if raw.count(b"[") + raw.count(b"{") > limits.json_depth and _is_deeper(value, limits.json_depth):
        raise _refusal(limits, "json_depth")
    return value


def _marks(raw: bytes, start: int = 0, end: int | None = None) -> int:
    """Of values: their commas, and the brackets before the first of a list or an object."""
    return sum(raw.count(mark, start, end) for mark in (b",", b"[", b"{"))


def values_in(raw: bytes, limit: float = math.inf) -> int:
    """Their marks outside of strings; not counted further than past `limit`."""
    marks = position = 0
    for string in _STRING.finditer(raw):
        marks += _marks(raw, position, string.start())
        position = string.end()
        if marks > limit:
            return marks
    return marks + _marks(raw, position)


def _is_deeper(value: object, limit: int) -> bool:
    level = [value] if isinstance(value, _CONTAINERS) else []
    for _ in range(limit):
        if not level:
            return False
        level = [child for node in level for _, child in _children(node) if isinstance(child, _CONTAINERS)]
    return bool(level)


def _children(node: object) -> Iterator[tuple[object, object]]:
    if isinstance(node, dict):
        yield from node.items()
    elif isinstance(node, list):
        yield from enumerate(node)


def _refuse_value(raw: bytes, error: Exception) -> NoReturn:
    """msgspec decodes no half of a surrogate pair and no number that a float does not hold, and does not say where it
    is: the lenient parser and a walk do. What is not UTF-8 its releases tell by different errors."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        raise _bad_value("the body is not UTF-8", None) from error
    try:
        value = json.loads(raw, parse_int=_integer, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        value = None
    fault = _first_fault(value)
    if fault is None:
        raise JSONDecodeError(str(error), "", 0)
    path, why = fault
    top = str(path[0]) if path else None
    raise _bad_value(f"{_written(path) or 'the body'}: {why}", top)


def _integer(text: str) -> float:
    """Python refuses to read one of some thousand digits."""
    try:
        return int(text)
    except ValueError:
        return math.inf


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _first_fault(value: object) -> tuple[list[object], str] | None:
    """Where it is, and what."""
    stack: list[tuple[_Way, object]] = [(None, value)]
    while stack:
        way, node = stack.pop()
        if isinstance(node, str) and not _encodes(node):
            return _path(way), _HALF
        if isinstance(node, float) and math.isinf(node):
            return _path(way), _TOO_LARGE
        for key, child in _children(node):
            if isinstance(key, str) and not _encodes(key):
                return _path(way), _HALF
            if isinstance(child, (str, float, *_CONTAINERS)):
                stack.append(((way, key), child))
    return None


def _path(way: _Way) -> list[object]:
    path: list[object] = []
    while way is not None:
        way, key = way
        path.append(key)
    return path[::-1]


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _written(path: list[object]) -> str:
    """messages[0].content"""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts[:_SHOWN_DEPTH]).removeprefix(".") + "…" * (len(parts) > _SHOWN_DEPTH)


def _bad_value(message: str, param: str | None) -> HTTPException:
    return HTTPException(400, error_body(message, "invalid_request_error", param))


def _refusal(limits: Limits, name: str, value: float | None = None) -> HTTPException:
    status = about(name).status
    kind = "invalid_request_error" if status < 500 else "server_overloaded"
    headers = {"Retry-After": "1"} if status == 503 else None
    return HTTPException(status, error_body(limits.message(name, value), kind), headers)
