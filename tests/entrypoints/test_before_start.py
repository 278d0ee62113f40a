"""Options that a start would refuse are refused before anything is loaded, by the start and by --check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from entrypoints.serve import main

ABSURD = [
    (["--tool-call-parser", "nope"], "tool_call_parser must be one of"),
    (["--reasoning-parser", "nope"], "reasoning_parser must be one of"),
    (["--override-generation-config", '{"temperatur": 1}'], "there is no 'temperatur'"),
    (["--cores", f"{os.cpu_count()}-99999"], "cores: this process may run on"),
    (["--otlp-endpoint", "foo"], "--otlp-endpoint must be"),
    (["--api-key-file", "no-such-file"], "--api-key-file: cannot read"),
    (["--pinned-prefixes", "no-such-file"], "--pinned-prefixes: there is no file"),
    (["--ssl-certfile", "no-such-file"], "--ssl-certfile: no-such-file"),
    (["--ssl-keyfile", "no-such-file"], "--ssl-keyfile has no effect without"),
    (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization"),
    (["--chat-template", "{% if"], "chat_template does not parse"),
]


@pytest.mark.parametrize("check", [["--check", "--json"], []])
@pytest.mark.parametrize(("options", "problem"), ABSURD)
def test_a_start_and_a_check_refuse_alike_before_a_model_is_looked_for(
    options: list[str], problem: str, check: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["no-such-model", "--port", "0", "--device", "cpu", *check, *options]) == 1
    said = capsys.readouterr()
    assert problem in said.err
    if check:
        told = json.loads(said.out)
        assert told["fits"] is False and problem in told["problems"][0]


def test_who_reads_no_further_sees_no_traceback(tiny_server_model: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [
        sys.executable,
        "-m",
        "entrypoints.serve",
        "--check",
        str(tiny_server_model),
        "--device",
        "cpu",
        "--json",
    ]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")  # it has no weights
