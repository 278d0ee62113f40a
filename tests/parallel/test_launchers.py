"""Ranks that torchrun or Ray starts give the bits of those that the engine starts; a node that is lost is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launched import NODE, answers_of, free_port, prompts, ray_cluster, settings_of
from tiny_families import save_tiny, save_tokenizer

from attention_backends.toolchain import find_compiler
from engine import LLM, SamplingParams
from engine.errors import CoreDiedError, EngineError

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny("Llama", path)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of ranks of this host."""
    [found] = answers_of([sys.executable], tmp_path_factory.mktemp("mp"), settings_of(model))
    assert sum(len(tokens) for tokens, _ in found) == 1024
    return found


STAGES = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def expected_of_stages(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    [found] = answers_of([sys.executable], tmp_path_factory.mktemp("stages"), settings_of(model, **STAGES))
    return found


def test_torchrun_gives_the_same_bits_of_stages(model: Path, expected_of_stages: Any, tmp_path: Path) -> None:
    settings = settings_of(model, distributed_executor_backend="external_launcher", **STAGES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    assert answers_of(torchrun, tmp_path, settings) == [expected_of_stages]


@pytest.mark.parametrize("in_process", [True, False])
def test_torchrun_gives_the_same_bits(in_process: bool, model: Path, expected: Any, tmp_path: Path) -> None:
    settings = settings_of(model, distributed_executor_backend="external_launcher", in_process=in_process)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert answers_of(torchrun, tmp_path, settings) == [expected]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    with ray_cluster() as cluster:
        yield cluster


def on_ray(model: Path, strategy: str, **more: Any) -> dict[str, Any]:
    return settings_of(
        model, distributed_executor_backend="ray", ray_placement_strategy=strategy, in_process=False, **more
    )


@pytest.mark.parametrize("strategy", ["STRICT_SPREAD", "STRICT_PACK"])
def test_ray_gives_the_same_bits_over_two_nodes_and_on_one(
    strategy: str, model: Path, expected: Any, cluster: Any, tmp_path: Path
) -> None:
    """Over sockets where the nodes differ, through shared memory where they do not."""
    assert answers_of([sys.executable], tmp_path, on_ray(model, strategy)) == [expected]
    assert placement_states() <= {"REMOVED"}


def test_ray_gives_the_same_bits_of_stages_each_on_its_own_node(
    model: Path, expected_of_stages: Any, cluster: Any, tmp_path: Path
) -> None:
    assert answers_of([sys.executable], tmp_path, on_ray(model, "STRICT_SPREAD", **STAGES)) == [expected_of_stages]


def test_a_stage_that_no_node_has_room_for_is_told_with_what_each_has(model: Path, cluster: Any) -> None:
    says = r"asked for are 2 bundles of 4 CPUs, each for the 2 ranks of a stage, .*; the cluster has \w+: 2 CPUs, "
    with pytest.raises(EngineError, match=says):
        LLM(**{**on_ray(model, "PACK", distributed_timeout_seconds=2.0, **STAGES), "threads": 2})


def placement_states() -> set[str]:
    import ray
    from ray.util import placement_group_table

    ray.init(address="auto", log_to_driver=False, configure_logging=False)
    try:
        deadline = time.monotonic() + 60
        while (states := {group["state"] for group in placement_group_table().values()}) - {"REMOVED"}:
            assert time.monotonic() < deadline, states
            time.sleep(0.1)
        return states
    finally:
        ray.shutdown()


def test_what_the_cluster_does_not_have_is_said_with_what_it_has(model: Path, cluster: Any) -> None:
    settings = on_ray(model, "STRICT_SPREAD", distributed_timeout_seconds=2.0)
    says = r"asked for are 2 bundles of 3 CPUs \(STRICT_SPREAD\), .*; the cluster has \w+: 2 CPUs, .*; \w+: 2 CPUs, "
    with pytest.raises(EngineError, match=says):
        LLM(**{**settings, "threads": 3})


@pytest.mark.parametrize("strategy", ["STRICT_SPREAD", "STRICT_PACK"])
def test_a_rank_or_a_core_on_ray_that_is_killed_is_a_pause(strategy: str, model: Path, cluster: Any) -> None:
    """Ray takes back what a core had that is gone, and places the ranks of the next one."""
    with LLM(**on_ray(model, strategy)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        calm = [list(each.outputs[0].token_ids) for each in llm.generate(prompts(), params, use_tqdm=False)]
        for name in ("pageloom core", "pageloom rank"):
            kill = threading.Timer(0.5, lambda name=name: os.kill(process_of(name), signal.SIGKILL))
            kill.start()
            found = [list(each.outputs[0].token_ids) for each in llm.generate(prompts(), params, use_tqdm=False)]
            kill.join()
            assert found == calm, name
        assert llm.stats().core_deaths == 2
    assert placement_states() <= {"REMOVED"}


def process_of(name: str) -> int:
    """By what ps shows of it: below this one, or below an actor of Ray."""
    mine = psutil.Process().children(recursive=True)
    actors = [each for each in psutil.process_iter(["name"]) if each.info["name"].startswith("ray::RankAgent")]
    ranks = [child for actor in actors for child in actor.children(recursive=True)]
    [found] = {each.pid for each in (*mine, *ranks) if each.name().startswith(name)}
    return found


def test_a_node_that_is_removed_ends_the_replica_with_the_cause_and_the_next_is_placed_anew(
    model: Path, expected: Any, cluster: Any, tmp_path: Path
) -> None:
    nodes = [node for node in cluster.list_all_nodes() if not node.head]
    many = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with LLM(**on_ray(model, "STRICT_SPREAD", core_restarts=0)) as llm:
        removal = threading.Timer(0.5, cluster.remove_node, (nodes[0],), {"allow_graceful": False})
        removal.start()
        with pytest.raises(CoreDiedError, match=r"rank 1 \(process \d+ on [\d.]+\) died: its host was lost: .*$"):
            while True:
                llm.generate(prompts(), many, use_tqdm=False)
        removal.join()
    cluster.add_node(**NODE)
    assert answers_of([sys.executable], tmp_path, on_ray(model, "STRICT_SPREAD")) == [expected]


def test_the_documented_application_of_ray_serve_answers(model: Path, cluster: Any, tmp_path: Path) -> None:
    """As `serve run` runs it, with ranks that Ray places."""
    pytest.importorskip("ray.serve")
    options = ["max_model_len=128", "compile=none", "threads=1", "device=cpu", "kv_cache_memory=8MiB"]
    options += ["tensor_parallel_size=2", "distributed_executor_backend=ray", "cpus=0.1", f"model={model}"]
    examples, port = Path(__file__).parents[2] / "docs" / "examples", free_port()
    config = tmp_path / "serve.py"
    config.write_text(SERVE.format(examples=str(examples), port=port, options=options))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, str(config)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["usage"]["completion_tokens"] == 8


SERVE = """
import json, sys
sys.path.insert(0, {examples!r})
import httpx, ray
from ray import serve
from ray_serve import application

ray.init(address="auto", log_to_driver=False)
serve.start(http_options={{"host": "127.0.0.1", "port": {port}}})
serve.run(application(dict(option.split("=") for option in {options!r})))
body = {{"model": "any", "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}}
with httpx.Client(base_url="http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
    name = client.get("/v1/models").json()["data"][0]["id"]
    answer = client.post("/v1/completions", json={{**body, "model": name}})
    print(answer.text, file=sys.stderr)
serve.shutdown()
print(json.dumps(answer.json()), flush=True)
"""
