"""Prefixes pinned from Python, by a file at start and by calls to the server: found, kept, listed, given back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import metric, serving
from tiny_families import save_tiny

from engine import LLM, SamplingParams
from engine.errors import InvalidRequestError

PREFIX = [3 + (7 * i) % 400 for i in range(100)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pinned")
    save_tiny("Llama", path)
    return path


def test_a_prefix_pinned_from_python_is_kept_until_it_is_unpinned(model: Path) -> None:
    block_bytes = 2 * 16 * 2 * 16 * 4 * 3
    with LLM(
        str(model), dtype="float32", device="cpu", max_model_len=200, kv_cache_memory=30 * block_bytes, compile="none"
    ) as llm:
        [alone] = llm.generate({"prompt_token_ids": [*PREFIX, 5]}, GREEDY, use_tqdm=False)
        llm.reset_prefix_cache()
        assert llm.pin_prefix("system", {"prompt_token_ids": PREFIX}) == 100
        assert llm.pinned_prefixes() == {"system": 100} and llm.stats().kv_blocks_pinned == 6
        others = [{"prompt_token_ids": [9 + i, *PREFIX[:90]]} for i in range(20)]
        llm.generate(others, GREEDY, use_tqdm=False)
        [output] = llm.generate({"prompt_token_ids": [*PREFIX, 5]}, GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 96
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        with pytest.raises(InvalidRequestError, match="'system' is pinned already"):
            llm.pin_prefix("system", {"prompt_token_ids": PREFIX})
        with pytest.raises(InvalidRequestError, match=r"needs 12 KV blocks"):
            llm.pin_prefix("long", {"prompt_token_ids": [1, *PREFIX[1:], *PREFIX[:95]]})
        with pytest.raises(InvalidRequestError, match="no prefix named 'other' is pinned; pinned: system"):
            llm.unpin_prefix("other")
        llm.unpin_prefix("system")
        llm.generate({"prompt_token_ids": [8]}, GREEDY, use_tqdm=False)
        assert llm.stats().kv_blocks_pinned == llm.stats().kv_blocks_used == 0 and not llm.pinned_prefixes()


@pytest.fixture(scope="module")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("prefixes") / "prefixes.jsonl"
    file.write_text(json.dumps({"name": "from the file", "prompt": PREFIX}) + "\n\n")
    options = [
        "--served-model-name",
        "tiny",
        "--kv-cache-memory",
        "8MiB",
        "--max-model-len",
        "512",
        "--compile",
        "none",
    ]
    with serving(
        str(model), "--dtype", "float32", "--compile", "none", "--pinned-prefixes", str(file), *options
    ) as url:
        yield url


def cached_tokens(base: str, prompt: list[int]) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    reply = httpx.post(f"{base}/v1/completions", json=body, timeout=60).raise_for_status().json()
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_server_keeps_what_its_file_and_its_clients_pin(base: str) -> None:
    assert cached_tokens(base, [*PREFIX, 5]) == 96
    own = [*reversed(PREFIX)]
    pinned = httpx.post(f"{base}/v1/prefixes", json={"name": "own/1", "prompt": own}, timeout=60)
    assert pinned.json() == {"object": "prefix", "name": "own/1", "tokens": 100}
    listed = httpx.get(f"{base}/v1/prefixes").json()["data"]
    assert [(one["name"], one["tokens"]) for one in listed] == [("from the file", 100), ("own/1", 100)]
    assert metric(base, "pageloom_kv_blocks_pinned") == 12
    assert cached_tokens(base, [*own, 5]) == 96
    assert httpx.delete(f"{base}/v1/prefixes/own/1").json()["deleted"] is True
    assert cached_tokens(base, [1, 2, 3]) == 0
    assert metric(base, "pageloom_kv_blocks_pinned") == 6


@pytest.mark.parametrize(
    ("method", "path", "body", "param", "word"),
    [
        ("POST", "", {"name": "from the file", "prompt": PREFIX}, "name", "pinned already"),
        ("POST", "", {"name": "", "prompt": PREFIX}, "name", "not empty"),
        ("POST", "", {"name": "short", "prompt": [1, 2]}, None, "fills no block"),
        ("POST", "", {"name": "both", "prompt": [1], "messages": []}, "prompt", "either prompt or messages"),
        ("DELETE", "/nobody", None, "name", "no prefix named 'nobody'"),
    ],
)
def test_what_can_not_be_done_says_why(
    base: str, method: str, path: str, body: dict[str, object] | None, param: str | None, word: str
) -> None:
    reply = httpx.request(method, f"{base}/v1/prefixes{path}", json=body, timeout=60)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and word in error["message"]


def test_a_file_that_says_nonsense_stops_the_start(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "prefixes.jsonl"
    file.write_text('{"name": "a", "prompt": "Hello"}\n')
    with (
        pytest.raises(AssertionError, match="exited with 1"),
        serving(
            str(model),
            "--dtype",
            "float32",
            "--compile",
            "none",
            "--pinned-prefixes",
            str(file),
            "--max-model-len",
            "256",
        ),
    ):
        pass
