"""`engine-bench profile` on a tiny random model: parts add up, floors are exact, and what cannot be done is refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_server import save_model
from shared_natives import cache_with_natives
from transformers import Qwen3MoeConfig

from engine.config import EngineArgs
from engine.errors import ConfigError
from engine.observability.step_work import Ceilings
from entrypoints.bench import profile_device
from entrypoints.bench.cli import main
from entrypoints.bench.profile_cases import (
    CaseFigures,
    PartFigures,
    decode_case,
    prefill_case,
    sampling_params,
    workload_case,
)
from entrypoints.bench.profile_engine import ProfiledEngine
from entrypoints.bench.profile_plot import draw

sys.path.append(str(Path(__file__).parents[1] / "pretend_gpu"))

HIDDEN, INNER, VOCAB, LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 64, 128, 300, 2, 4, 2, 16, 16
QKV = HIDDEN * (HEADS + 2 * KV_HEADS) * DIM
LAYER = QKV + HIDDEN * HIDDEN + 3 * HIDDEN * INNER
"""matrix elements of a layer"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("profiled") / "tiny", bos=False))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cache_with_natives(tmp_path_factory.mktemp("cache"))


def test_what_several_ranks_compute_is_not_profiled(model: str) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size: what is profiled"):
        ProfiledEngine(EngineArgs(model=model, device="cpu", tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="data_parallel_size: what is profiled"):
        ProfiledEngine(EngineArgs(model=model, device="cpu", data_parallel_size=2))


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_device, "MAIN_MEMORY_BUFFER_BYTES", 8 << 20)
    monkeypatch.setattr(profile_device, "LEAST_BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(profile_device, "_BUDGET_S", 0.02)


def command(model: str, cache: Path, *more: str, compile: str = "none") -> list[str]:
    settings = ["--compile", compile, "--load-format", "dummy", "--dtype", "float32", "--device", "cpu"]
    memory = ["--kv-cache-memory", "16MiB", "--threads", "1", "--cache-dir", str(cache)]
    return ["profile", model, *settings, *memory, "--attention-backend", "reference", *more]


def by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in result["parts"]}


def check_sums(result: dict[str, Any]) -> None:
    parts = sum(part["ms"] for part in result["parts"])
    assert parts + result["unaccounted_ms"] == pytest.approx(result["wall_ms"])
    assert abs(result["unaccounted_ms"]) < 0.001 * result["wall_ms"]  # on a CPU one clock measures all
    assert result["floor_ms"] == pytest.approx(sum(part["floor_ms"] or 0.0 for part in result["parts"]))
    assert 0 < result["floor_ms"] < result["wall_ms"]
    assert all(part["ms"] >= 0 for part in result["parts"])


def test_parts_add_up_and_floors_follow_from_bytes_and_operations(
    model: str, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = ["--batch", "1,3", "--context", "40", "--prompt", "50", "--steps", "8", "--reps", "3"]
    file = tmp_path / "profile.json"
    assert main(command(model, cache, *cases, "--json", str(file), "--sampling", '{"top_k": 5}')) == 0
    out = capsys.readouterr().out
    answer = json.loads(out.splitlines()[-1])
    assert json.loads(file.read_text()) == answer and answer["command"] == "profile"
    one, three, prefill = answer["results"]
    assert [r["case"] for r in answer["results"]] == [
        "decode, batch 1, context 40",
        "decode, batch 3, context 40",
        "prefill, 50 tokens",
    ]
    for result in answer["results"]:
        check_sums(result)
        assert result["case"] in out and 0 < result["fastest_ms"] <= result["undisturbed_ms"]
        bandwidth = result["ceilings"]["read_bytes_per_s"]
        rate = result["ceilings"]["ops_per_s"]["float32"]
        for part in result["parts"]:
            if part["floor_ms"] is not None:
                assert part["floor_ms"] >= 1e3 * max(part["read_bytes"] / bandwidth, part["ops"] / rate) * 0.999
    for result, batch in ((one, 1), (three, 3)):
        parts = by_name(result)
        assert result["units"] == 8 and result["tokens_per_unit"] == batch and abs(result["context"] - 40) < 9
        assert parts["attention"]["calls"] == LAYERS and parts["hand-over"]["calls"] == 1
        assert parts["model"]["ops"] == 2 * LAYERS * LAYER * batch
        norms = (2 * LAYERS + 1) * HIDDEN
        rows = batch * (HIDDEN + DIM)  # of embeddings and of the rope table
        assert parts["model"]["read_bytes"] == 4 * (LAYERS * LAYER + norms + rows)
        assert parts["logits"]["read_bytes"] == 4 * HIDDEN * VOCAB  # tied embeddings, read whole
        assert parts["sampling"]["read_bytes"] == 4 * VOCAB * batch
        kv = 2 * LAYERS * KV_HEADS * DIM * 4
        assert parts["attention"]["read_bytes"] == pytest.approx(kv * result["context"] * batch)
        assert set(parts) >= {"plan", "submit", "complete", "publish"}  # one thread plans and computes
        assert not result["beside_ms"]
    parts = by_name(prefill)
    assert prefill["units"] == 3 and prefill["per"] == "prompt" and prefill["tokens_per_unit"] == 50
    assert parts["attention"]["ops"] == LAYERS * 4 * HEADS * DIM * (50 * 51 // 2)
    assert "hand-over" not in parts  # nothing follows a prompt's only step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_mixture_a_token_reads_its_own_experts(
    dtype: str, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experts, chosen, inner = 8, 2, 32
    shape = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "moe_intermediate_size": inner}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM}
    config = Qwen3MoeConfig(**shape, **heads, num_experts=experts, num_experts_per_tok=chosen)
    save_model(tmp_path, bos=False)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    more = ["--batch", "1", "--context", "20", "--prompt", "20", "--steps", "4", "--reps", "1", "--dtype", dtype]
    assert main(command(str(tmp_path), cache, *more)) == 0
    decode, _ = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    of_all = QKV + HIDDEN * HIDDEN + HIDDEN * experts
    model = by_name(decode)["model"]
    assert model["ops"] == 2 * LAYERS * (of_all + chosen * 3 * HIDDEN * inner)
    size = {"float32": 4, "bfloat16": 2}[dtype]
    least = size * LAYERS * (of_all + chosen * 3 * HIDDEN * inner)
    assert least < model["read_bytes"] < 1.1 * least + size * LAYERS * 4 * HIDDEN + 2048


def test_a_long_prompt_is_one_unit_of_several_steps(
    model: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--prompt", "100", "--reps", "2", "--max-num-batched-tokens", "32", "--max-num-seqs", "4"]
    assert main(command(model, cache, *more)) == 0
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    check_sums(result)
    assert result["steps_per_unit"] == 4 and result["tokens_per_unit"] == 100
    assert by_name(result)["hand-over"]["calls"] == 3
    assert by_name(result)["model"]["ops"] == 2 * LAYERS * LAYER * 100


@pytest.mark.slow
def test_compiled_pieces_are_named_by_their_matrices(
    model: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(model, cache, "--batch", "2", "--context", "30", "--steps", "4", compile="pieces")) == 0
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    check_sums(result)
    parts = by_name(result)
    pieces = ["embed_tokens + qkv", "o + gate_up + down + qkv", "o + gate_up + down"]
    assert [name for name in parts if name.split()[0] in ("embed_tokens", "o")] == pieces
    assert sum(parts[piece]["ops"] for piece in pieces) == 2 * LAYERS * LAYER * 2
    assert parts["attention"]["calls"] == LAYERS


def test_a_case_that_cannot_be_run_is_refused_with_the_setting(model: str, cache: Path) -> None:
    args = EngineArgs(
        model=model,
        compile="none",
        load_format="dummy",
        dtype="float32",
        device="cpu",
        kv_cache_memory=128 << 10,
        max_num_seqs=4,
        attention_backend="reference",
        cache_dir=str(cache),
    )
    with ProfiledEngine(args) as engine:
        for batch, context, setting in ((1, 250, "--max-model-len"), (5, 9, "--max-num-seqs"), (4, 99, "--kv-cache")):
            with pytest.raises(ValueError, match=setting):
                decode_case(engine, batch, context, 8)
        with pytest.raises(ValueError, match="--max-model-len"):
            prefill_case(engine, 300, 1)
        with pytest.raises(ValueError, match="arrival"):
            workload_case(engine, "W6", 1)


@pytest.mark.parametrize("given", [{"top_q": 1}, {"top_p": 7.0}, {"top_k": "many"}])
def test_sampling_that_does_not_exist_is_refused(given: dict[str, object]) -> None:
    assert sampling_params({"top_k": 5}, 3).top_k == 5 and sampling_params({}, 3).temperature == 0.0
    with pytest.raises(ValueError, match=r"top_[pqk]|\$"):
        sampling_params(given, 3)


@pytest.mark.parametrize(
    "more",
    [["--prompt", "5", "--steps", "3"], ["--batch", "1", "--reps", "3"], ["--batch", "1", "--workload-reps", "2"]],
)
def test_an_option_without_effect_is_refused(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "no-such-model", *more])
    assert "has no effect" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    with pytest.raises(SystemExit):
        main(["profile", "no-such-model", "--plot", str(tmp_path / "x.png")])
    assert "pageloom[bench]" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "name"), [("--json", "no/x.json"), ("--plot", "no/x.png"), ("--plot", "x.doc")])
def test_a_file_that_could_not_be_written_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, name: str
) -> None:
    with pytest.raises(SystemExit):
        main(["profile", "no-such-model", option, str(tmp_path / name)])
    assert name.rsplit("/", 1)[-1] in capsys.readouterr().err


def test_every_part_and_the_floor_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")

    def part(name: str, ms: float, floor_ms: float | None) -> PartFigures:
        return PartFigures(name=name, ms=ms, calls=1, floor_ms=floor_ms, read_bytes=1, ops=1)

    parts = [part("qkv", 5.0, 3.0), part("attention", 2.0, 1.5), part("inputs", 1.0, None)]
    case = CaseFigures(
        case="decode, batch 7, context 9",
        per="step",
        units=8,
        wall_ms=9.0,
        undisturbed_ms=8.75,
        fastest_ms=8.5,
        floor_ms=4.5,
        unaccounted_ms=1.0,
        parts=parts,
        beside_ms={},
        steps_per_unit=1,
        tokens_per_unit=7,
        context=9,
    )
    ceilings = Ceilings(read_bytes_per_s=4.2e10, main_memory_bytes_per_s=3e10, ops_per_s={"bfloat16": 9.9e11})
    draw([case], ceilings, tmp_path / "x.svg")
    import matplotlib

    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text
    draw([case], ceilings, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    for expected in ("qkv", "attention", "inputs", "unaccounted", "9.00 ms per step", "floor 4.50 ms", "42 GB/s"):
        assert expected in text


def test_a_gpu_is_timed_by_events_of_its_stream() -> None:
    from pretend_gpu import pretend_torch

    with pretend_torch():
        clock = profile_device.CudaClock()
        stamps = [clock.stamp() for _ in range(3)]
        read = clock.read(stamps)
        assert read[0] == 0 and read == sorted(read) and len(read) == 3
        assert clock.read([]) == []
        with pytest.raises(TypeError, match="another clock"):
            clock.read([5])


def test_sixteen_bits_are_multiplied_as_float32_where_that_is_faster(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {"float32": 9.0, "bfloat16": 1.0, "int8": 30.0}
    monkeypatch.setattr(profile_device, "_multiply_rate", lambda name, device: rates[name])
    found = profile_device.measure_ceilings(torch.device("cpu"), 1, 1 << 20, {"bfloat16", "int8"}, cache)
    assert found.ops_per_s == {"bfloat16": 9.0, "int8": 30.0}


def test_ceilings_are_the_best_of_several_ways(cache: Path) -> None:
    found = profile_device.measure_ceilings(torch.device("cpu"), 1, 1 << 20, {"float32", "bfloat16", "int8"}, cache)
    assert found.ops_per_s["int8"] >= found.ops_per_s["bfloat16"] >= found.ops_per_s["float32"] > 0
    assert found.read_bytes_per_s > 1e8 and found.main_memory_bytes_per_s > 1e8
    slower = Ceilings(read_bytes_per_s=1.0, main_memory_bytes_per_s=1e15, ops_per_s={**found.ops_per_s, "int8": 1e15})
    best = profile_device.best_of(slower, found)
    assert (best.read_bytes_per_s, best.read_method) == (found.read_bytes_per_s, found.read_method)
    assert best.main_memory_bytes_per_s == best.ops_per_s["int8"] == 1e15
    assert best.ops_per_s["float32"] == found.ops_per_s["float32"]
    assert found.read_method in ("probe", "torch.sum", "torch.dot")
