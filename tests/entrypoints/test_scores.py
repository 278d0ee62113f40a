"""What is asked of the engine for a ranking, and ids that are none; that rankings are right is proved end to end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_server import COMPLETIONS, Server, post_all

from engine.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput


@pytest.mark.parametrize(
    ("asked", "query", "document"),
    [
        ({}, None, None),
        ({"max_tokens_per_doc": 3}, None, 3),
        ({"truncate_prompt_tokens": 9}, 9, 9),
        ({"truncate_prompt_tokens": 9, "max_tokens_per_doc": 3}, 9, 3),
    ],
)
def test_what_documents_are_cut_to_cuts_no_query(
    tiny_server_model: Path,
    asked: dict[str, int],
    query: int | None,
    document: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuts: list[int | None] = []

    async def vectors_of(_: Any, prompts: Sequence[str], params: Sequence[PoolingParams], *__: Any) -> list[Any]:
        cuts.extend(each.truncate_prompt_tokens for each in params)
        vector = PoolingOutput(np.ones(2, dtype=np.float32))
        return [PoolingRequestOutput(request_id=p, outputs=vector, prompt_token_ids=[1]) for p in prompts]

    monkeypatch.setattr("entrypoints.server.scores.vectors_of", vectors_of)
    body = {"query": "what is it", "documents": ["a", "b"], **asked}
    (reply,) = post_all(Server(tiny_server_model), ("/rerank", body))
    assert reply.status_code == 200, reply.text
    assert cuts == [query, document, document]


def test_booleans_are_no_token_ids(tiny_server_model: Path) -> None:
    given: list[Any] = [[True], [3, False], [[True]], [[3], [3, True]]]
    asked = [
        (path, {field: ids}) for ids in given for path, field in ((COMPLETIONS, "prompt"), ("/v1/embeddings", "input"))
    ]
    server = Server(tiny_server_model)
    for reply, (_, body) in zip(post_all(server, *asked), asked, strict=True):
        assert reply.status_code == 400 and reply.json()["error"]["param"] in body, reply.text
    assert not server.core.added
