"""Every family computes what transformers computes, in float32, from the checkpoint that transformers saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attention import DenseAttention, greedy, logits_of
from safetensors.torch import load_file, save_file
from tiny_models import CASES, STATEFUL, hf_greedy, hf_logits, make_model, save
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.weights.loader import load_weights

PROMPT = torch.randint(0, 199, (40,), generator=torch.Generator().manual_seed(7)).tolist()


def ours(path: str, dtype: torch.dtype = torch.float32) -> Decoder:
    description = describe(path)
    model = Decoder(description.spec, dtype=dtype)
    load_weights(model, description)
    return model


@pytest.mark.parametrize("case", [*CASES, *STATEFUL])
def test_logits_and_greedy_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    reference = make_model(case)
    model = ours(save(reference, tmp_path))
    expected = hf_logits(reference, PROMPT)
    assert expected.std() > 0.5
    near = 1e-3 if case in STATEFUL else 1e-4  # a recurrence carries what roundings differ by
    torch.testing.assert_close(logits_of(model, PROMPT), expected, rtol=near, atol=near)
    assert greedy(model, PROMPT, 32) == hf_greedy(reference, PROMPT, 32)


CHUNKED = [
    "llama_biases",
    "mistral_window",
    "qwen3_bias_windows",
    "gemma3_windows",
    "gemma4",
    "opt",
    "phi3_long_rope",
    "ministral3",
    "llama4",
    "lfm2",
    "qwen3_5_text",
]


@pytest.mark.parametrize("case", CHUNKED)
def test_a_chunked_prompt_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    model = ours(save(make_model(case), tmp_path))
    near = 1e-3 if case in STATEFUL else 1e-4
    torch.testing.assert_close(logits_of(model, PROMPT, (1, 17, 3)), logits_of(model, PROMPT), rtol=near, atol=near)


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("mistral_window", "sliding_window"),
        ("gemma2_windows", "sliding_window"),
        ("gemma3_windows", "sliding_window"),
        ("gemma4_two_sizes", "sliding_window"),
        ("llama4", "attention_chunk_size"),
    ],
)
def test_windows_change_the_logits_of_a_prompt_beyond_them(case: str, key: str, tmp_path: Path) -> None:
    """Guards the parity tests above: their prompt is long enough to see a window, or a chunk, that is ignored."""
    model = ours(save(make_model(case), tmp_path / "windowed"))
    config_file = tmp_path / "windowed" / "config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), key: 1000}))
    unlimited = ours(str(tmp_path / "windowed"))
    with_window, without = logits_of(model, PROMPT), logits_of(unlimited, PROMPT)
    torch.testing.assert_close(with_window[:16], without[:16], rtol=1e-4, atol=1e-4)
    assert (with_window[16:] - without[16:]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("case", "architecture", "extra"),
    [
        ("glm4_moe", "Glm4MoeForCausalLM", "model.layers.3.eh_proj.weight"),
        ("minimax_m2", "MiniMaxM2ForCausalLM", "model.layers.3.self_attn.q_proj.weight"),
        ("qwen2", "MiMoForCausalLM", "model.mtp_layers.0.input_proj.weight"),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(
    case: str, architecture: str, extra: str, tmp_path: Path
) -> None:
    reference = make_model(case)
    path = save(reference, tmp_path)
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "architectures": [architecture]}))
    save_file({extra: torch.ones(4, 4)}, tmp_path / "more.safetensors")
    names = load_file(tmp_path / "model.safetensors")
    index = {**dict.fromkeys(names, "model.safetensors"), extra: "more.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    torch.testing.assert_close(logits_of(ours(path), PROMPT), hf_logits(reference, PROMPT), rtol=1e-4, atol=1e-4)


ROUNDED = [
    "llama_tied",
    "qwen2",
    "gemma2_windows",
    "gemma3_windows",
    "gemma4_two_sizes",
    "gemma4_layer_inputs",
    "opt_norms_after",
    "gpt2",
]
ROUNDED += ["phi3_long_rope", "granite", "olmo2", "glm4", "ministral3", "helium", "cohere", "hunyuan", "ernie4_5"]
ROUNDED += ["exaone4_windows", "nemotron", "apertus", "gpt_neox", "phi", "stablelm_parallel"]


@pytest.mark.parametrize("case", ROUNDED)
def test_bfloat16_errs_no_more_than_transformers_bfloat16(case: str, tmp_path: Path) -> None:
    reference = make_model(case)
    path = save(reference, tmp_path)
    exact = torch.log_softmax(hf_logits(reference, PROMPT), -1)
    theirs = torch.log_softmax(hf_logits(reference.to(torch.bfloat16), PROMPT), -1)
    mine = torch.log_softmax(logits_of(ours(path, torch.bfloat16), PROMPT), -1)
    assert (mine - exact).abs().mean() <= 1.25 * (theirs - exact).abs().mean()


@pytest.mark.parametrize("case", ["gpt2", "opt"])
def test_names_of_the_bare_model_are_read_too(case: str, tmp_path: Path) -> None:
    """The first GPT-2 checkpoints were saved without the head, and with the causal mask of each layer."""
    reference = make_model(case)
    expected = logits_of(ours(save(reference, tmp_path / "whole")), PROMPT)
    bare = tmp_path / "bare"
    tensors = {name: tensor.clone() for name, tensor in reference.base_model.state_dict().items()}
    if case == "gpt2":
        tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 256, 256).tril() for layer in range(3)}
    bare.mkdir()
    save_file(tensors, bare / "model.safetensors")
    (bare / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    assert torch.equal(logits_of(ours(str(bare)), PROMPT), expected)


def test_the_text_model_of_one_that_sees_is_read_alone(tmp_path: Path) -> None:
    text = make_model("llama4")
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vision |= {"image_size": 28, "projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16}
    config = Llama4Config(text_config=text.config.to_dict(), vision_config=vision)
    whole = Llama4ForConditionalGeneration(config).eval()
    whole.language_model.load_state_dict(text.state_dict())
    model = ours(save(whole, tmp_path))
    assert describe(str(tmp_path)).generates
    torch.testing.assert_close(logits_of(model, PROMPT), hf_logits(text, PROMPT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "sees", "vision"),
    [
        ("gemma3_windows", (Gemma3Config, Gemma3ForConditionalGeneration), {"patch_size": 14}),
        (
            "mistral_window",
            (Mistral3Config, Mistral3ForConditionalGeneration),
            {"model_type": "pixtral", "head_dim": 16},
        ),
    ],
)
def test_the_text_part_of_gemma_3_and_mistral_3_is_read(
    tmp_path: Path, text: str, sees: tuple[Any, Any], vision: dict[str, Any]
) -> None:
    made = make_model(text)
    vision |= {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = sees[0](
        text_config=made.config.to_dict(),
        vision_config={**vision, "image_size": 28},
        tie_word_embeddings=made.config.tie_word_embeddings,
    )
    whole = sees[1](config).eval()
    whole.model.language_model.load_state_dict(made.model.state_dict())
    whole.lm_head.load_state_dict(made.lm_head.state_dict())
    model = ours(save(whole, tmp_path))
    assert describe(str(tmp_path)).generates
    torch.testing.assert_close(logits_of(model, PROMPT), hf_logits(made, PROMPT), rtol=1e-4, atol=1e-4)


def test_the_text_part_of_a_gemma_4_that_sees_is_read(tmp_path: Path) -> None:
    """Its last layers may hold keys and values that nobody reads."""
    text = CASES["gemma4"]()
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    vision |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Gemma4Config(text_config=text.to_dict(), vision_config=vision)
    torch.manual_seed(0)
    reference = Gemma4ForConditionalGeneration(config).eval()
    path = save(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    spare = {
        f"model.language_model.layers.6.self_attn.{name}.weight": torch.ones(4, 4) for name in ("k_proj", "k_norm")
    }
    save_file({**tensors, **spare}, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits_of(ours(path), PROMPT), hf_logits(reference, PROMPT), rtol=1e-4, atol=1e-4)


def test_a_gemma_4_config_as_published_gives_the_same_spec(tmp_path: Path) -> None:
    """With the numbers of layers that see all under names of their own, not as transformers writes them."""
    path = save(make_model("gemma4_two_sizes"), tmp_path)
    written = describe(path).spec
    config = json.loads((tmp_path / "config.json").read_text())
    del config["per_layer_config"]
    config |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe(path).spec == written
    wide = written.layers[2].mixer
    assert (wide.num_kv_heads, wide.head_dim, wide.values, wide.window) == (1, 32, "normed_keys", None)


def test_gemma_3_rotates_by_two_bases(tmp_path: Path) -> None:
    """Guards its parity test: a base of its own for layers with a window changes the logits."""
    model = ours(save(make_model("gemma3_windows"), tmp_path))
    expected = logits_of(model, PROMPT)
    everywhere, local = model.ropes
    local.table.copy_(everywhere.table)
    assert (logits_of(model, PROMPT) - expected).abs().max() > 0.1


def test_a_legacy_gemma_3_config_gives_the_same_spec(tmp_path: Path) -> None:
    path = save(make_model("gemma3_windows"), tmp_path)
    modern = describe(path).spec
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_parameters", "layer_types"):
        del config[key]
    config |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 2}
    config["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe(path).spec == modern
    assert [layer.mixer.window for layer in modern.layers] == [16, None, 16, None]


def test_a_first_llama_4_config_gives_the_same_spec(tmp_path: Path) -> None:
    path = save(make_model("llama4"), tmp_path)
    modern = describe(path).spec
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "moe_layers"):
        del config[key]
    config |= {"attn_temperature_tuning": 4, "no_rope_layers": []}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert describe(path).spec == modern
    assert [layer.mixer.chunk for layer in modern.layers] == [16, 16, 16, None, 16]
    assert [layer.experts is not None for layer in modern.layers] == [False, True, False, True, False]


def test_a_legacy_rope_config_gives_the_same_spec(tmp_path: Path) -> None:
    path = save(make_model("llama_yarn_rope"), tmp_path)
    modern = describe(path).spec
    config_file = tmp_path / "config.json"
    config = json.loads(config_file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
    config_file.write_text(json.dumps(config))
    assert describe(path).spec == modern
    assert modern.ropes[0].kind == "yarn"


def test_shown_states_of_granite_are_as_large_as_its_authors_have_them(tmp_path: Path) -> None:
    """Within the decoder they are divided by the residual's multiplier."""
    reference = make_model("granite")
    description = describe(save(reference, tmp_path))
    model = Decoder(description.spec, dtype=torch.float32, shown_layers=(0, 2))
    load_weights(model, description)
    model.set_attention(DenseAttention(model.spec))
    _, first, third = model(torch.tensor(PROMPT), torch.arange(len(PROMPT))).chunk(3, dim=-1)
    with torch.no_grad():
        states = reference(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(first, states[0][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(third, states[2][0], rtol=1e-4, atol=1e-4)


def test_tied_heads_share_one_storage_and_untied_ones_do_not(tmp_path: Path) -> None:
    tied = ours(save(make_model("llama_tied"), tmp_path / "tied"))
    untied = ours(save(make_model("llama"), tmp_path / "untied"))
    assert tied.lm_head.weight.data_ptr() == tied.embed_tokens.weight.data_ptr()
    assert untied.lm_head.weight.data_ptr() != untied.embed_tokens.weight.data_ptr()
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


def test_forward_before_an_attention_was_set_says_so(tmp_path: Path) -> None:
    model = ours(save(make_model("llama"), tmp_path))
    with pytest.raises(RuntimeError, match="set_attention"):
        model(torch.tensor([1]), torch.tensor([0]))


def test_stacked_experts_of_a_model_that_also_sees(tmp_path: Path) -> None:
    reference = make_model("qwen3_5_moe_text")
    path = save(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stacked: dict[str, torch.Tensor] = {"model.visual.x.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            stacked[name.replace("model.", "model.language_model.", 1)] = tensor
    for layer in range(reference.config.num_hidden_layers):
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{experts}.{index}.{part}_proj.weight"] for index in range(6)])
            for part in ("gate", "up", "down")
        )
        wrapped = experts.replace("model.", "model.language_model.", 1)
        stacked[f"{wrapped}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        stacked[f"{wrapped}.down_proj"] = down
    save_file(stacked, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    torch.testing.assert_close(logits_of(ours(path), PROMPT), hf_logits(reference, PROMPT), rtol=1e-3, atol=1e-3)
