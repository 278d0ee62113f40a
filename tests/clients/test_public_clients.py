"""Public clients against a server with the demo model: each in an environment of its own, by a script of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from client_envs import HERE, MODEL, python_of

CLIENTS = {
    "openai1": "openai_sdk",
    "openai3": "openai_sdk",
    "anthropic": "anthropic_sdk",
    "litellm": "litellm_client",
    "langchain": "langchain_client",
    "pydantic_ai": "pydantic_ai_client",
    "instructor": "instructor_client",
    "llama_index": "llama_index_client",
    "lm_eval": "lm_eval_client",
    "guidellm": "guidellm_client",
}
"""environment: script"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("client", CLIENTS)
def test_all_that_a_client_does_works(client: str, served: str, tokenizer: Path) -> None:
    command = [python_of(client), HERE / "scripts" / f"{CLIENTS[client]}.py", served, MODEL, tokenizer]
    away = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "127.0.0.1",
    }
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environ | away)
    assert done.returncode == 0, done.stderr[-3000:]
    checks = json.loads(done.stdout.splitlines()[-1])["checks"]
    assert checks
    failed = {name: found for name, found in checks.items() if found is not True}
    assert not failed, "\n".join(f"{name}: {found}" for name, found in failed.items())


@pytest.mark.exhaustive
def test_the_table_names_the_versions_that_are_tested() -> None:
    table = (HERE / "README.md").read_text()
    for path in (HERE / "requirements").glob("*.txt"):
        pins = dict(line.split("==") for line in path.read_text().split() if "==" in line)
        assert any(f"| {name} {version} |" in table for name, version in pins.items()), path.name
