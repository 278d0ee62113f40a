"""Whole and streamed replies: OpenAI's shapes as openai-python's types read them, contents against brute force."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from scripted_server import ANSWER, BOS, CHATS, COMPLETIONS, Server, events, post_all, save_model, score_of

MESSAGES = [{"role": "user", "content": "hi"}]


def post(server: Server, path: str, body: dict[str, Any], status: int = 200) -> httpx.Response:
    async def go() -> httpx.Response:
        async with server.client() as client:
            reply = await client.post(path, json=body)
            assert reply.status_code == status, reply.text
            return reply

    return asyncio.run(asyncio.wait_for(go(), 20))


def valid(reply: dict[str, Any]) -> Completion:
    """The reply as openai-python makes it, validated against its type: but for the nulls that OpenAI's own API sends
    where the type has none (the score of an echoed prompt's first token, the reason of a chunk that ends nothing)."""
    patched = copy.deepcopy(reply)
    for choice in patched["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "length"
        if choice["logprobs"] and choice["logprobs"]["tokens"]:
            for name, neutral in (("token_logprobs", 0.0), ("top_logprobs", {})):
                choice["logprobs"][name][0] = choice["logprobs"][name][0] or neutral
    Completion.model_validate(patched, strict=True)
    return Completion.construct(**reply)


def complete(server: Server, **body: Any) -> Completion:
    return valid(post(server, "/v1/completions", {"model": "tiny", **body}).json())


def stream(server: Server, **body: Any) -> list[Completion]:
    reply = post(server, "/v1/completions", {"model": "tiny", "stream": True, **body})
    assert reply.headers["content-type"].startswith("text/event-stream")
    return [valid(e) for e in events(reply.text)]


def test_completion_validates_and_counts_its_tokens(server: Server) -> None:
    server.script.cached_tokens, server.script.accepted_tokens = 2, 3
    reply = complete(server, prompt="hello", max_tokens=100)
    choice = reply.choices[0]
    assert (choice.text, choice.finish_reason, choice.index) == (ANSWER, "stop", 0)
    usage = reply.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens == len("<s>") - 2 + len("hello")  # <s> is one token, each byte another
    assert usage.completion_tokens == len(ANSWER.encode()) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens == 3


def test_length_ends_where_max_tokens_says(server: Server) -> None:
    choice = complete(server, prompt="a", max_tokens=3).choices[0]
    assert (choice.finish_reason, choice.text) == ("length", "wö")  # three bytes


def test_left_out_limits_are_16_for_completions_and_the_context_for_chat(tiny_server_model: Path) -> None:
    server = Server(tiny_server_model)
    post(server, "/v1/completions", {"prompt": "abc"})
    assert server.core.added[0].max_tokens == 16
    server = Server(tiny_server_model)
    post(server, "/v1/chat/completions", {"messages": MESSAGES})
    assert server.core.added[0].max_tokens == 256 - len(server.core.added[0].prompt_token_ids)


def test_what_the_client_leaves_out_comes_from_the_models_generation_config(tmp_path: Path) -> None:
    generation = {"temperature": 0.25, "top_k": 7, "top_p": 0.5, "repetition_penalty": 1.5, "max_new_tokens": 9}
    model = save_model(tmp_path / "m", generation=generation)
    bodies: list[dict[str, Any]] = [{}, {"temperature": None, "top_k": 3}, {"temperature": 0.9, "max_tokens": 5}]
    seen = []
    for body in bodies:
        server = Server(model)
        post(server, "/v1/chat/completions", {"messages": MESSAGES, **body})
        added = server.core.added[0]
        p = added.params
        seen.append((p.temperature, p.top_k, p.top_p, p.repetition_penalty, added.max_tokens))
    assert seen == [(0.25, 7, 0.5, 1.5, 9), (0.25, 3, 0.5, 1.5, 9), (0.9, 7, 0.5, 1.5, 5)]
    for fields, limit in (({}, 9), ({"max_tokens": 5}, 5), ({"max_tokens": None}, 252)):
        server = Server(model)
        post(server, "/v1/completions", {"prompt": "abc", **fields})
        assert server.core.added[0].max_tokens == limit


def test_samples_of_many_prompts_are_numbered_prompt_by_prompt(server: Server) -> None:
    body = {"prompt": ["aa", "b"], "n": 3, "echo": True, "max_tokens": 4}
    whole = complete(server, **body)
    assert [(c.index, c.text[0]) for c in whole.choices] == [(i, "aab"[i // 3 + (i // 3)]) for i in range(6)]
    assert whole.usage is not None and whole.usage.prompt_tokens == 3 + 2 and whole.usage.completion_tokens == 24


def joined(chunks: list[Completion]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "extra", [{}, {"stop": [" 😀"]}, {"stop": "ok", "include_stop_str_in_output": True}, {"max_tokens": 0}]
)
@pytest.mark.parametrize("prompt", [["ab", "cdé"], [[5, 6, 7], [8]]])
def test_streamed_choices_joined_equal_whole_ones(
    tiny_server_model: Path, prompt: Any, extra: dict[str, Any], late: bool
) -> None:
    """Text and all four lists of log-probabilities, for every sample, with the prompt echoed."""
    body = {"prompt": prompt, "n": 2, "echo": True, "logprobs": 2, "max_tokens": 60, **extra}
    servers = [Server(tiny_server_model), Server(tiny_server_model)]
    servers[1].script.late_prompt_scores = late
    whole, chunks = complete(servers[0], **body), stream(servers[1], **body)
    assert joined(chunks) == {c.index: c.text for c in whole.choices}
    for choice in whole.choices:
        assert choice.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.index == choice.index]
            assert [x for part in parts for x in getattr(part, name)] == getattr(choice.logprobs, name), name


def test_echoed_log_probabilities_line_up_with_the_text(server: Server) -> None:
    """BOS has no width, characters of several bytes stand where they begin, only the first token has no score."""
    prompt = "é<b"
    reply = complete(server, prompt=prompt, echo=True, logprobs=1, max_tokens=60)
    choice = reply.choices[0]
    assert choice.text == prompt + ANSWER
    logprobs = choice.logprobs
    assert logprobs and logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset and logprobs.top_logprobs
    expected, at = [0], 0  # BOS
    for character in prompt + ANSWER:
        expected += [at] * len(character.encode())
        at += 1
    assert logprobs.text_offset == [*expected, at]  # EOS
    assert logprobs.tokens[0] == "<s>" and logprobs.tokens[3:5] == ["<", "b"]
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    tokens = [*server.core.added[0].prompt_token_ids, *server.script.answer, server.script.eos]
    assert logprobs.token_logprobs[1:] == pytest.approx([score_of(t) for t in tokens[1:]])
    assert all(entry is not None and len(entry) in (1, 2) for entry in logprobs.top_logprobs[1:])


def test_the_chosen_token_is_among_the_top_of_completions(server: Server) -> None:
    for top in (0, 2):
        server = Server(Path(server.engine._args.model))
        logprobs = complete(server, prompt="a", logprobs=top, max_tokens=1).choices[0].logprobs
        assert logprobs and logprobs.top_logprobs and logprobs.tokens and logprobs.token_logprobs
        assert len(logprobs.top_logprobs[0]) == top + 1
        assert logprobs.top_logprobs[0][logprobs.tokens[0]] == logprobs.token_logprobs[0]


def test_scoring_a_prompt_generates_nothing_that_shows(server: Server) -> None:
    reply = complete(server, prompt="abc", echo=True, logprobs=1, max_tokens=0)
    choice = reply.choices[0]
    assert (choice.text, choice.finish_reason) == ("abc", "length")
    assert choice.logprobs and choice.logprobs.tokens == ["<s>", "a", "b", "c"]
    assert reply.usage is not None and reply.usage.completion_tokens == 0 and server.core.added[0].max_tokens == 1


def test_prompt_logprobs_hold_the_token_and_its_rivals(server: Server) -> None:
    choice = post(server, "/v1/completions", {"prompt": "abc", "prompt_logprobs": 2, "logprobs": 4}).json()["choices"][
        0
    ]
    first, *rest = choice["prompt_logprobs"]
    ids = server.core.added[0].prompt_token_ids
    assert first is None
    assert [set(at) for at in rest] == [{str(t), "10", "11"} for t in ids[1:]]
    assert [at[str(t)]["rank"] for at, t in zip(rest, ids[1:])] == [77] * 3


def test_special_tokens_are_left_out_of_a_prompt_where_asked(server: Server) -> None:
    complete(server, prompt="abc", add_special_tokens=False)
    assert server.core.added[0].prompt_token_ids == server.ids("abc")


def test_the_end_of_a_prompt_is_kept_where_asked(server: Server) -> None:
    def usage(reply: httpx.Response) -> int:
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["prompt_tokens"])

    long = "x" * 400
    chat = {"messages": [{"role": "user", "content": long}], "max_tokens": 1}
    cut, fits, tail, whole, refused = post_all(
        server,
        (COMPLETIONS, {"prompt": long, "truncate_prompt_tokens": 5, "max_tokens": 1, "echo": True}),
        (COMPLETIONS, {"prompt": long, "truncate_prompt_tokens": -1, "max_tokens": 1}),
        (CHATS, chat | {"truncate_prompt_tokens": 7}),
        (CHATS, chat | {"truncate_prompt_tokens": -1}),
        (CHATS, chat),
    )
    assert [usage(reply) for reply in (cut, fits, tail, whole)] == [5, 255, 7, 255]
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert server.core.added[0].prompt_token_ids == server.ids("xxxxx")


def test_usage_comes_once_or_with_every_chunk_as_asked(tiny_server_model: Path) -> None:
    def usages(**options: bool) -> list[int | None]:
        server = Server(tiny_server_model)
        server.script.step_s = 0.02  # slow enough for every step to be an output of its own
        chunks = stream(server, prompt="a", max_tokens=3, stream_options=options)
        assert all((not c.choices) == (c is chunks[-1] and options.get("include_usage", False)) for c in chunks)
        return [c.usage and c.usage.completion_tokens for c in chunks]

    assert usages(include_usage=False) == [None] * 3
    assert usages(include_usage=True) == [None] * 3 + [3]
    continuous = usages(include_usage=True, continuous_usage_stats=True)
    assert continuous == [1, 2, 3, 3]


def test_an_event_says_that_another_core_goes_on_where_that_is_asked_for(tiny_server_model: Path) -> None:
    def told(url: str, body: dict[str, Any], **options: bool) -> list[int | None]:
        server = Server(tiny_server_model)
        server.script.step_s, server.script.moved_at = 0.02, (1, 3)
        asked = {"stream": True, "max_tokens": 4, "n": 2, **body, "stream_options": options}
        chunks = events(post(server, url, asked).text)
        for chunk in chunks:
            ChatCompletionChunk.model_validate(chunk) if url == CHATS else valid(chunk)
        return [chunk.get("num_moves") for chunk in chunks if not chunk["choices"] or "num_moves" in chunk]

    for url, body in ((COMPLETIONS, {"prompt": "a"}), (CHATS, {"messages": MESSAGES})):
        assert told(url, body, include_moves=True) == [1, 2]
        assert told(url, body, include_moves=True, include_usage=True) == [1, 2, None]
        assert told(url, body) == []


def test_chat_validates_and_names_bytes_that_are_no_character(server: Server) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2}
    reply = ChatCompletion.model_validate(post(server, "/v1/chat/completions", body).json(), strict=True)
    assert [c.index for c in reply.choices] == [0, 1]
    for choice in reply.choices:
        assert choice.message.content == ANSWER and choice.message.role == "assistant"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        content = choice.logprobs.content
        assert bytes(b for at in content[:-1] for b in at.bytes or ()).decode() == ANSWER
        assert all(
            len(at.top_logprobs) == 2 and at.logprob == pytest.approx(score_of(t))
            for at, t in zip(content, server.script.answer)
        )


def test_streamed_chat_opens_each_sample_with_a_role_and_closes_it_with_a_reason(server: Server) -> None:
    body = {"messages": MESSAGES, "n": 2, "stream": True, "logprobs": True, "stream_options": {"include_usage": True}}
    reply = events(post(server, "/v1/chat/completions", body).text)
    chunks = [ChatCompletionChunk.model_validate(e, strict=True) for e in reply]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    for index in (0, 1):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert "".join(c.delta.content or "" for c in mine) == ANSWER
        assert sum(len(c.logprobs.content or ()) for c in mine if c.logprobs) == len(server.script.answer) + 1
    assert chunks[-1].usage.completion_tokens == 2 * (len(server.script.answer) + 1)


@pytest.mark.parametrize(("role", "expected"), [("assistant", "Sure: " + ANSWER), ("user", ANSWER)])
def test_chat_echoes_only_the_assistants_own_beginning(server: Server, role: str, expected: str) -> None:
    messages = [*MESSAGES, {"role": role, "content": [{"type": "text", "text": "Sure: "}]}]
    body = {"messages": messages, "echo": True, "add_generation_prompt": False, "continue_final_message": True}
    reply = post(server, "/v1/chat/completions", body).json()
    assert reply["choices"][0]["message"]["content"] == expected


def test_a_stop_string_ends_the_text_and_is_named(server: Server) -> None:
    choice = post(server, "/v1/completions", {"prompt": "a", "stop": ["zz", "ld"], "max_tokens": 50}).json()["choices"][
        0
    ]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("wör", "stop", "ld")
    assert server.core.aborted == {server.core.added[0].request_id}


def test_neutral_values_of_what_is_not_supported_are_accepted(server: Server) -> None:
    body = {
        "messages": MESSAGES,
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "tools": [],
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "u",
    }
    post(server, "/v1/chat/completions", body)


def test_token_ids_come_where_asked_streamed_as_whole(server: Server) -> None:
    prompt = [BOS, 7, 8]
    ask = {"model": "tiny", "return_token_ids": True, "n": 2, "max_tokens": 100, "prompt": prompt}
    at_once, streamed = post_all(server, (COMPLETIONS, ask), (COMPLETIONS, {**ask, "stream": True}))
    ids = [*server.script.answer, server.script.eos]
    whole = at_once.json()["choices"][1]
    assert (whole["prompt_token_ids"], whole["token_ids"]) == (prompt, ids)
    of_last = [c for chunk in events(streamed.text) for c in chunk["choices"] if c["index"] == 1]
    assert [c["prompt_token_ids"] for c in of_last if "prompt_token_ids" in c] == [prompt]
    assert [i for c in of_last for i in c["token_ids"]] == ids


@pytest.mark.parametrize("extra", [{}, {"logprobs": True}])
def test_token_ids_of_a_chat_come_where_asked(server: Server, extra: dict[str, Any]) -> None:
    ask = {"model": "tiny", "messages": MESSAGES, "return_token_ids": True, **extra}
    plain = {**ask, "return_token_ids": False}
    at_once, streamed, without = post_all(server, (CHATS, ask), (CHATS, {**ask, "stream": True}), (CHATS, plain))
    ids, whole = [*server.script.answer, server.script.eos], at_once.json()
    assert whole["choices"][0]["token_ids"] == ids
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    chunks = events(streamed.text)
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [whole["prompt_token_ids"]]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == ids
    assert "token_ids" not in without.text
