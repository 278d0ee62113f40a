"""Filling in the middle over HTTP: `suffix` of completions, and llama.cpp's /infill."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from scripted_server import COMPLETIONS, Server, parts, post_all, save_model
from test_closed_connections import leave_after
from test_openapi import ask as request_all
from test_openapi import check

from engine.frontend.fill_in import FillIn, Gap
from entrypoints.server.infill import InfillRequest

INFILL = "/infill"
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>")
ANSWER = "a = 1\nb"
GAP = {"input_prefix": "def f():\n", "input_suffix": "\n  return"}
WRITTEN = "<|fim_prefix|>def f():\n<|fim_suffix|>\n  return<|fim_middle|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("infill") / "tiny", special=MARKS)


def ask(model: Path, *bodies: dict[str, Any], answer: str = ANSWER, **script: Any) -> tuple[list[Any], Server]:
    server = Server(model)
    server.answer = answer
    vars(server.script).update(script)
    replies = post_all(server, *((INFILL, body) for body in bodies))
    assert [reply.status_code for reply in replies] == [200] * len(bodies), replies[-1].text
    return replies, server


def prompts_of(server: Server) -> list[str]:
    tokenizer = server.engine.tokenizer
    return [tokenizer.decode(added.prompt_token_ids, skip_special_tokens=False) for added in server.core.added]


def parts_of(body: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in parts(body)]


def test_a_completion_fills_the_gap_before_its_suffix(model: Path) -> None:
    server = Server(model)
    server.answer = ANSWER
    body = {"prompt": "def f():\n", "suffix": "\n  return", "max_tokens": 40}
    ids = {**body, "prompt": [server_id + 2 for server_id in range(3)]}
    plain, several, by_ids, empty = post_all(
        server,
        (COMPLETIONS, body),
        (COMPLETIONS, {**body, "prompt": ["x", "y"], "n": 2}),
        (COMPLETIONS, ids),
        (COMPLETIONS, {**body, "suffix": "", "echo": True}),
    )
    assert plain.json()["choices"][0]["text"] == ANSWER
    assert len(several.json()["choices"]) == 4 and by_ids.status_code == 200
    assert empty.json()["choices"][0]["text"] == "def f():\n" + ANSWER
    first, x, _, y, _, three, last = prompts_of(server)
    assert first == f"<s>{WRITTEN}" and last == "<s>def f():\n"
    for shown, before in ((x, "x"), (y, "y")):
        assert shown == f"<s><|fim_prefix|>{before}<|fim_suffix|>\n  return<|fim_middle|>"
    assert three.startswith("<s><|fim_prefix|>") and len(server.core.added[5].prompt_token_ids) == 4 + 3 + 9
    wanted = {server.engine.tokenizer.backend.token_to_id(mark) for mark in MARKS}
    assert wanted <= set(server.core.added[0].params.stop_token_ids)
    assert not wanted & set(server.core.added[-1].params.stop_token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_suffix_is_read_once_and_what_does_not_fit_costs_no_prompt(
    model: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, read = list[int](), list[str]()
    prompt, encode = FillIn.prompt, FillIn.encode_behind

    def counted_prompt(self: FillIn, gap: Gap, room: int | None = None) -> list[int]:
        made.append(1)
        return prompt(self, gap, room)

    async def counted_encode(self: FillIn, text: str, field: str) -> list[int]:
        read.append(text)
        return await encode(self, text, field)

    monkeypatch.setattr(FillIn, "prompt", counted_prompt)
    monkeypatch.setattr(FillIn, "encode_behind", counted_encode)
    server = Server(model)
    body = {"prompt": ["x"] * 5, "max_tokens": 1, "stream": stream}
    fits, long, together = post_all(
        server,
        (COMPLETIONS, {**body, "suffix": "y"}),
        (COMPLETIONS, {**body, "suffix": "y" * 300}),
        (COMPLETIONS, {**body, "suffix": "y" * 200, "prompt": ["x" * 100] * 5}),
    )
    assert fits.status_code == 200 and len(server.core.added) == 5 == len(made)
    assert read == ["y", "y" * 300, "y" * 200]
    for reply, param in ((long, "suffix"), (together, "prompt")):
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")


@pytest.mark.parametrize("special", [True, False])
def test_an_answer_ends_at_a_mark_which_is_not_shown(tmp_path: Path, special: bool) -> None:
    server = Server(save_model(tmp_path / "tiny", special=MARKS))
    server.answer = "ok<|file_sep|>other.py"
    if not special:  # as Qwen has them
        described = json.loads((tmp_path / "tiny" / "tokenizer.json").read_text())
        for token in described["added_tokens"]:
            token["special"] &= token["content"] not in MARKS
        (tmp_path / "tiny" / "tokenizer.json").write_text(json.dumps(described))
    whole, filled = post_all(
        server, (COMPLETIONS, {"prompt": "x", "suffix": "y", "max_tokens": 99}), (INFILL, {"n_predict": 99})
    )
    choice = whole.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ok", "stop")
    assert (filled.json()["content"], filled.json()["stop_type"]) == ("ok", "eos")


def test_infill_answers_as_llama_cpp_does(model: Path) -> None:
    body = {**GAP, "prompt": "  ", "n_predict": 50, "temperature": 0.5, "top_k": -1, "seed": -1, "samplers": ["top_k"]}
    (whole, stream), server = ask(model, body, body | {"stream": True}, cached_tokens=3)
    (*parts, end) = parts_of(stream.text)
    assert stream.headers["content-type"].startswith("text/event-stream")
    reply = whole.json()
    assert reply["content"] == ANSWER == "".join(part["content"] for part in parts)
    assert end["content"] == "" and end["stop"] and not any(part["stop"] for part in parts)
    prompt = f"<s>{WRITTEN.replace('<|fim_suffix|>', '  <|fim_suffix|>')}"
    assert prompts_of(server) == [prompt] * 2
    for one in (reply, end):
        took = one["timings"]
        assert (
            took["prompt_n"] + took["cache_n"] == one["tokens_evaluated"] == len(server.core.added[0].prompt_token_ids)
        )
        assert took["cache_n"] == one["tokens_cached"] == 3
        assert took["predicted_n"] == one["tokens_predicted"] == len(ANSWER) + 1
        assert took["prompt_ms"] > 0 and took["predicted_ms"] > 0
        assert took["predicted_per_token_ms"] * took["predicted_n"] == pytest.approx(took["predicted_ms"])
        assert took["predicted_n"] / took["predicted_per_second"] * 1e3 == pytest.approx(took["predicted_ms"])
        assert (one["stop"], one["stop_type"], one["truncated"], one["has_new_line"]) == (True, "eos", False, True)
        assert one["generation_settings"]["temperature"] == 0.5 and one["generation_settings"]["seed"] == -1
    assert server.core.added[0].params.temperature == 0.5 and server.core.added[0].max_tokens == 50


def test_why_it_ended(model: Path) -> None:
    (limit, word, none), server = ask(
        model, {"n_predict": 2}, {"stop": ["= 1"]}, {"n_predict": 0, "return_tokens": True}
    )
    assert (limit.json()["content"], limit.json()["stop_type"]) == ("a ", "limit")
    ended = word.json()
    assert (ended["content"], ended["stop_type"], ended["stopping_word"]) == ("a ", "word", "= 1")
    warmed = none.json()
    assert (warmed["content"], warmed["tokens"], warmed["tokens_predicted"]) == ("", [], 0)
    assert server.core.added[-1].max_tokens == 1


def test_only_the_fields_that_were_asked_for_are_sent(model: Path) -> None:
    wanted = ["content", "timings/prompt_n", "generation_settings/stop", "nothing/there", "content/x", "timings/a/b"]
    body = {"response_fields": wanted, "return_tokens": True}
    (whole, stream), server = ask(model, body, body | {"stream": True})
    evaluated = len(server.core.added[0].prompt_token_ids)
    assert whole.json() == {"content": ANSWER, "timings/prompt_n": evaluated, "generation_settings/stop": []}
    *parts, end = parts_of(stream.text)
    assert end == whole.json() | {"content": ""}
    assert [token for part in parts for token in part["tokens"]] == [*server.ids(ANSWER), server.script.eos]


def test_other_files_come_first_and_give_way_first(model: Path) -> None:
    extra = [{"filename": "a.py", "text": "A"}, {"text": "B" * 500}]
    (_, one), server = ask(model, {**GAP, "input_extra": extra[:1]}, {**GAP, "input_extra": extra, "n_predict": 6})
    files, cut = prompts_of(server)
    assert files == f"<s><|repo_name|>project\n<|file_sep|>a.py\nA\n<|file_sep|>file\n{WRITTEN}"
    assert one.json()["truncated"]
    assert cut.endswith(f"B\n<|file_sep|>file\n{WRITTEN}") and "a.py" not in cut
    assert len(server.core.added[1].prompt_token_ids) == 256 - 6 and server.core.added[1].max_tokens == 6


@pytest.mark.parametrize("n_predict", [-1, 0, 1, 100_000])
def test_what_does_not_fit_is_cut_and_leaves_room_for_an_answer(model: Path, n_predict: int) -> None:
    body = {"input_prefix": "p" * 400, "input_suffix": "s" * 400, "n_predict": n_predict}
    (reply,), server = ask(model, body)
    assert reply.json()["truncated"]
    (prompt,), (added,) = prompts_of(server), server.core.added
    before, behind = prompt.count("p"), prompt.count("s>") and prompt.count("s") - prompt.count("fim_s") - 1
    wanted = {-1: 64, 0: 1, 1: 1, 100_000: 128}[n_predict]
    assert len(added.prompt_token_ids) == 256 - wanted
    assert before > 2 * behind > 0 and added.max_tokens >= min(wanted, 64)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_prefix": 5}, "input_prefix"),
        ({"input_extra": "x"}, "input_extra"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra"),
        ({"input_extra": [{"filename": 5, "text": "x"}]}, "input_extra"),
        ({"input_extra": [{"text": ""}] * 257}, "input_extra"),
        ({"input_prefix": "x" * 50_000}, "input_prefix"),
        ({"input_suffix": "x" * 50_000}, "input_suffix"),
        ({"input_extra": [{"text": "x" * 50_000}]}, "input_extra"),
        ({"n_predict": 2**31}, "n_predict"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"temperature": -1}, "temperature"),
        ({"mirostat": 2}, "mirostat"),
        ({"logit_bias": [[5, 1]]}, "logit_bias"),
        ({"n_indent": 4}, "n_indent"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"stop": [""]}, "stop"),
        ({"response_fields": [5]}, "response_fields"),
        ({"response_fields": ["content"] * 65}, "response_fields"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_refused_by_name(model: Path, body: dict[str, Any], param: str, stream: bool) -> None:
    server = Server(model)
    (reply,) = post_all(server, (INFILL, {**body, "stream": stream}))
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text
    assert not server.core.added


def test_models_without_marks_say_so(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model)
    asked = (COMPLETIONS, {"prompt": "x", "suffix": "y"}), (INFILL, GAP), (COMPLETIONS, {"prompt": "x", "suffix": ""})
    suffix, infill, plain = post_all(server, *asked)
    for reply, param in ((suffix, "suffix"), (infill, "input_suffix")):
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param
        assert "<|fim_prefix|>" in reply.json()["error"]["message"]
    assert plain.status_code == 200


def test_what_contradicts_a_suffix_is_refused(model: Path) -> None:
    server = Server(model)
    asked = ({"echo": True}, "echo"), ({"suffix": 5}, "suffix"), ({"suffix": "x" * 50_000}, "suffix")
    more = ({"prompt": "x" * 300}, "prompt"), ({"prompt": [300]}, "prompt")
    cases = [*asked, *more]
    replies = post_all(server, *((COMPLETIONS, {"prompt": "x", "suffix": "y", **body}) for body, _ in cases))
    for reply, (_, param) in zip(replies, cases, strict=True):
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


def test_nulls_are_left_out_and_what_nobody_knows_is_told_of(model: Path) -> None:
    nulls, unknown = dict.fromkeys(InfillRequest.model_fields), {"frobnicate": 1}
    (quiet, told), _ = ask(model, nulls, unknown)
    assert "x-pageloom-ignored" not in quiet.headers and told.headers["x-pageloom-ignored"] == "frobnicate"


@pytest.mark.parametrize("stall_at", [0, 2])
@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_a_client_that_leaves_aborts(model: Path, stream: bytes, stall_at: int) -> None:
    server = Server(model)

    async def go() -> None:
        async with server.client():
            server.script.stall_at = stall_at
            body = b'{"input_prefix": "x", "stream": %s}' % stream
            await leave_after(server, INFILL, body, stream == b"true" and stall_at > 0)
            await asyncio.sleep(0.05)
            assert len(server.core.aborted) == len(server.core.added) == 1 and not server.core.running

    asyncio.run(asyncio.wait_for(go(), 30))


def test_the_document_tells_what_is_sent(model: Path) -> None:
    asked = ("GET", "/openapi.json", None), ("POST", INFILL, GAP), ("POST", INFILL, {**GAP, "stream": True})
    described, whole, stream = request_all(Server(model), *asked)
    document = described.json()
    content = document["paths"][INFILL]["post"]["responses"]["200"]["content"]
    check(document, content["application/json"]["schema"], whole.json())
    for part in parts_of(stream.text):
        check(document, content["text/event-stream"]["schema"], part)
