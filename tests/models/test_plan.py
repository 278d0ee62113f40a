"""What a model needs, told before it is there: the figures of the engine that loads it, and advice that holds."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gguf_models import write_gguf
from loopback_hub import Home, serving_hub
from tiny_models import make_model

from attention_backends.toolchain import find_compiler
from engine import LLM, EngineArgs
from engine.errors import ConfigError, UnsupportedModelError
from engine.machine import CudaDevice, Machine
from engine.plan import ModelPlan, plan_of, resolve_with_plan
from entrypoints.options import engine_args
from entrypoints.serve import build_parser, main

MACHINE = Machine(physical_cores=2, memory_bytes=1 << 34, home="/home/user", working_directory="/data")
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
"""Llama 3 8B: 8.03 billion weights"""


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Of eight billion weights the description alone, and a file of their size without content."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    size = 16 << 30
    header = json.dumps({"weights": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    return tmp_path


def small(gib: float) -> dict[str, Any]:
    size = int(gib * (1 << 30))
    return {"machine": msgspec.structs.replace(MACHINE, memory_bytes=size), "free_bytes": size}


def taken(advice: str, model: Path, *options: str) -> EngineArgs:
    """As somebody would who follows it."""
    words = [*options]
    if advice.startswith("no "):
        place = words.index(advice.removeprefix("no "))
        del words[place : place + 2]
    else:
        words += advice.split()
    options_given = build_parser().parse_args([str(model), "--device", "cpu", *words])
    return engine_args(options_given, str(model))


def save(case: str, path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    make_model(case).save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))).save_pretrained(path)


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"max_model_len": 64, "max_num_seqs": 4}])
@pytest.mark.parametrize("case", ["llama", "gemma3_windows"])
def test_the_figures_are_those_of_the_engine(case: str, settings: dict[str, Any], tmp_path: Path) -> None:
    save(case, tmp_path)
    args = EngineArgs(model=str(tmp_path), device="cpu", compile="none", kv_cache_memory=1 << 22, **settings)
    plan = plan_of(args)
    with LLM.from_args(args) as llm:
        ready, config = llm.ready, llm.config
    assert plan.fits and plan.advice == []
    assert (plan.num_blocks, plan.block_size) == (ready.num_blocks, ready.block_size)
    assert plan.max_model_len == config.model.max_model_len
    assert (plan.dtype, plan.quantization) == (config.model.dtype, config.model.quantization)
    same = ("weights", "activations", "KV")
    told, real = (
        [line for line in table.splitlines() if line.startswith(same)] for table in (plan.table, ready.ledger)
    )
    assert told == real
    assert plan.file_bytes == (tmp_path / "model.safetensors").stat().st_size and plan.download_bytes == 0


def plan_like_the_engine(model: Path, division: dict[str, Any]) -> ModelPlan:
    """The plan, whose figures are those of a start's ledger."""
    small: dict[str, Any] = {"kv_cache_memory": 1 << 22, "max_model_len": 64}
    args = EngineArgs(model=str(model), device="cpu", compile="none", threads=1, **small, **division)
    plan = plan_of(args)
    with LLM.from_args(args) as llm:
        ledger = llm.ready.ledger
    same = ("weights", "activations", "KV")
    told, real = ([line for line in table.splitlines() if line.startswith(same)] for table in (plan.table, ledger))
    assert told == list(dict.fromkeys(real))  # replicas have a ledger each where the machine's free memory has changed
    return plan


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("case", "division"),
    [
        ("llama_tied", {"pipeline_parallel_size": 2}),
        pytest.param("llama", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_figures_of_ranks_are_those_of_the_engine(case: str, division: dict[str, int], tmp_path: Path) -> None:
    """A tied table is in two stages; stages but the last one make no logits."""
    save(case, tmp_path)
    plan = plan_like_the_engine(tmp_path, division)
    assert [rank.stage for rank in plan.ranks] == sorted([0, 1] * (len(plan.ranks) // 2))
    assert plan.ranks[0].layers[1] == plan.ranks[-1].layers[0]
    first, last = plan.ranks[0], plan.ranks[-1]
    assert first.activation_bytes < last.activation_bytes
    assert f"{len(plan.ranks)} processes compute it" in plan.text() and "stage 1, part 0: layers" in plan.text()


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "division"),
    [
        ("llama", {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}),
        ("llama", {"tensor_parallel_size": 2, "speculative_config": {"method": "draft_model"}}),
        ("qwen3_moe", {"data_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}),
    ],
)
def test_what_is_exchanged_and_drafts_are_in_the_figures(case: str, division: dict[str, Any], tmp_path: Path) -> None:
    """Each rank has all of a draft."""
    save(case, tmp_path)
    if draft := division.get("speculative_config"):
        division = {**division, "speculative_config": {**draft, "model": str(tmp_path)}}
    plan_like_the_engine(tmp_path, division)


def test_what_is_exchanged_takes_memory(large: Path) -> None:
    args = EngineArgs(model=str(large), device="cpu", max_num_batched_tokens=512, tensor_parallel_size=2)
    heads = plan_of(args, **small(64)).ranks[0]
    positions = plan_of(msgspec.structs.replace(args, decode_context_parallel_size=2), **small(64)).ranks[0]
    tokens, all_heads, found = 512, 32 + 2 * 8, 4 * (128 + 1) * (32 + 32)
    assert positions.activation_bytes - heads.activation_bytes == tokens * (3 * 2 * 128 * all_heads + found)
    assert positions.weight_bytes == heads.weight_bytes


def test_a_random_model_has_no_file(tmp_path: Path) -> None:
    make_model("qwen3_moe").config.save_pretrained(tmp_path)
    args = EngineArgs(
        model=str(tmp_path), device="cpu", load_format="dummy", tensor_parallel_size=2, enable_expert_parallel=True
    )
    plan = plan_of(args, **small(4))
    assert plan.fits and len(plan.ranks) == 2
    assert "holds no weights" in plan_of(msgspec.structs.replace(args, load_format="auto"), **small(4)).problems[0]
    elsewhere = msgspec.structs.replace(args, expert_placement=str(tmp_path / "none.json"))
    assert "expert_placement: " in plan_of(elsewhere, **small(4)).problems[0]


def test_more_threads_than_cores_are_told_of(large: Path) -> None:
    args = EngineArgs(model=str(large), device="cpu", max_model_len=8192, threads=2, data_parallel_size=2)
    assert "4 compute threads for 2 cores" in plan_of(args, **small(128)).text()
    assert not plan_of(msgspec.structs.replace(args, threads=1), **small(128)).warnings


def test_of_gpus_the_fullest_decides(large: Path) -> None:
    gpu = CudaDevice(name="Pretend", capability=(9, 0), memory_bytes=12 << 30)
    machine = msgspec.structs.replace(MACHINE, cuda=(gpu, gpu))
    args = EngineArgs(model=str(large), max_model_len=4096)
    assert not plan_of(args, machine).fits
    plan = plan_of(msgspec.structs.replace(args, tensor_parallel_size=2), machine)
    assert plan.fits and len(plan.ranks) == 2 and (plan.weight_bytes or 0) < 9 << 30


def test_ranks_that_others_place_may_have_a_host_each(large: Path) -> None:
    args = EngineArgs(model=str(large), device="cpu", max_model_len=4096, pipeline_parallel_size=2)
    assert not plan_of(args, **small(16)).fits
    elsewhere = msgspec.structs.replace(args, distributed_executor_backend="ray")
    plan = plan_of(elsewhere, **small(16))
    assert plan.fits and len(plan.ranks) == 2, plan.text()


def test_a_machine_that_is_large_enough(large: Path) -> None:
    plan = plan_of(EngineArgs(model=str(large), device="cpu", max_model_len=8192), **small(64))
    assert plan.fits and plan.problems == [] and plan.text().endswith("it fits")
    assert plan.weight_bytes is not None and abs(plan.weight_bytes / (2 * 8.03e9) - 1) < 0.01
    assert plan.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("gib", "options", "among"),
    [
        (12, [], "--quantization int8 --max-model-len"),
        (24, [], "--max-model-len"),
        (12, ["--max-model-len", "4096"], "--quantization int8"),
        (7, ["--max-model-len", "4096"], "--quantization int4"),
        (64, ["--kv-cache-memory", "60GiB"], "no --kv-cache-memory"),
        (20, ["--max-model-len", "30000"], "--kv-cache-dtype int8"),
    ],
)
def test_what_would_make_it_fit_does(large: Path, gib: float, options: list[str], among: str) -> None:
    args = engine_args(build_parser().parse_args([str(large), "--device", "cpu", *options]), str(large))
    plan = plan_of(args, **small(gib))
    assert not plan.fits and plan.problems and f"it would with {plan.advice[0]}" in plan.text()
    assert any(advice.startswith(among) for advice in plan.advice), plan.advice
    for advice in plan.advice:
        assert plan_of(taken(advice, large, *options), **small(gib)).fits, advice
    lengths = [advice for advice in plan.advice if "--max-model-len" in advice]
    for advice in lengths:
        *words, length = advice.split()
        longer = " ".join([*words, str(int(length) + 16)])
        assert not plan_of(taken(longer, large, *options), **small(gib)).fits


def test_what_nothing_makes_fit_has_no_advice(large: Path) -> None:
    plan = plan_of(EngineArgs(model=str(large), device="cpu"), **small(2))
    assert not plan.fits and plan.advice == [] and plan.weight_bytes and "weights" in plan.problems[0]


def test_on_a_gpu(large: Path) -> None:
    for gib, fits in ((80, True), (16, False)):
        gpu = CudaDevice(name="Pretend", capability=(9, 0), memory_bytes=gib << 30)
        machine = msgspec.structs.replace(MACHINE, cuda=(gpu,))
        plan = plan_of(EngineArgs(model=str(large), max_model_len=4096), machine)
        assert (plan.fits, plan.device, plan.memory_free) == (fits, "Pretend", gib << 30)
        assert "CUDA graphs and the workspace of attention come on top" in plan.text()
        assert fits or any("quantization" in advice for advice in plan.advice)


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a directory"):
        plan_of(EngineArgs(model=str(tmp_path), device="cpu"))
    (tmp_path / "config.json").write_text(json.dumps({**LARGE, "architectures": ["Nobody"], "model_type": "nobody"}))
    with pytest.raises(UnsupportedModelError):
        plan_of(EngineArgs(model=str(tmp_path), device="cpu"))
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    plan = plan_of(EngineArgs(model=str(tmp_path), device="cpu", max_model_len=64), **small(64))
    assert not plan.fits and "holds no weights" in plan.problems[0]


@pytest.mark.parametrize("damage", ["cut", "empty", "pointer", "shard"])
def test_files_that_are_not_whole_do_not_fit(damage: str, large: Path) -> None:
    file = large / "model.safetensors"
    if damage == "cut":
        os.truncate(file, 8 << 30)
    elif damage == "shard":
        file.rename(large / "model-00001-of-00002.safetensors")
        shards = {"weights": "model-00001-of-00002.safetensors", "lost": "model-00002-of-00002.safetensors"}
        (large / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    else:
        file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid" if damage == "pointer" else b"")
    plan = plan_of(EngineArgs(model=str(large), device="cpu", max_model_len=64), **small(64))
    says = "00002-of-00002.safetensors: is missing" if damage == "shard" else "model.safetensors: damaged or cut short"
    assert not plan.fits and says in plan.problems[0]


@pytest.mark.parametrize("head_dim", [8, 24, 32, 40])
def test_heads_of_half_vectors_are_kept_in_whole_ones(head_dim: int, tmp_path: Path) -> None:
    """What `kv_cache_memory` cuts the context to is what the engine then has room for."""
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"head_dim": head_dim, "max_position_embeddings": 65536}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings: dict[str, Any] = {"model": str(tmp_path), "device": "cpu", "kv_cache_memory": 1 << 20, "compile": "none"}
    plan = plan_of(EngineArgs(**settings, load_format="dummy"))
    with LLM(**settings, load_format="dummy") as llm:
        ready = llm.ready
        assert (ready.num_blocks, llm.config.model.max_model_len) == (plan.num_blocks, plan.max_model_len)
    assert plan.kv_bytes_per_token is not None and plan.kv_bytes_per_token % (16 * 2) == 0


def test_the_command(tmp_path: Path, large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--device", "cpu", "--quantization", "int4", "--max-model-len", "16"]
    status = main([str(large), "--check", "--json", *settings, "--max-num-seqs", "1"])
    plan = msgspec.json.decode(capsys.readouterr().out, type=ModelPlan)
    assert status == (0 if plan.fits else 1) and plan.quantization == "int4"
    assert main([str(large), "--check", *settings, "--kv-cache-memory", "1KiB"]) == 1
    assert "it does not fit: kv_cache_memory" in capsys.readouterr().out
    assert main([str(tmp_path / "none"), "--check", "--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["fits"] is False and "neither a directory" in told.err
    with pytest.raises(SystemExit):
        main([str(large), "--json"])


PLAN = """
import sys, msgspec
from engine import EngineArgs
from engine.plan import plan_of
draft = {"method": "draft_model", "model": sys.argv[2]} if sys.argv[2:] else {}
print(msgspec.json.encode(plan_of(EngineArgs(model=sys.argv[1], device="cpu", speculative_config=draft))).decode())
"""
RESOLVE = """
import logging, sys
from engine import EngineArgs
from engine.plan import resolve_with_plan
logging.basicConfig(level="INFO", stream=sys.stdout)
resolve_with_plan(EngineArgs(model=sys.argv[1], device="cpu", max_model_len=64))
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    root = tmp_path / "hub"
    (root / "org" / "plain").mkdir(parents=True)
    (root / "org" / "gguf").mkdir()
    model = make_model("llama")
    model.save_pretrained(root / "org" / "plain")
    (root / "org" / "plain" / "tokenizer.json").write_text("{}")
    write_gguf(model, root / "org" / "gguf" / "Tiny-F32.gguf")
    with serving_hub(root) as hub:
        yield Home(hub, tmp_path / "home")


def test_a_link_to_weights_that_are_gone_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "pruned")
    with pytest.raises(ConfigError, match=r"model\.safetensors: it is a link to a file that is gone: fetch"):
        plan_of(EngineArgs(model=str(tmp_path)))


@pytest.mark.parametrize(("name", "file"), [("org/plain", "model.safetensors"), ("org/gguf:F32", "Tiny-F32.gguf")])
def test_of_a_hubs_model_the_plan_comes_before_the_weights(home: Home, name: str, file: str) -> None:
    repo = home.hub.root / name.partition(":")[0]
    plan = msgspec.json.decode(home.run(PLAN, name), type=ModelPlan)
    assert plan.fits and plan.model == name and plan.disk_free and plan.weight_bytes
    assert plan.file_bytes == (repo / file).stat().st_size
    assert plan.download_bytes >= plan.file_bytes
    assert not [each for each in home.place.rglob("*") if each.name == file]
    log = home.run(RESOLVE, name)
    assert "before it is fetched" in log and "it fits" in log and log.index("it fits") < log.index("fetching org/")
    assert [each for each in home.place.rglob("*") if each.name == file]
    local = msgspec.json.decode(home.run(PLAN, name), type=ModelPlan)
    assert local.download_bytes == 0 and local.weight_bytes == plan.weight_bytes
    assert "before it is fetched" not in home.run(RESOLVE, name)


def test_a_draft_of_a_hub_counts_too(home: Home) -> None:
    alone = msgspec.json.decode(home.run(PLAN, "org/plain"), type=ModelPlan)
    both = msgspec.json.decode(home.run(PLAN, "org/plain", "org/plain"), type=ModelPlan)
    assert both.fits and both.weight_bytes == 2 * (alone.weight_bytes or 0)
    assert both.kv_bytes_per_token == 2 * (alone.kv_bytes_per_token or 0)
    assert both.download_bytes == 2 * alone.file_bytes  # its texts have come with the first plan


def test_a_path_logs_no_plan(large: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        resolve_with_plan(EngineArgs(model=str(large), device="cpu", quantization="int4", max_model_len=64))
    assert "before it is fetched" not in caplog.text
