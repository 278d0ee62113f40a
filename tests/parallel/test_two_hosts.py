"""Ranks in two network namespaces, with a delay, jitter and losses between them: the bits of ranks of one host; and a
cable that is cut ends both sides with the cause."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from launched import PROGRAM, answers_of, prompts, settings_of
from slow_network import Host, can_make_hosts, two_hosts
from tiny_families import save_tiny, save_tokenizer

from attention_backends.toolchain import find_compiler

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(not can_make_hosts(), reason="needs root, ip and /dev/net/tun"),
    pytest.mark.timeout(600),
]
PARTS = [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny("Llama", path)
    save_tokenizer(path)
    return path


def start_on(
    stack: ExitStack, hosts: tuple[Host, Host], where: Path, settings: dict[str, Any]
) -> list[subprocess.Popen[str]]:
    """torchrun on each host, as docs/many-hosts.md has it, of a program that answers."""
    program = where / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    asked = [str(program), json.dumps(sys.path), json.dumps(settings), json.dumps(prompts())]

    def start(rank: int, host: Host) -> subprocess.Popen[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--node-rank", str(rank), "--master-addr", hosts[0].address, "--master-port", "29500"]
        process = subprocess.Popen(
            [*host.prefix, *torchrun, *asked],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    return [start(rank, host) for rank, host in enumerate(hosts)]


@pytest.mark.parametrize("parts", PARTS, ids=["tensors", "stages"])
def test_a_slow_and_lossy_network_between_two_hosts_changes_no_bit(
    parts: dict[str, int], model: Path, tmp_path: Path
) -> None:
    [expected] = answers_of([sys.executable], tmp_path, settings_of(model, **parts))
    settings = settings_of(model, distributed_executor_backend="external_launcher", **parts)
    with two_hosts(delay=0.003, jitter=0.004, lost=0.002) as (here, there, cable), ExitStack() as stack:
        processes = start_on(stack, (here, there), tmp_path, settings)
        said = [process.communicate(timeout=400) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
        assert cable.carried > 500 and cable.dropped > 0
    [line] = [line for out, _ in said for line in out.splitlines() if "answers " in line]
    assert json.loads(line.partition("answers ")[2]) == expected


@pytest.mark.parametrize("parts", PARTS, ids=["tensors", "stages"])
def test_a_cable_that_is_cut_ends_both_hosts(parts: dict[str, int], model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, distributed_executor_backend="external_launcher", **parts)
    with two_hosts(delay=0.02, jitter=0.0, lost=0.0) as (here, there, cable), ExitStack() as stack:
        processes = start_on(stack, (here, there), tmp_path, settings)
        while cable.carried < 400:  # they have met, and compute: 16 steps of some frames each are yet to come
            assert all(process.poll() is None for process in processes), processes[0].communicate()
            time.sleep(0.01)
        cable.is_cut.set()
        said = [process.communicate(timeout=120) for process in processes]
        assert 0 not in [process.returncode for process in processes]
    assert not any("answers " in out for out, _ in said)
    assert "its host was lost" in said[0][1], said[0][1]
