"""A worker of a Dynamo cluster, behind Dynamo's own frontend (the extra `dynamo`; nothing else of theirs runs)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serving import free_port
from tiny_families import save_tiny

from engine import LLM, SamplingParams

pytestmark = pytest.mark.exhaustive
SETTINGS = {"dtype": "float32", "compile": "none", "kv_cache_memory": 64 << 20, "max_model_len": 512}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
PROMPT = "hello there, and so on"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dynamo") / "tiny"
    save_tiny("Qwen3", path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    pytest.importorskip("dynamo._core", reason="the extra `dynamo` is not installed")
    home, port, events = tmp_path_factory.mktemp("cluster"), free_port(), free_port()
    seen = os.environ | {"DYN_FILE_KV": str(home), "DYN_DISCOVERY_BACKEND": "file"}
    told = json.dumps({"enable_kv_cache_events": True, "endpoint": f"tcp://*:{events}"})
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    frontend = [sys.executable, "-m", "dynamo.frontend", "--http-port", str(port), "--router-mode", "kv"]
    worker = [sys.executable, "-m", "entrypoints.dynamo", str(model), *settings, "--kv-events-config", told]
    with subprocess.Popen(frontend, env=seen) as first, subprocess.Popen(worker, env=seen) as second:
        try:
            base = f"http://127.0.0.1:{port}"
            until = time.monotonic() + 120
            while not served(base):
                assert time.monotonic() < until and second.poll() is None
                time.sleep(0.2)
            yield base, second
        finally:
            for each in (first, second):
                each.kill()


def served(base: str) -> bool:
    try:
        return "tiny" in httpx.get(f"{base}/v1/models").text
    except httpx.TransportError:
        return False


def test_tokens_are_those_of_the_engine_alone(cluster: tuple[str, subprocess.Popen[bytes]], model: Path) -> None:
    base, _ = cluster
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0}
    for _ in range(2):
        answer = httpx.post(f"{base}/v1/chat/completions", json={**body, "logprobs": True}, timeout=60).json()
        tokens = [each["token_id"] for each in answer["choices"][0]["logprobs"]["content"]]
    with LLM(str(model), device="cpu", **SETTINGS) as llm:  # type: ignore[arg-type]
        params = SamplingParams(temperature=0.0, max_tokens=24)
        alone = llm.chat([{"role": "user", "content": PROMPT}], params, use_tqdm=False)[0]
    assert tokens == alone.outputs[0].token_ids
    assert answer["usage"]["prompt_tokens"] == len(alone.prompt_token_ids)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_schema_is_kept_and_samples_are_as_many_as_asked(cluster: tuple[str, subprocess.Popen[bytes]]) -> None:
    base, _ = cluster
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    }
    answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=60).json()
    assert json.loads(answer["choices"][0]["message"]["content"])["a"] in ("x", "y")
    several = {"model": "tiny", "prompt": PROMPT, "n": 3, "max_tokens": 4, "seed": 5, "temperature": 1.0}
    assert len(httpx.post(f"{base}/v1/completions", json=several, timeout=60).json()["choices"]) == 3


def test_sigterm_ends_the_worker(cluster: tuple[str, subprocess.Popen[bytes]]) -> None:
    _, worker = cluster
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(timeout=60) == 0
