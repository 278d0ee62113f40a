"""Bodies are bounded while they arrive and before they are parsed; a refusal names the field and the limit, and the
connection lives on."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fastapi import HTTPException
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scripted_server import Server
from sockets import GUARD_S, Door, post, serving

from engine.limits import Limits
from entrypoints.server import bodies
from entrypoints.server.app import create_app
from entrypoints.server.bodies import decode


def refusal(raw: bytes, limits: Limits | None = None) -> dict[str, Any]:
    with pytest.raises(HTTPException) as caught:
        decode(raw, limits or Limits())
    assert caught.value.status_code == 400
    detail: Any = caught.value.detail
    return dict(detail["error"])


@pytest.mark.parametrize(
    ("raw", "field", "where"),
    [
        (b'{"prompt": "\\ud83d"}', "prompt", "prompt:"),
        (b'{"prompt": "x\\ude00y"}', "prompt", "prompt:"),
        (b'{"prompt": "\\ude00\\ud83d"}', "prompt", "prompt:"),
        (b'{"messages": [{"role": "user", "content": "\\uD83D"}]}', "messages", "messages[0].content:"),
        (b'{"messages": [{"role": "\\ud800", "content": "x"}]}', "messages", "messages[0].role:"),
        (b'{"a": [1, {"\\udc00": 1}]}', "a", "a[1]:"),
        (b'{"\\udc00": 1}', None, "the body:"),
        (b'{"bad_words": ["a", "\\udbff"], "user": "\\\\ud800"}', "bad_words", "bad_words[1]:"),
        (b'{"prompt": "\xff"}', None, "not UTF-8"),
        (b'{"prompt": "\xed\xa0\xbd"}', None, "not UTF-8"),
    ],
)
def test_text_that_is_no_unicode_is_refused_where_it_stands(raw: bytes, field: str | None, where: str) -> None:
    error = refusal(raw)
    assert error["param"] == field and where in error["message"]


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"9" * 400 + b".5", b"9" * 5000])
def test_a_number_that_no_float_holds_is_refused_where_it_stands(number: bytes) -> None:
    for raw, field, where in (
        (b'{"temperature": %b}', "temperature", "temperature"),
        (b'{"seed": 1, "logit_bias": {"5": [0, %b]}}', "logit_bias", "logit_bias.5[1]"),
        (b"\xef\xbb\xbf%b", None, "the body"),
    ):
        error = refusal(raw % number)
        assert error["param"] == field and error["message"] == f"{where}: the number is too large: at most 1.7e308"
    for raw in (b'{"a": %b, "b": }', b'{"a": %b, "b": NaN}', b'{"a": %b, "b": Infinity}'):
        with pytest.raises(json.JSONDecodeError):
            decode(raw % number, Limits())


def test_where_a_number_stands_in_a_deep_body_takes_no_list_of_keys_for_each_other_one() -> None:
    raw = b"[" * 900 + b"1.5," * 50_000 + b"1e999" + b"]" * 900
    tracemalloc.start()
    try:
        error = refusal(raw)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error["message"] == "[0]" * 16 + "…: the number is too large: at most 1.7e308"
    assert most < 32 << 20


def test_pairs_and_escaped_backslashes_are_text() -> None:
    for raw in (
        b'{"a": "\\ud83d\\ude00"}',
        b'{"a": "\\\\ud83d"}',
        '{"a": "😀\\u0000"}'.encode(),
        b'\xef\xbb\xbf{"a": 1}',
    ):
        assert decode(raw, Limits()) == json.loads(raw.decode("utf-8-sig"))


@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_nesting_is_bounded_at_its_limit(brackets: tuple[str, str]) -> None:
    opening, closing = brackets
    each = sum(opening.count(b) for b in "[{")
    fits = 128 // each
    assert decode((opening * fits + "1" + closing * fits).encode(), Limits())
    for levels in (fits + 1, 600, 5000, 100_000):
        assert "json_depth" in refusal((opening * levels + "1" + closing * levels).encode())["message"]
    flat = "[" + ",".join([opening + "1" + closing] * 200) + "]"
    assert len(decode(flat.encode(), Limits())) == 200


@given(st.recursive(st.none() | st.integers(0, 9) | st.text('[]{},"\\😀', max_size=4), st.lists, max_leaves=40))
def test_values_and_levels_are_counted_as_they_are_and_not_within_strings(value: Any) -> None:
    def levels(node: Any) -> int:
        return 1 + max(map(levels, node), default=0) if isinstance(node, list) else 0

    def marks(node: Any) -> int:
        return 1 + max(0, len(node) - 1) + sum(map(marks, node)) if isinstance(node, list) else 0

    raw = json.dumps(value).encode()
    exact = Limits(json_values=max(1, marks(value)), json_depth=max(1, levels(value)))
    assert decode(raw, exact) == value
    if marks(value) > 1:
        assert "json_values" in refusal(raw, replace(exact, json_values=marks(value) - 1))["message"]
    if levels(value) > 1:
        assert "json_depth" in refusal(raw, replace(exact, json_depth=levels(value) - 1))["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"[" + b"1," * 3_000_000 + b"1]",
        b"[" + b"[]," * 3_000_000 + b"1]",
        b'["' + b'","' * 3_000_000 + b'"]',
        b'["' + b'\\"' * 3_000_000,
        b'{"a":"' + b"," * 3_000_000 + b'"' + b',"b":1' * 1_100_000 + b"}",
    ],
)
def test_a_body_of_too_many_values_is_not_built(raw: bytes) -> None:
    """Nor searched again from every quote within a string that has no end, which took minutes."""
    with pytest.raises((HTTPException, json.JSONDecodeError)):
        decode(raw, Limits(json_values=10_000))


def behind_sockets(
    server: Server, limits: Limits, scenario: Callable[[Door], Awaitable[None]], **app_options: Any
) -> None:
    async def go() -> None:
        async with server.client():
            config = replace(server.engine.config, limits=limits)
            server.engine._require().config = config
            app = create_app(server.engine, "tiny", **app_options)
            async with serving(app, limits) as door:
                await asyncio.wait_for(scenario(door), GUARD_S)

    asyncio.run(go())


BODIES = Limits(body_bytes=200_000, bodies_bytes=400_000, body_timeout_s=30)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
GOOD = post(b'{"prompt": "x", "max_tokens": 2}')


def test_a_body_past_its_limit_is_413_announced_or_not_and_the_connection_lives_on(server: Server) -> None:
    async def scenario(door: Door) -> None:
        caller = await door.connect(post(b'{"prompt": "' + b"x" * 200_000 + b'"}') + GOOD)
        status, headers, body = await caller.answer()
        assert status == 413 and "body_bytes=200000" in json.loads(body)["error"]["message"]
        assert headers[b"x-request-id"] and (await caller.answer())[0] == 200
        caller.send(CHUNKED + chunk(b'{"prompt": "'))
        for _ in range(100):
            caller.send(chunk(b"x" * 4000))
        assert (await caller.answer())[0] == 413
        caller.send(chunk(b"x" * 4000) + b"0\r\n\r\n" + GOOD)
        assert (await caller.answer())[0] == 200

    behind_sockets(server, BODIES, scenario)


def test_of_bodies_that_are_too_long_together_the_longest_gives_way(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    come, add = [0], bodies.Bodies.add

    def counted(self: bodies.Bodies, request: bodies.Holder, size: int) -> None:
        come[0] += size
        add(self, request, size)

    monkeypatch.setattr(bodies.Bodies, "add", counted)

    async def arrived(size: int) -> None:
        """In which order connections are read is nobody's promise: a longer one may come piece by piece."""
        while come[0] < size:
            await asyncio.sleep(0.005)

    async def scenario(door: Door) -> None:
        longest = await door.connect(CHUNKED + chunk(b'{"prompt": "' + b"x" * 150_000))
        others = [await door.connect(CHUNKED + chunk(b'{"prompt": "' + b"x" * 120_000)) for _ in range(2)]
        await arrived(390_000)
        last = await door.connect(CHUNKED + chunk(b'{"prompt": "' + b"x" * 110_000))
        await arrived(500_000)
        longest.send(chunk(b"x"))
        status, headers, body = await longest.answer()
        assert status == 503 and "bodies_bytes" in json.loads(body)["error"]["message"] and b"retry-after" in headers
        for caller in (*others, last):
            caller.send(chunk(b'"}') + b"0\r\n\r\n")
            status, _, body = await caller.answer()
            assert status in (200, 400), body
        caller.send(GOOD)
        assert (await caller.answer())[0] == 200

    behind_sockets(server, BODIES, scenario)


def test_a_refused_body_leaves_its_connection_alone(server: Server) -> None:
    deep = b'{"messages": [{"role": "user", "content": ' + b"[" * 600 + b"]" * 600 + b"}]}"
    bad = [
        (b'{"prompt": "\\ud83d"}', "prompt"),
        (b'{"prompt": ', None),
        (b'{"prompt": "\xff"}', None),
        (deep, None),
        (b"[" * 100_000, None),
        (b'{"prompt": "x", "seed": 1e999}', "seed"),
        (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", "seed"),
        (b'{"prompt": "x", "seed": Infinity}', None),
        (b'{"prompt": "x", "temperature": -1}', "temperature"),
    ]

    async def scenario(door: Door) -> None:
        caller = await door.connect()
        for body, field in bad:
            caller.send(post(body) + GOOD)
            status, headers, answer = await caller.answer()
            assert status == 400 and json.loads(answer)["error"]["param"] == field, answer
            assert b"connection" not in headers and headers[b"x-request-id"]
            assert (await caller.answer())[0] == 200

    behind_sockets(server, Limits(), scenario)


def test_a_body_longer_or_shorter_than_announced_harms_only_its_connection(server: Server) -> None:
    async def scenario(door: Door) -> None:
        other = await door.connect(GOOD)
        longer = await door.connect(GOOD + b"garbage \x00\r\n\r\n")  # before there was an answer
        shorter = await door.connect(GOOD[:-3])
        assert (await longer.answer())[0] == 400
        assert (await shorter.answer())[0] == 408
        assert (await other.answer())[0] == 200

    behind_sockets(server, Limits(body_timeout_s=0.3), scenario)


def test_long_bodies_are_parsed_beside_the_event_loop_one_at_a_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = b'{"prompt": [' + b"5," * 50_000 + b"5]}"
    running: list[int] = []

    def slow_decode(raw: bytes, limits: Limits) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        running.append(1)
        time.sleep(0.02)
        assert len(running) == 1
        running.pop()
        return decode(raw, limits)

    monkeypatch.setattr(bodies, "decode", slow_decode)

    async def scenario(door: Door) -> None:
        callers = [await door.connect(post(body)) for _ in range(4)]
        answers = [await caller.answer() for caller in callers]
        assert [(status, json.loads(body)["error"]["param"]) for status, _, body in answers] == [(400, "prompt")] * 4

    behind_sockets(server, Limits(), scenario)
