"""What `describe` reads from a directory, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import CASES
from transformers import Gemma4TextConfig, Qwen2Config

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.description import describe
from engine.models.families.registry import FAMILIES

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "dtype": "bfloat16",
}
LLAMA4: dict[str, Any] = {"architectures": ["Llama4ForCausalLM"], "num_key_value_heads": 4}


def written(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> str:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return str(directory)


@pytest.mark.parametrize("case", CASES)
def test_what_a_config_leaves_out_has_transformers_defaults(case: str, tmp_path: Path) -> None:
    """A config.json that holds only what differs from the defaults gives the spec of the full one."""
    config = CASES[case]()
    name = {family.name: family.architecture for family in FAMILIES}[config.model_type]
    full = written(tmp_path, {**config.to_dict(), "architectures": [name]})
    from_full = describe(full).spec
    diff = {**config.to_diff_dict(), "architectures": [name]}
    assert describe(written(tmp_path, diff)).spec == from_full


def test_every_end_token_is_kept_once_and_generation_defaults_are_read(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 2], "temperature": 0.6, "top_k": 20, "do_sample": True, "bos_token_id": 3}
    description = describe(written(tmp_path, LLAMA, generation))
    assert description.eos_token_ids == (7, 2)
    assert description.bos_token_id == 3
    assert description.generation_defaults == {"temperature": 0.6, "top_k": 20, "do_sample": True}
    assert (description.default_dtype, description.max_position, description.vocab_size) == ("bfloat16", 128, 100)


@pytest.mark.parametrize("change", [{"temperature": "hot"}, {"top_k": 2.5}, {"do_sample": 1}, {"eos_token_id": -1}])
def test_malformed_recommendations_are_refused_by_file_and_key(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {next(iter(change))} must be"):
        describe(written(tmp_path, LLAMA, change))


def test_the_legacy_name_of_the_dtype_is_read(tmp_path: Path) -> None:
    legacy = {**LLAMA, "torch_dtype": "float16"}
    del legacy["dtype"]
    assert describe(written(tmp_path, legacy)).default_dtype == "float16"


SEES = "Mistral3ForConditionalGeneration"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "BloomForCausalLM.*ForCausalLM.*Llama, Mistral"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"], "text_config": LLAMA}, "Qwen2VLForCond.*Gemma3"),
        ({"architectures": [SEES], "text_config": {**LLAMA, "model_type": "new"}}, f"{SEES}.*type 'new'.*; mistral, "),
        ({"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "generates nothing"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"architectures": ["Gemma4ForCausalLM"], "use_bidirectional_attention": "all"}, "attention 'all'"),
        ({"architectures": ["Gemma4ForCausalLM"], "vocab_size_per_layer_input": 9}, "per_layer_input 9.*100 tokens"),
        ({"architectures": ["Gemma4ForCausalLM"], "per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
        ({"architectures": ["GPT2LMHeadModel"], "scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"),
        ({"architectures": ["OPTForCausalLM"], "layer_norm_elementwise_affine": False}, "elementwise_affine"),
        ({"architectures": ["Phi3ForCausalLM"], "lm_head_bias": True}, "lm_head_bias"),
        ({"architectures": ["PhiForCausalLM"], "qk_layernorm": True}, "qk_layernorm"),
        ({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True}, "qk_layernorm"),
        ({"architectures": ["CohereForCausalLM"], "use_qk_norm": True}, "use_qk_norm"),
        ({"architectures": ["HunYuanDenseV1ForCausalLM"], "use_cla": True}, "use_cla"),
        ({"architectures": ["HunYuanDenseV1ForCausalLM"], "rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic"),
        ({"architectures": ["ApertusForCausalLM"], "post_norm": True}, "post_norm"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_norm_min": 0.9}, "moe_norm_min"),
        ({"architectures": ["Olmo2ForCausalLM"], "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({**LLAMA4, "num_experts_per_tok": 2}, "num_experts_per_tok 2"),
        ({**LLAMA4, "layer_types": ["sliding_attention"] * 2}, "chunked_attention"),
        ({"architectures": None, "model_type": "mamba"}, "mamba.*Qwen3"),
        ({"hidden_act": "quick_gelu"}, "quick_gelu.*silu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*default, linear, llama3, yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "hqq"}}, "hqq.*GPTQ, AWQ"),
        ({"dtype": "float8_e4m3fn"}, "float8.*bfloat16"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_is(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        describe(written(tmp_path, {**LLAMA, **change}), "native")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, "text_config must be an object"),
        ({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": 3}, "text_config must be an object"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor"),
        ({"attention_bias": 1}, "attention_bias"),
    ],
)
def test_a_malformed_config_is_refused_naming_the_key(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        describe(written(tmp_path, {**LLAMA, **change}))


def test_a_path_that_is_no_model_and_a_config_that_is_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither"):
        describe(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        describe(str(tmp_path))


def test_max_window_layers_count_from_the_first_layer(tmp_path: Path) -> None:
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=3,
    ).to_dict()
    del config["layer_types"]
    windows = [layer.window for layer in describe(written(tmp_path, config)).facts.layers]
    assert windows == [None, None, None, 8]
    config["use_sliding_window"] = False
    assert all(layer.window is None for layer in describe(written(tmp_path, config)).facts.layers)


def test_yarn_reaches_the_stretched_length(tmp_path: Path) -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert describe(written(tmp_path, {**LLAMA, "rope_scaling": rope})).max_position == 512


def test_describing_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    script = (
        "import sys; from engine.models.description import describe; describe(sys.argv[1]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    path = written(tmp_path, LLAMA)
    assert subprocess.run([sys.executable, "-c", script, path], timeout=60, check=False).returncode == 0


def test_a_gemma_4_of_more_than_ten_layers_is_ours_as_transformers_writes_it(tmp_path: Path) -> None:
    """Which numbers them with two digits."""
    config = Gemma4TextConfig(num_hidden_layers=12, architectures=["Gemma4ForCausalLM"])
    config.save_pretrained(tmp_path)
    assert "05" in json.loads((tmp_path / "config.json").read_text())["per_layer_config"]
    spec = describe(str(tmp_path), "native").spec
    assert [layer.mixer.head_dim for layer in spec.layers] == 2 * (5 * [256] + [512])


def test_a_decoder_that_looks_both_ways_embeds_and_windows_of_it_are_refused(tmp_path: Path) -> None:
    config = Qwen2Config(num_hidden_layers=2, architectures=["Qwen2ForCausalLM"], is_causal=False)
    config.save_pretrained(tmp_path)
    found = describe(str(tmp_path), "native")
    assert not found.generates and not found.spec.causal
    config.update({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0, "layer_types": None})
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="is_causal false is not supported where layers have windows"):
        describe(str(tmp_path), "native")


def test_a_gemma_3_that_sees_as_it_was_published(tmp_path: Path) -> None:
    """Of the text model the 4B's config says five things."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "torch_dtype": "bfloat16"}
    spec = describe(written(tmp_path, config), "native").spec
    assert spec is not None and (spec.vocab_size, spec.max_position, spec.tie_embeddings) == (262_208, 131_072, True)
    mixer = spec.layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.window) == (8, 4, 256, 1024)
    assert [layer.mixer.window for layer in spec.layers[4:7]] == [1024, None, 1024]
