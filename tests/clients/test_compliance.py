"""llm-comply's tests of three APIs, all but those that send images: the demo model reads none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from client_envs import MODEL

TESTS = {"open-responses": 13, "openai-chat": 9, "anthropic": 9}
IMAGES, THINKING = "Image Input", {"Reasoning Summary", "Thinking Display"}
"""refused by name, with 400; and what the tool tries with models of certain names only"""


@pytest.mark.slow
@pytest.mark.parametrize("form", TESTS)
def test_an_api_complies_in_all_but_images(form: str, served: str) -> None:
    asked = ("--format", form, "-u", f"{served}/v1", "-k", "none", "-m", MODEL, "--json", "--timeout", "120")
    command = [Path(sys.executable).with_name("llm-comply"), *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    results = json.loads(done.stdout)["results"]
    states = {result["name"]: result["status"] for result in results}
    wrong = {result["name"]: result.get("errors") for result in results if result["status"] == "failed"}
    assert set(wrong) == {IMAGES} and wrong[IMAGES][0].startswith("HTTP 400"), wrong
    assert {name for name, state in states.items() if state == "skipped"} <= THINKING
    assert len(results) == TESTS[form] and list(states.values()).count("passed") == TESTS[form] - 2
