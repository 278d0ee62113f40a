"""vLLM's settings, in Python and on the command line."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from engine.config import EngineArgs, make_args
from engine.errors import ConfigError
from engine.vllm_names import INSTEAD, VLLMS_NAMES, WITHOUT_EFFECT, translated
from entrypoints.options import add_engine_options, engine_args


def from_line(*line: str) -> EngineArgs:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return engine_args(parser.parse_args(line), "model")


def test_names_that_mean_the_same_are_taken() -> None:
    settings: dict[str, Any] = {"gpu_memory_utilization": 0.5, "enforce_eager": True, "swap_space": 4}
    args = make_args("model", settings)
    line = from_line("--gpu-memory-utilization", "0.5", "--enforce-eager", "--swap-space", "4")
    for found in (args, line):
        assert (found.memory_fraction, found.compile, found.swap_space) == (0.5, "none", 4 << 30)
    assert make_args("model", {"enforce_eager": False}).compile == "pieces"
    assert make_args("model", {"swap_space": "512MiB"}).swap_space == "512MiB"
    assert make_args("model", {"kv_cache_memory_bytes": 1 << 30}).kv_cache_memory == 1 << 30


def test_values_under_vllms_names() -> None:
    args = make_args("model", {"dtype": "half", "kv_cache_dtype": "fp8_e4m3", "load_format": "safetensors"})
    line = from_line("--dtype", "half", "--kv-cache-dtype", "fp8_e4m3", "--load-format", "safetensors")
    for found in (args, line):
        assert (found.dtype, found.kv_cache_dtype, found.load_format) == ("float16", "fp8", "auto")


def test_what_asks_for_nothing_is_taken() -> None:
    for name, neutral in WITHOUT_EFFECT.items():
        for value in neutral or (True, False):
            assert translated({name: value}) == {}
    for name in ("--enable-prefix-caching", "--prefix-caching"):
        assert from_line(name).enable_prefix_caching
        assert not from_line(name.replace("--", "--no-")).enable_prefix_caching
    assert (
        from_line("-tp", "1", "--cpu-offload-gb", "0", "--disable-log-requests", "--tokenizer-mode", "auto").seed == 0
    )
    assert from_line("-pp", "3").pipeline_parallel_size == 3


def test_options_have_vllms_short_names() -> None:
    assert from_line("--distributed-executor-backend", "ray").distributed_executor_backend == "ray"
    args = from_line("-tp", "2", "-ep")
    assert (args.tensor_parallel_size, args.enable_expert_parallel) == (2, True)
    assert make_args("model", {"tensor_parallel_size": 2, "enable_expert_parallel": True}).enable_expert_parallel
    with pytest.raises(ConfigError, match="use expert_placement"):
        make_args("model", {"expert_placement_strategy": "round_robin"})


def test_what_would_be_lost_is_refused_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match="use override_generation_config"):
        make_args("model", {"generation_config": "vllm"})
    with pytest.raises(ConfigError, match="one setting"):
        make_args("model", {"gpu_memory_utilization": 0.5, "memory_fraction": 0.5})
    with pytest.raises(TypeError, match="no setting 'frobnicate'"):
        make_args("model", {"frobnicate": 1})
    with pytest.raises(TypeError, match="did you mean max_model_len"):
        EngineArgs(model="model", max_model_length=1)  # type: ignore[call-arg]


def test_a_value_that_cannot_be_is_refused_with_the_name_that_was_written_and_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"quantization: must be one of auto, none, int8, int4, .*got 'squeezellm'"):
        EngineArgs(model="model", quantization="squeezellm")  # type: ignore[arg-type]
    for make in (
        lambda: make_args("model", {"gpu_memory_utilization": "x"}),
        lambda: from_line("--gpu-memory-utilization", "x"),
    ):
        with pytest.raises(ConfigError, match="gpu_memory_utilization: Expected `float`"):
            make()


def test_of_a_checkpoints_code_one_warning_is_given(caplog: pytest.LogCaptureFixture) -> None:
    make_args("model", {"trust_remote_code": False})
    make_args("model", {"trust_remote_code": True})
    assert [record.getMessage() for record in caplog.records] == [
        "trust_remote_code has no effect: no code of a checkpoint is ever run"
    ]


def test_engine_arguments_are_taken_apart_as_a_dataclass_is() -> None:
    args = make_args("model", {"swap_space": "512MiB", "limits": {"prompts": 3}, "cores": (0, 1)})
    assert EngineArgs(**dataclasses.asdict(args)) == args
    assert dataclasses.replace(args, seed=3).seed == 3


def test_no_name_of_ours_is_translated_away() -> None:
    ours = set(EngineArgs.__struct_fields__)
    assert not ours & set(VLLMS_NAMES)
    assert set(WITHOUT_EFFECT) - set(INSTEAD) <= {name for name, neutral in WITHOUT_EFFECT.items() if not neutral}
