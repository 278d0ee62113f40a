"""guidellm: a short benchmark of synthetic prompts by each of the routes that its HTTP backend knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from checks import Checks

checks = Checks()
REQUESTS = 4


def benchmark(route: str, profile: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            Path(sys.executable).with_name("guidellm"),
            "run",
            "--backend", f"kind=openai_http,target={checks.base},model={checks.model},request_format={route}",
            "--profile", profile,
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--tokenizer", f"kind=huggingface_auto,model={checks.tokenizer}",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
            "--output", f"kind=json,path={report}",
            "--disable-console",
        ]  # fmt: skip
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=offline, cwd=folder)
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
        return json.loads(report.read_text())


def completed(report: dict) -> None:
    (found,) = report["benchmarks"]
    totals = found["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), totals


def chat() -> None:
    completed(benchmark("/v1/chat/completions", "kind=synchronous"))


def completions() -> None:
    completed(benchmark("/v1/completions", "kind=concurrent,streams=2"))


checks.run(chat, completions)
checks.tell(version("guidellm"))
