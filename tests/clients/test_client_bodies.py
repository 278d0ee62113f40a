"""Request bodies in the shapes that the test suites of public client libraries send: all are read, and all but what is
refused by design is answered."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from client_envs import HERE
from scripted_server import Server, save_model
from test_tools import TEMPLATE

from engine.limits import Limits

PATHS = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
}
LIBRARIES = sorted(path.stem for path in (HERE / "bodies").glob("*.json"))
NO_IMAGES = "a model that reads text is shown no images, sound or files"
NOT_HERE = "there is nothing here that would do it"
PLACEHOLDER = "stands for a request, and would be refused anywhere"
REFUSED = {
    r"content\[[0-9]+\]: [a-z_]+ is not supported": NO_IMAGES,
    "must be a text, or an object with a text": "whole messages stand where parts of one should",
    "'(image|container_upload)' blocks cannot be read": NO_IMAGES,
    "documents are read as text or content, not 'base64'": NO_IMAGES,
    "^(audio|web_search_options|context_management) is not supported": NOT_HERE,
    "echo cannot be combined with suffix": "the answer stands between the two",
    "must be function or custom, got 'openrouter:": NOT_HERE,
    "tool_choice is required, but there are no tools": "but such as run at the vendor",
    "Previous response with id 'id_[0-9]+' not found": "it was another server's",
    "stream_options is only allowed when stream is true": PLACEHOLDER,
    "schema must be an object or boolean": PLACEHOLDER,
    "List should have at least 1 item": PLACEHOLDER,
    "input must hold at least one item": PLACEHOLDER,
    "effort: Input should be": PLACEHOLDER,
    "top_k: Input should be a valid integer": PLACEHOLDER,
    "logit_bias: token id 50256 is outside the vocabulary": "which is this model's",
}
"""what is said, and why"""
MOST_REFUSED = 0.25


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("bodies") / "tiny", template=TEMPLATE, context=65_536)


def requests_of(library: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((HERE / "bodies" / f"{library}.json").read_text())["requests"]
    return found


def test_bodies_of_client_libraries_are_answered_but_for_what_is_refused_by_design(model: Path) -> None:
    async def go() -> list[tuple[str, int, str]]:
        server = Server(model, limits=Limits(grammar_s=60.0))  # others may have the cores
        async with server.client() as client:
            found = []
            for library in LIBRARIES:
                for each in requests_of(library):
                    reply = await client.post(each["path"], json=each["body"])
                    found.append((library, reply.status_code, reply.text))
            return found

    used: Counter[str] = Counter()
    replies = asyncio.run(asyncio.wait_for(go(), 300))
    for library, status, text in replies:
        if status == 200:
            continue
        message = json.loads(text)["error"]["message"]
        reason = next((said for said in REFUSED if re.search(said, message)), None)
        assert status == 400 and reason is not None, (library, status, message)
        used[reason] += 1
    assert set(used) == set(REFUSED), set(REFUSED) - set(used)
    assert sum(used.values()) <= MOST_REFUSED * len(replies)


def test_at_least_ten_libraries_ask_for_all_routes() -> None:
    paths = Counter(each["path"] for library in LIBRARIES for each in requests_of(library))
    assert len(LIBRARIES) >= 10 and set(paths) == PATHS and sum(paths.values()) >= 180
