"""docs/operations.md: its commands, in order, in one shell, on the demo weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "end_to_end"))
from smollm2 import smollm2_path

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
PORT = "8443"
NEEDED = ("bash", "openssl", "curl", "sha256sum")


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@pytest.mark.timeout(300)
@pytest.mark.skipif(any(shutil.which(name) is None for name in NEEDED), reason=f"needs {', '.join(NEEDED)}")
def test_its_commands_work_in_order(tmp_path: Path) -> None:
    smollm2_path()  # skips where the weights are not there
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    steps = [f"echo '== {i}'\n{block}" for i, block in enumerate(blocks)]
    ending = "trap 'kill -9 $SERVER 2>/dev/null || true' EXIT\n"
    script = "set -euo pipefail\nSERVER=0\n" + ending + "".join(steps)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = subprocess.run(
        ["bash", "-c", script.replace(PORT, free_port())],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    said = dict(enumerate(re.split(r"^== \d+\n", run.stdout, flags=re.MULTILINE)[1:]))
    assert "fits" in said[0]
    answer, end = json.JSONDecoder().raw_decode(said[3])
    assert answer["usage"]["completion_tokens"] > 0 and said[3][end:].strip() == "401"
    assert 'pageloom_key_requests_total{key="app"' in said[4]
    assert json.loads(said[4].strip().splitlines()[-1])["key"] == "app"
    assert said[6].split()[0] == "503"
    assert "keys were read" in run.stderr


def test_files_that_it_names_exist() -> None:
    named = re.findall(r"\]\(([\w./-]+)\)", PAGE)
    assert len(named) > 6
    assert all((Path(__file__).parents[2] / "docs" / name).exists() for name in named)
