"""A model's JSON files may hold anything: each absurdity is refused in a line that names the file and the field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_models import CASES

from engine.errors import ConfigError, EngineError, UnsupportedModelError
from engine.models.bounds import CONFIG_BYTES, CONFIG_RANGES
from engine.models.description import describe
from engine.models.families.registry import FAMILIES
from engine.models.rope import rope_table

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}
ABSURD = [-1, 0, 10**9, 10**18, 10**400, 1e308, math.nan, math.inf, -math.inf, True, "many", "", [], [[1]], {"a": 1}]
OTHERS = (
    "layer_types",
    "rope_parameters",
    "hidden_act",
    "attention_bias",
    "tie_word_embeddings",
    "eos_token_id",
    "dtype",
    "no_rope_layers",
    "rotary_pct",
    "rotary_emb_base",
)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def refusal(model: Path) -> str:
    with pytest.raises((ConfigError, UnsupportedModelError)) as refused:
        describe(str(model))
    text = str(refused.value)
    assert "\n" not in text and len(text) < 1500
    return text


def model_of(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"vocab_size": 5, "vocab_size": 6}', "'vocab_size' stands there twice"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "cannot be read"),
        ("[]", "holds list"),
        ("null", "holds NoneType"),
        ("", "cannot be read"),
        ("\ud83d", "cannot be read"),
        (" " * (CONFIG_BYTES + 1), f"at most {CONFIG_BYTES}"),
    ],
    ids=["lists", "objects", "repeated key", "huge number", "a list", "null", "empty", "no utf-8", "huge file"],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_file_that_is_no_plain_object_is_refused_by_name(file: str, text: str, says: str, tmp_path: Path) -> None:
    model_of(tmp_path, LLAMA)
    (tmp_path / file).write_bytes(text.encode("utf-8", "surrogatepass"))
    refused = refusal(tmp_path)
    assert f"{tmp_path / file}: " in refused and says in refused


@pytest.mark.parametrize("key", SIZES)
def test_an_absurd_size_is_refused_by_name(key: str, tmp_path: Path) -> None:
    for value in (*ABSURD, None):
        refused = refusal(model_of(tmp_path, {**LLAMA, key: value}))
        assert refused.startswith(f"{tmp_path / 'config.json'}: ") and key in refused, value
    missing = {name: value for name, value in LLAMA.items() if name != key}
    assert key in refusal(model_of(tmp_path, missing))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"head_dim": 0}, "head_dim"),
        ({"num_attention_heads": 65}, "head_dim"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_type"),
        ({"rope_theta": math.inf}, "rope_theta"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": math.nan}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e300}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e6}}, "max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": -14.43}}, "mscale_all_dim"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 3}},
            "high_freq_factor",
        ),
        ({"eos_token_id": [2, True]}, "eos_token_id"),
        ({"eos_token_id": {"a": 2}}, "eos_token_id"),
        ({"dtype": {"text": "bfloat16"}}, "dtype"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"architectures": ["x" * 10**6] * 7}, "architectures"),
        ({"architectures": None, "model_type": [["llama"]]}, "model_type"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -4}, "sliding_window"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
            "2 lay",
        ),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": [5, [6]]}, "layer_types"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": -3}, "max_window_l"),
        ({"architectures": ["GPT2LMHeadModel"], "n_layer": 10**18}, "n_layer"),
        ({"architectures": ["OPTForCausalLM"], "num_hidden_layers": 10**18}, "num_hidden_layers"),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 0}, "sliding_window_pattern"),
    ],
)
def test_an_absurd_value_is_refused_by_name(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    refused = refusal(model_of(tmp_path, {**LLAMA, **change}))
    assert str(tmp_path / "config.json") in refused and says in refused


READ = ["llama_yarn_rope", "llama_llama3_rope", "qwen3_bias_windows", "gemma3_windows", "gemma4", "opt"]
READ += ["phi3_long_rope", "smollm3", "granite", "olmo3_windows", "glm4", "ministral3", "cohere2_windows"]
READ += ["hunyuan_alpha", "exaone4_windows", "nemotron", "apertus", "starcoder2", "gpt_neox", "stablelm"]


@pytest.mark.parametrize("case", READ)
def test_what_is_accepted_can_be_computed_with(case: str, tmp_path: Path) -> None:
    """Any value in any place: an error of ours, or sizes within the bounds and finite rotations."""
    config = CASES[case]()
    name = {family.name: family.architecture for family in FAMILIES}[config.model_type]
    full = {**config.to_dict(), "architectures": [name]}
    text = json.dumps(full)
    nested = [("rope_parameters", key) for key in full.get("rope_parameters") or {}]
    for path in [(key,) for key in full if key in CONFIG_RANGES or key in OTHERS] + nested:
        for value in (*ABSURD, None, 2, 0.5):
            changed = json.loads(text)
            (changed if len(path) == 1 else changed[path[0]])[path[-1]] = value
            try:
                description = describe(str(model_of(tmp_path, changed)), "native")
            except EngineError as error:
                assert len(str(error)) < 1000
                continue
            spec = description.spec
            assert CONFIG_RANGES["num_hidden_layers"].holds(spec.num_layers), (path, value)
            assert CONFIG_RANGES["max_position_embeddings"].holds(spec.max_position), (path, value)
            assert all(0 <= token < spec.vocab_size for token in description.eos_token_ids)
            for rope in spec.ropes:
                assert rope_table(rope, 3).isfinite().all(), (path, value)


def test_end_tokens_outside_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    """A sampler masks and compares them by index."""
    model = model_of(tmp_path, {**LLAMA, "eos_token_id": [99, 100, 10**18]})
    assert describe(str(model)).eos_token_ids == (99,)
