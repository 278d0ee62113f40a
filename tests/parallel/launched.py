"""Programs with an engine of two ranks, run as users run them; and a Ray cluster of two nodes on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from engine import LLM, SamplingParams
settings, prompts = json.loads(sys.argv[2]), json.loads(sys.argv[3])
with LLM(**settings) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
found = [[list(each.token_ids), [[at.logprob for at in step.values()] for step in each.logprobs]] for each in outputs]
print("answers", json.dumps(found), flush=True)
"""


def settings_of(model: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model),
        "device": "cpu",
        "max_model_len": 128,
        "compile": "none",
        "threads": 1,
        "tensor_parallel_size": 2,
        "kv_cache_memory": 8 << 20,
        **more,
    }


def prompts(count: int = 64) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [3 + (7 * i + j) % 240 for j in range(3 + i % 20)]} for i in range(count)]


def answers_of(launcher: list[str], where: Path, settings: dict[str, Any]) -> list[list[Any]]:
    """Tokens and log-probabilities, to the bit, of each process that answers."""
    program = where / "program.py"
    program.write_text(PROGRAM)
    command = [*launcher, str(program), json.dumps(sys.path), json.dumps(settings), json.dumps(prompts())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line.partition("answers ")[2]) for line in done.stdout.splitlines() if "answers " in line]


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Of two nodes with two CPUs each; this process and those that it starts are on the first one."""
    from ray.cluster_utils import Cluster

    kept = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        cluster.add_node(**NODE)
        os.environ["RAY_ADDRESS"] = cluster.address
        yield cluster
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(kept)


NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
