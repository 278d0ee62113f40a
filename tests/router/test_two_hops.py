"""The proxy before servers that compute prompts and servers that decode."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from functools import partial
from typing import Any

import httpx
import pytest
from fake_servers import FakeServer
from served import BODY, Served, until

from entrypoints.router import app, passing, servers
from entrypoints.router.servers import Server, Servers, Watch
from entrypoints.serve import main


def test_a_connection_that_is_reset_while_it_is_made_is_a_server_that_was_lost(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = httpx.AsyncHTTPTransport.handle_async_request

    async def reset(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        if request.method == "POST" and str(request.url).startswith(served.prefill.url):
            raise AttributeError("'NoneType' object has no attribute 'getpeername'")  # as anyio does
        return await real(transport, request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", reset)
    assert served.post(BODY).status_code == 200
    assert not served.prefill.asked and len(served.decoded) == 1


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_a_connection_that_breaks_after_it_was_written_to_may_have_done_it(
    served: Served, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Whatever the error is: it is not asked of another server."""
    real = httpx.AsyncHTTPTransport.handle_async_request
    more = FakeServer()
    served.router.prefill.all.append(Server(more.url))
    broken = (served.prefill, more) if which == "prefill" else (served.decode, served.other)

    async def breaks(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        answer = await real(transport, request)
        if request.method == "POST" and str(request.url).startswith(tuple(each.url for each in broken)):
            await answer.aclose()
            raise AttributeError("'NoneType' object has no attribute 'getpeername'")
        return answer

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", breaks)
    assert served.post(BODY).status_code == (200 if which == "prefill" else 502)
    assert len(served.prefill.asked + more.asked) == len(served.decoded) == 1
    more.close()


def test_who_is_reset_while_its_health_is_asked_does_not_live() -> None:
    def reset(_: httpx.Request) -> httpx.Response:
        raise AttributeError("'NoneType' object has no attribute 'getpeername'")

    async def look(server: Server) -> None:
        async with app._Client(transport=httpx.MockTransport(reset)) as client:
            await Watch(Servers([]), Servers([]), client)._look_at(server)

    server = Server("http://a")
    asyncio.run(look(server))
    assert not server.lives


def test_a_request_goes_over_two_servers_with_what_the_first_hands_over(served: Served) -> None:
    headers = {"authorization": "Bearer key", "x-request-id": "mine"}
    assert served.post(BODY, headers=headers).json()["text"] == "answer"
    (first,), (second,) = served.prefill.asked, served.decoded
    assert first["kv_transfer_params"]["do_remote_decode"] and (first["max_tokens"], first["stream"]) == (1, False)
    assert "n" not in first and first["prompt"] == "a b c" and first["temperature"] == 0.5
    handed = {"do_remote_prefill": True, "remote_request_id": "1.x", "proxys_own": 3}
    assert second == {**BODY, "kv_transfer_params": handed}, "all of it, whatever is in it"
    for told in (served.prefill.headers, served.decode.headers + served.other.headers):
        assert (told[0]["authorization"], told[0]["x-request-id"]) == ("Bearer key", "mine")


def test_what_has_one_token_is_answered_by_who_computes_the_prompt(served: Served) -> None:
    one = {**BODY, "max_tokens": 1}
    assert served.post(one).json()["text"] == "answer"
    assert served.prefill.asked == [one] and not served.decoded
    served.prefill.mode = "busy"
    assert served.post(one).json()["text"] == "answer"
    assert served.decoded == [one], "it had no room"
    served.prefill.mode = "well"
    assert served.post({**BODY, "max_completion_tokens": 1}).status_code == 200
    assert (served.router.two_hops, served.router.one_hop) == (1, 2)


def test_a_form_with_a_file_passes_unchanged(served: Served) -> None:
    file = b"\x00\x7f{[" * 300
    sent = httpx.Request(
        "POST", f"{served.url}/v1/audio/transcriptions", files={"file": ("a.wav", file)}, data={"a": "b"}
    )
    with httpx.Client(timeout=20) as client:
        assert client.send(sent).status_code == 200
    assert served.decoded == [{"form": sent.read().decode()}] and file.decode() in served.decoded[0]["form"]


def test_streams_pass_as_they_come_and_who_leaves_ends_them(served: Served) -> None:
    served.decode.mode = served.other.mode = "slow"
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json={"messages": [], "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        parts = answer.iter_raw()
        assert next(parts) == b"data: 0\n\n"
    deadline = time.monotonic() + 10
    while not (served.decode.broken.is_set() or served.other.broken.is_set()):
        assert time.monotonic() < deadline, "the server still writes"
        time.sleep(0.02)
    assert all(
        server.prompt_tokens == 0 for servers in (served.router.decode, served.router.prefill) for server in servers.all
    )


@pytest.mark.parametrize(
    ("mode", "failures"), [("fails", 1), ("refuses", 0), ("leaves", 1), ("nothing", 0), ("gone", 1), ("busy", 1)]
)
def test_what_the_first_server_cannot_do_the_second_does_alone(served: Served, mode: str, failures: int) -> None:
    """What is wrong with the request is no failure of the server."""
    served.prefill.mode = mode
    if mode == "gone":
        served.prefill.close()
    assert served.post(BODY).json()["text"] == "answer"
    assert served.decoded == [BODY]
    assert (served.router.two_hops, served.router.one_hop) == (0, 1)
    assert served.router.prefill_failures == failures
    if mode == "gone":
        served.prefill = FakeServer()


@pytest.mark.parametrize(
    "path, more",
    [
        ("/v1/responses", {}),
        ("/v1/messages", {}),
        ("/v1/completions", {"echo": True}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", {"prompt_logprobs": 1}),
        ("/v1/completions", {"kv_transfer_params": None, "echo": True}),
    ],
)
def test_what_gains_nothing_goes_to_one_server_as_it_is(served: Served, path: str, more: dict[str, Any]) -> None:
    assert served.post({**BODY, **more}, path).status_code == 200
    assert served.decoded == [{**BODY, **more}] and not served.prefill.asked


SOURCE = b'{"prompt": "x", "kv_transfer_params": {"do_remote_prefill": true, "remote_host": "10.0.0.9"}'


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", SOURCE + b"}"),
        ("/v1/completions", SOURCE + b', "echo": true}'),
        ("/v1/chat%2Fcompletions", SOURCE + b"}"),
        ("/v1/responses", SOURCE + b"}"),
        ("/x/%2e%2e/v1/completions", SOURCE + b"}"),
        ("/v1/completions", SOURCE + b', "more": "\xff"}'),
        ("/v1/completions", SOURCE + b', "more": ' + b"[" * 4000 + b"]" * 4000 + b"}"),
    ],
)
def test_a_client_does_not_say_where_a_decode_server_connects_to(served: Served, path: str, body: bytes) -> None:
    assert httpx.post(served.url + path, content=body, timeout=20).status_code == 400
    assert not served.decoded and not served.prefill.asked


def test_a_body_is_looked_into_whatever_its_type_is_said_to_be(served: Served) -> None:
    """Servers read some routes' bodies as JSON all the same."""
    for kind in ("multipart/form-data; boundary=x", "text/plain", "application/octet-stream"):
        headers = {"content-type": kind}
        refused = httpx.post(f"{served.url}/api/chat", content=SOURCE + b"}", headers=headers, timeout=20)
        assert refused.status_code == 400 and "kv_transfer_params" in refused.text
    assert not served.decoded


@pytest.mark.parametrize("path", ["/v1/./completions", "/x/../v1/completions", "/x/%2E%2e/v1/completions", "/v1/%2e"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_path_that_a_server_could_read_otherwise_is_refused(served: Served, method: str, path: str) -> None:
    address = httpx.URL(served.url)
    body = b'{"prompt": "x"}'
    with socket.create_connection((address.host, address.port or 0), timeout=20) as raw:  # httpx would resolve it
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        assert b" 400 " in raw.makefile("rb").readline()
    assert not served.decoded and not served.prefill.asked


def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(served: Served) -> None:
    refused = httpx.post(f"{served.url}/v1/embeddings", content=b"[" + b"[]," * 2_000 + b"[]]", timeout=20)
    assert refused.status_code == 400 and "json_values" in refused.text
    assert not served.decoded and served.router.bodies._total == 0


@pytest.mark.parametrize("turns", range(4))
def test_an_answer_that_came_as_its_client_left_is_closed(turns: int) -> None:
    """Whichever of the two is seen first, and however deep the waiting is nested."""

    async def leave(turns: int) -> bool:
        answer = httpx.Response(200, stream=_Nothing())
        came: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()

        async def work() -> httpx.Response:
            return await came

        inner = passing.unless(asyncio.Event().wait(), work(), ValueError())
        outer = asyncio.ensure_future(passing.unless(asyncio.Event().wait(), inner, ValueError()))
        await asyncio.sleep(0.01)
        came.set_result(answer)
        for _ in range(turns):
            await asyncio.sleep(0)
        outer.cancel()
        done = await asyncio.gather(outer, return_exceptions=True)
        return answer.is_closed or done[0] is answer

    assert asyncio.run(leave(turns))


class _Nothing(httpx.AsyncByteStream):
    pass


@pytest.mark.parametrize("path", ["/v1/models/a%2Fb", "/v1/models/a%3Fb?c=%2F"])
def test_a_path_is_passed_on_as_it_was_written(served: Served, path: str) -> None:
    assert httpx.get(served.url + path, timeout=20).json() == {"path": path}


def test_a_decode_server_that_no_longer_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "CHECK_S", 0.1)
    served = Served()
    try:
        served.decode.mode = served.other.mode = "stopped"
        answer = served.post({**BODY, "echo": True})
        assert (answer.status_code, len(served.decoded)) in {(502, 1), (503, 0)}
    finally:
        served.close()


def test_nobody_waits_for_a_prefill_server_that_says_it_makes_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "CHECK_S", 0.1)
    served = Served()
    try:
        served.prefill.mode = "hangs"
        assert served.post(BODY).json()["text"] == "answer" and served.decoded == [BODY]
    finally:
        served.close()


def test_a_decode_server_that_is_gone_is_left_out(served: Served) -> None:
    served.decode.close()
    for _ in range(4):
        assert served.post(BODY).status_code == 200
    assert len(served.other.asked) == 4
    assert httpx.get(f"{served.url}/health").status_code == 200
    served.other.close()
    answer = served.post(BODY)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    assert httpx.get(f"{served.url}/health").status_code == 503
    metrics = httpx.get(f"{served.url}/metrics").text
    assert f'pageloom_router_server_up{{kind="decode",server="{served.other.url}"}} 0' in metrics
    served.decode, served.other = FakeServer(), FakeServer()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_what_a_server_may_have_done_is_not_asked_of_another(served: Served, path: str) -> None:
    """Nor what ends a server: each request has one of each kind at most."""
    more = FakeServer()
    served.router.prefill.all.append(Server(more.url))
    for each in (served.prefill, more, served.decode, served.other):
        each.mode = "leaves"
    assert served.post(BODY, path).status_code == 502
    assert len(served.decoded) == 1
    assert len(served.prefill.asked + more.asked) == (path == "/v1/completions")
    more.close()


def test_a_prefill_server_that_has_no_room_is_passed_over(served: Served) -> None:
    busy = FakeServer()
    busy.mode = "busy"
    served.router.prefill.all.insert(0, Server(busy.url))
    for _ in range(2):
        assert served.post(BODY).json()["text"] == "answer"
    assert len(served.prefill.asked) == served.router.two_hops == 2 and busy.asked
    busy.close()


def test_browsers_may_ask_what_they_may_send(served: Served) -> None:
    answer = httpx.options(f"{served.url}/v1/chat/completions", headers={"origin": "http://page"}, timeout=20)
    assert answer.headers["access-control-allow-origin"] == "http://page"


def test_bodies_are_bounded_together_and_the_longest_gives_way(served: Served) -> None:
    """Whether it still comes or a prompt of its is computed; what is answered does not count."""
    served.prefill.mode = "stopped"
    answers: list[int] = []

    def ask(size: int) -> None:
        answers.append(served.post({"prompt": "x" * size}).status_code)

    asking = [threading.Thread(target=ask, args=(size,)) for size in (9_500, 8_000)]
    for number, thread in enumerate(asking, 1):
        thread.start()
        until(partial(lambda number: len(served.prefill.asked) == number, number))
    third = threading.Thread(target=ask, args=(3_000,))
    third.start()
    until(lambda: answers == [503])
    assert served.router.bodies._total < 12_000
    served.prefill.goes_on.set()
    for thread in (*asking, third):
        thread.join()
    assert answers == [503, 200, 200]
    served.decode.mode = served.other.mode = "slow"
    body = {"prompt": "x" * 5_000, "stream": True, "echo": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=20) as answer:
        next(answer.iter_raw())
        assert served.router.bodies._total == 0


def test_errors_of_the_second_server_are_the_clients(served: Served) -> None:
    served.decode.mode = served.other.mode = "refuses"
    answer = served.post(BODY)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "refuses")
    assert served.post({"prompt": "x" * 20_000}).status_code == 413
    assert httpx.get(f"{served.url}/v1/models").json() == {"path": "/v1/models"}


def test_the_server_with_the_least_to_do_is_first() -> None:
    several = Servers(["http://a", "http://b", "http://c"])
    with several.all[0].answering(100), several.all[1].answering(10):
        assert [server.url for server in several.in_order()] == ["http://c", "http://b", "http://a"]
        several.all[2].failed()
        assert several.in_order()[0].url == "http://b"
    several.all[2].lives = True
    assert {several.in_order()[0].url for _ in range(3)} == {"http://a", "http://b", "http://c"}, "ties take turns"


ROUTER = ["--role", "router", "--prefill", "http://a", "--decode", "http://b"]


@pytest.mark.parametrize(
    "argv, reason",
    [
        (["--role", "router", "--prefill", "http://a"], "needs --decode URL, too"),
        (["--role", "router", "--decode", "http://a"], "needs --prefill URL, too"),
        (["--role", "router"], "needs --prefill URL and --decode URL, too"),
        (["--role", "router", "--prefill", "a", "--decode", "http://b"], "not a URL"),
        (["--role", "router", "--prefill", "http://a:x", "--decode", "http://b"], "not a URL"),
        (["--role", "router", "--prefill", "http://a:1", "--decode", "http://me:secret@b"], "not a URL"),
        ([*ROUTER, "--api-key", "k"], "no effect"),
        ([*ROUTER, "--tensor-parallel-size", "4"], "tensor-parallel-size has no effect with --role router: give it"),
        ([*ROUTER, "--root-path", "/x"], "--root-path has no effect"),
        (["--prefill", "http://a"], "no effect"),
        (["some/model", *ROUTER], "no model"),
        (["m", "--role", "prefill", "--kv-transfer-config", '{"kv_role": "kv_consumer"}'], "contradicts"),
    ],
)
def test_options_of_roles_without_effect_are_refused(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert reason in capsys.readouterr().err
