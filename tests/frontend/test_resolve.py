"""`resolve` is pure, chooses documented defaults, and refuses what cannot hold, naming the settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from tiny_front import MACHINE, MAX_POSITION

from engine.config import EngineArgs, EngineConfig
from engine.errors import ConfigError
from engine.kv_budget import kv_bytes_per_token
from engine.machine import CudaDevice, Machine, probe_machine
from engine.models.description import ModelDescription, describe
from engine.models.quantization import StoredFormat
from engine.models.spec import LayerSpec
from engine.resolve import resolve, resolve_here
from engine.sizes import parse_size
from engine.vllm_names import StoredMethod

H100 = CudaDevice(name="H100", capability=(9, 0), memory_bytes=80 * 2**30)
T4 = CudaDevice(name="T4", capability=(7, 5), memory_bytes=16 * 2**30)
PER_TOKEN = 2 * 2 * 2 * 16 * 2  # keys and values, layers, KV heads, head size, bytes of bfloat16


def machine(*cuda: CudaDevice) -> Machine:
    return msgspec.structs.replace(MACHINE, cuda=cuda)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> ModelDescription:
    return describe(str(tiny_model))


def _resolve(model: ModelDescription, *cuda: CudaDevice, **settings: Any) -> EngineConfig:
    return resolve(EngineArgs(model="models/tiny-llama", **settings), model, machine(*cuda))


def test_why_there_is_no_gpu_is_said_where_one_was_asked_for(model: ModelDescription) -> None:
    without = msgspec.structs.replace(machine(), cuda_problem="the driver is too old")
    with pytest.raises(ConfigError, match=r"no CUDA device here \(the driver is too old\); set device='cpu'"):
        resolve(EngineArgs(model="models/tiny-llama", device="cuda"), model, without)


def test_defaults_on_a_cpu(model: ModelDescription) -> None:
    config = _resolve(model)
    assert (config.device.kind, config.device.threads, config.model.dtype) == ("cpu", 4, "bfloat16")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (128, 2048)
    assert config.scheduler.max_mixed_prefill_tokens == 1024
    assert (config.compile.mode, config.compile.graphs, config.cache.block_size) == ("pieces", "none", 16)
    assert config.model.max_model_len == config.scheduler.max_model_len == MAX_POSITION
    assert config.model.path == config.model.tokenizer == "/data/models/tiny-llama"
    assert (config.model.served_name, config.compile.cache_dir) == ("tiny-llama", "/home/user/.cache/pageloom")


@pytest.mark.parametrize(
    ("hidden", "dtype", "tokens"),
    [(576, "bfloat16", 2048), (576, "float32", 512), (768, "bfloat16", 1024), (4096, "bfloat16", 256)],
)
def test_a_step_on_a_cpu_is_bounded_by_its_work(model: ModelDescription, hidden: int, dtype: Any, tokens: int) -> None:
    """SmolLM2's width and depth, one a third wider, one of 8B: half a second on two cores, or 256 tokens."""
    assert model.spec is not None
    heads, replace = hidden // 64, msgspec.structs.replace
    mixer = replace(model.spec.layers[0].mixer, num_heads=heads, num_kv_heads=heads // 3, head_dim=64)
    mlp = replace(model.spec.layers[0].mlp, intermediate_size=hidden * 8 // 3)
    spec = replace(model.spec, hidden_size=hidden, layers=(LayerSpec(mixer=mixer, mlp=mlp),) * 30)
    described = replace(model, spec=spec, facts=spec.facts)
    scheduler = _resolve(described, dtype=dtype).scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_mixed_prefill_tokens) == (tokens, max(tokens // 2, 256))


def test_defaults_on_a_gpu(model: ModelDescription) -> None:
    config = _resolve(model, H100)
    assert (config.device.kind, config.model.dtype) == ("cuda", "bfloat16")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (256, 8192)
    assert config.scheduler.max_mixed_prefill_tokens is None
    assert _resolve(model, H100, device="cpu").device.kind == "cpu"


def test_graphs_are_chosen_where_a_gpu_has_them(model: ModelDescription) -> None:
    assert _resolve(model, H100).compile.graphs == "auto"
    assert _resolve(model, H100, compile="none").compile.graphs == "auto"
    assert _resolve(model, H100, graphs="none").compile.graphs == "none"
    assert _resolve(model, graphs="auto").compile.graphs == "none"
    assert _resolve(model, H100, debug_sync=True).device.debug_sync
    assert not _resolve(model, H100).device.debug_sync


def test_the_cache_keeps_the_models_dtype_or_fp8_on_a_gpu(model: ModelDescription) -> None:
    assert _resolve(model).cache.dtype == "bfloat16"
    assert _resolve(model, dtype="float32").cache.dtype == "float32"
    half = _resolve(model, H100, kv_cache_memory=PER_TOKEN * 32)
    eighth = _resolve(model, H100, kv_cache_memory=PER_TOKEN * 32, kv_cache_dtype="fp8")
    assert eighth.cache.dtype == "float8_e4m3fn"
    assert eighth.model.max_model_len == 2 * half.model.max_model_len == 64
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' needs device='cuda'"):
        _resolve(model, kv_cache_dtype="fp8")
    small = _resolve(model, kv_cache_memory=PER_TOKEN * 32, kv_cache_dtype="int8")
    assert small.cache.dtype == "int8"
    assert 48 <= small.model.max_model_len < 64, "half the bytes, and a scale"
    assert _resolve(model, kv_cache_dtype="bf16").cache.dtype == "bfloat16"
    for machine, dtype in ((H100, "bfloat16"), (None, "float32")):
        with pytest.raises(ConfigError, match="kv_cache_dtype='int8' needs"):
            _resolve(model, *([machine] if machine else []), kv_cache_dtype="int8", dtype=dtype)
    with pytest.raises(ConfigError, match="kv_cache_dtype='bf16' needs"):
        _resolve(model, kv_cache_dtype="bf16", dtype="float32")
    with pytest.raises(ConfigError, match="needs dtype='bfloat16' or 'float16'"):
        _resolve(model, H100, kv_cache_dtype="fp8", dtype="float32")


@pytest.mark.parametrize(
    ("stored", "cuda", "chosen"),
    [
        ("float32", (), "bfloat16"),
        ("float16", (), "bfloat16"),
        ("float16", (H100,), "float16"),
        ("float32", (H100,), "bfloat16"),
        ("bfloat16", (T4,), "float16"),
    ],
)
def test_auto_dtype_is_the_nearest_that_the_device_has(
    model: ModelDescription, stored: str, cuda: tuple[CudaDevice, ...], chosen: str
) -> None:
    described = msgspec.structs.replace(model, default_dtype=stored)
    assert resolve(EngineArgs(model="m"), described, machine(*cuda)).model.dtype == chosen


@pytest.mark.parametrize(
    ("cuda", "settings", "names"),
    [
        ((), {"device": "cuda"}, ["device"]),
        ((), {"dtype": "float16"}, ["dtype", "device"]),
        ((T4,), {"dtype": "bfloat16"}, ["dtype", "7.5"]),
        ((H100,), {"threads": 2}, ["threads", "device"]),
        ((), {"graphs": "piecewise"}, ["graphs", "device"]),
        ((H100,), {"graphs": "piecewise", "compile": "none"}, ["graphs", "compile"]),
        ((), {"debug_sync": True}, ["debug_sync", "device"]),
        ((), {"max_model_len": MAX_POSITION + 1}, ["max_model_len", str(MAX_POSITION)]),
        ((), {"max_model_len": 0}, ["max_model_len"]),
        ((), {"max_num_seqs": 64, "max_num_batched_tokens": 32}, ["max_num_batched_tokens", "max_num_seqs"]),
        (
            (),
            {"max_num_batched_tokens": 256, "max_mixed_prefill_tokens": 257},
            ["max_mixed_prefill_tokens", "257", "256"],
        ),
        ((), {"max_mixed_prefill_tokens": 0}, ["max_mixed_prefill_tokens"]),
        ((), {"kv_cache_memory": PER_TOKEN * 15}, ["kv_cache_memory"]),
        ((), {"kv_cache_memory": PER_TOKEN * 64, "max_model_len": 65}, ["kv_cache_memory", "max_model_len"]),
        ((), {"kv_cache_memory": 2**40}, ["kv_cache_memory"]),
        ((), {"memory_fraction": 0.0}, ["memory_fraction"]),
        ((), {"block_size": 12}, ["block_size"]),
        ((), {"max_logprobs": -1}, ["max_logprobs"]),
        ((), {"seed": 2**63}, ["seed"]),
        ((), {"max_waiting": 0}, ["max_waiting"]),
    ],
)
def test_contradictions_are_refused_by_name(
    model: ModelDescription, cuda: tuple[CudaDevice, ...], settings: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        _resolve(model, *cuda, **settings)
    for name in names:
        assert name in str(caught.value)


def test_the_context_shrinks_to_what_the_given_cache_holds(model: ModelDescription) -> None:
    assert kv_bytes_per_token(model.facts.layers, "bfloat16") == PER_TOKEN
    assert _resolve(model, kv_cache_memory=PER_TOKEN * 100).model.max_model_len == 96  # whole blocks
    assert _resolve(model, kv_cache_memory=PER_TOKEN * 10_000).model.max_model_len == MAX_POSITION


def test_a_context_cut_by_the_cache_is_told_with_what_would_restore_it(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = EngineArgs(model=str(tiny_model), device="cpu", dtype="bfloat16", kv_cache_memory=PER_TOKEN * 40)
    _, config = resolve_here(args)
    [warning] = [record.getMessage() for record in caplog.records]
    assert config.model.max_model_len == 32
    assert "32 tokens" in warning and f"made for {MAX_POSITION}" in warning
    caplog.clear()
    enough = warning.partition("kv_cache_memory=")[2].split()[0]
    for fits in ({"kv_cache_memory": enough}, {"max_model_len": 32}, {"kv_cache_memory": None}):
        resolve_here(msgspec.structs.replace(args, **fits))
    assert not caplog.records
    assert resolve_here(msgspec.structs.replace(args, kv_cache_memory=enough))[1].model.max_model_len == MAX_POSITION


def test_sizes_may_be_written_with_units_and_a_bad_one_is_refused_by_name(model: ModelDescription) -> None:
    cache = _resolve(model, kv_cache_memory="256MiB", swap_space="1 GiB").cache
    assert (cache.kv_cache_memory, cache.swap_space) == (2**28, 2**30)
    for name in ("kv_cache_memory", "swap_space"):
        fraction = [1.5] if name == "kv_cache_memory" else []  # of a swap space, GiB as vLLM has it
        for wrong in ("lots", "", "9" * 5000, "-1GiB", True, *fraction):
            with pytest.raises(ConfigError, match=name):
                _resolve(model, **{name: wrong})


def test_a_model_that_is_far_too_large_is_refused_by_its_dimensions(model: ModelDescription) -> None:
    assert model.spec is not None
    spec = msgspec.structs.replace(model.spec, hidden_size=2**17)
    large = msgspec.structs.replace(model, facts=msgspec.structs.replace(spec.facts, linear_weights=2**42))
    for settings in ({}, {"quantization": "int4"}):
        with pytest.raises(ConfigError, match="num_hidden_layers=2, hidden_size=131072"):
            _resolve(large, **settings)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ({"temprature": 0.5}, "temprature"),
        ({"do_sample": True}, "do_sample"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": float("inf")}, "top_k"),
        ({"min_p": True}, "min_p"),
        ({"repetition_penalty": 5e-324}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_an_override_that_no_request_could_use_is_refused_by_its_key(
    override: dict[str, object], says: str, tiny_model: Path
) -> None:
    with pytest.raises(ConfigError, match=f"override_generation_config.*{says}"):
        resolve_here(EngineArgs(model=str(tiny_model), device="cpu", override_generation_config=override))


def test_an_override_goes_before_what_the_files_recommend(tmp_path: Path, tiny_model: Path) -> None:
    args = EngineArgs(model=str(tiny_model), device="cpu", override_generation_config={"top_k": 9, "min_p": 0.1})
    described = resolve_here(args)[0]
    assert described.generation_defaults == {"temperature": 0.25, "top_k": 9, "min_p": 0.1}
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text('{"top_p": 0, "temperature": 0.5}')
    with pytest.raises(ConfigError, match=r"recommended top_p.*override_generation_config"):
        resolve_here(EngineArgs(model=str(tmp_path), device="cpu"))
    args = EngineArgs(model=str(tmp_path), device="cpu", override_generation_config={"top_p": 0.9})
    assert resolve_here(args)[0].generation_defaults == {"top_p": 0.9, "temperature": 0.5}


def test_budget_and_rows_follow_each_other(model: ModelDescription) -> None:
    assert _resolve(model, max_num_batched_tokens=32).scheduler.max_num_seqs == 32
    assert _resolve(model, max_num_batched_tokens=256).scheduler.max_mixed_prefill_tokens == 256
    assert _resolve(model, H100, max_mixed_prefill_tokens=64).scheduler.max_mixed_prefill_tokens == 64
    assert _resolve(model, max_num_seqs=4000).scheduler.max_num_batched_tokens == 4000


def test_the_configuration_survives_the_way_to_the_core(model: ModelDescription) -> None:
    events = {"enable_kv_cache_events": True, "replay_endpoint": "tcp://*:5560"}
    config = _resolve(model, H100, graphs="full_decode", max_num_seqs=3, kv_events_config=events)
    assert config.kv_events is not None
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5, 5),
        ("1000", 1000),
        ("4GiB", 2**32),
        ("1.5 gib", 3 * 2**29),
        ("512M", 512 * 10**6),
        ("1kb", 1000),
        ("2TiB", 2**41),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 GiBs", "-1", "4XB", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_this_machine_has_a_core_and_memory() -> None:
    here = probe_machine("cpu")
    assert here.physical_cores >= 1
    assert here.memory_bytes > 2**28
    assert here.cuda == ()


def test_a_machine_without_a_driver_is_read_without_torch() -> None:
    code = (
        "import sys, engine.machine as machine\n"
        "machine.driver_is_there = lambda: False\n"
        "print(machine.probe_machine().cuda, 'torch' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.split() == ["()", "False"]


def test_quantization_follows_the_checkpoint_unless_set(model: ModelDescription) -> None:
    gguf = msgspec.structs.replace(model, source="gguf")
    assert _resolve(model).model.quantization == "none"
    assert _resolve(gguf).model.quantization == "gguf"
    assert _resolve(gguf, quantization="none").model.quantization == "none"
    assert _resolve(gguf, dtype="float32").model.quantization == "none"
    assert _resolve(gguf, load_format="dummy").model.quantization == "none"
    assert _resolve(gguf, H100).model.quantization == "gguf"
    assert _resolve(gguf, H100, dtype="float32").model.quantization == "none"
    assert _resolve(gguf, quantization="int8").model.quantization == "int8"
    assert _resolve(model, quantization="int4").model.quantization == "int4"


@pytest.mark.parametrize(
    ("stored", "names"),
    [
        ("gptq", ["gptq", "gptq_marlin"]),
        ("gptqmodel", ["gptq", "gptq_marlin"]),
        ("awq", ["awq", "awq_marlin"]),
        ("auto-round", ["auto-round", "inc"]),
        ("compressed-tensors", ["compressed-tensors"]),
        ("fp8", []),
        ("fbgemm_fp8", ["fbgemm_fp8"]),
        ("mxfp4", ["mxfp4"]),
        ("bitsandbytes", ["bitsandbytes"]),
        ("torchao", ["torchao"]),
        ("gguf", ["gguf"]),
    ],
)
def test_vllms_names_of_what_a_checkpoint_is_stored_as_mean_auto(
    model: ModelDescription, stored: str, names: list[str]
) -> None:
    if stored == "gguf":
        found = msgspec.structs.replace(model, source="gguf")
    else:
        found = msgspec.structs.replace(model, quantized=StoredFormat(method=stored, layout="gptq"))
    auto = _resolve(found).model.quantization
    assert auto == ("gguf" if stored == "gguf" else "stored")
    for name in get_args(StoredMethod):
        if name in names:
            assert _resolve(found, quantization=name).model.quantization == auto
        else:
            with pytest.raises(ConfigError, match=f"quantization='{name}': the checkpoint is stored as {stored}"):
                _resolve(found, quantization=name)
        with pytest.raises(ConfigError, match=f"quantization='{name}': the checkpoint is not quantised.*'int8'"):
            _resolve(model, quantization=name)


def test_fp8_is_what_such_a_checkpoint_has_and_is_made_of_any_other(model: ModelDescription) -> None:
    stored = [msgspec.structs.replace(model, quantized=StoredFormat(method=of, layout="fp8")) for of in ("fp8", "awq")]
    assert _resolve(stored[0], quantization="fp8").model.quantization == "stored"
    assert _resolve(stored[0], quantization="fp8", dtype="float32").model.quantization == "none"
    assert _resolve(stored[1], quantization="fp8").model.quantization == "fp8"
    assert _resolve(model, quantization="fp8").model.quantization == "fp8"


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {"device": "cuda"}])
def test_quantization_is_refused_where_no_kernel_computes_it(model: ModelDescription, settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"quantization='int8' needs dtype='bfloat16'"):
        _resolve(model, H100, **settings, dtype="float32", quantization="int8")


def test_on_a_gpu_the_librarys_models_stay_dense(model: ModelDescription) -> None:
    assert _resolve(model, H100, dtype="float16", quantization="int4").model.quantization == "int4"
    with pytest.raises(ConfigError, match="runs by the library"):
        _resolve(msgspec.structs.replace(model, spec=None), H100, quantization="int8")


def test_cores_say_how_many_threads_compute_and_are_refused_where_they_cannot_hold(model: ModelDescription) -> None:
    device = _resolve(model, cores=(0, 2)).device
    assert (device.cores, device.threads) == ((0, 2), 2)
    assert _resolve(model, cores=(0, 2), threads=1).device.threads == 1
    for cores in ((), (1, 1), (-1,)):
        with pytest.raises(ConfigError, match="each once"):
            _resolve(model, cores=cores)
    with pytest.raises(ConfigError, match="threads \\(3\\) exceeds the 2 cores"):
        _resolve(model, cores=(0, 1), threads=3)
    with pytest.raises(ConfigError, match="cores binds"):
        _resolve(model, H100, device="cuda", cores=(0,))


def test_steps_are_planned_ahead_where_a_device_computes_beside_the_host(model: ModelDescription) -> None:
    assert _resolve(model).scheduler.steps_in_flight == 1
    assert _resolve(model, async_scheduling=True).scheduler.steps_in_flight == 2
    assert _resolve(model, H100, device="cuda").scheduler.steps_in_flight == 2
    assert _resolve(model, H100, device="cuda", async_scheduling=False).scheduler.steps_in_flight == 1
