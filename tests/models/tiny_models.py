"""Tiny transformers models with random weights: one for every feature of the families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_hybrids import hybrids
from tiny_latents import latents
from tiny_mixtures import mixtures
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
CASE_OF = {
    "mistral": "mistral_window",
    "gemma2": "gemma2_as_published",
    "gemma3_text": "gemma3_as_published",
    "gemma4_text": "gemma4",
    "olmo3": "olmo3_windows",
    "ministral": "ministral_windows",
    "cohere2": "cohere2_windows",
    "mimo": "qwen2",
    "hunyuan_v1_dense": "hunyuan",
    "hunyuan_v1_moe": "hunyuan_moe",
    "llama4_text": "llama4",
    "nemotron_h": "nemotron_h_experts",
}
"""of a family, where it is not the family's name"""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MIXED = ["full_attention", "sliding_attention", "full_attention"]
GEMMA: dict[str, Any] = {
    **SHAPE,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "sliding_window": 16,
    "query_pre_attn_scalar": 24,
    "eos_token_id": 1,
}
LOCAL_2, FULL = ["sliding_attention"] * 2, ["full_attention"]
GEMMA4: dict[str, Any] = {
    **SHAPE,
    "num_hidden_layers": 6,
    "layer_types": (LOCAL_2 + FULL) * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 199,
    "rms_norm_eps": 1e-5,
}
TWO_BASES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
OPT_SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "init_std": 0.2,
}
GPT2_SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.2,
}
DEEP: dict[str, Any] = {**SHAPE, "num_hidden_layers": 5}
NO_PADDING: dict[str, Any] = {"pad_token_id": None}
"""for configs whose own lies outside the tiny vocabulary"""
NEOX_SHAPE = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
GRANITE_NUMBERS: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 0.5,
}


def longrope(head_dim: int, share: float = 1.0) -> dict[str, Any]:
    count = int(head_dim) // 2
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": share,
        "short_factor": [1.0 + 0.05 * index for index in range(count)],
        "long_factor": [1.0 + 1.5 * index for index in range(count)],
    }


CASES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama_tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama_biases": lambda: LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama_gelu": lambda: LlamaConfig(**SHAPE, hidden_act="gelu"),
    "llama_head_dim": lambda: LlamaConfig(**SHAPE, head_dim=32),
    "llama_linear_rope": lambda: LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
    ),
    "llama_llama3_rope": lambda: LlamaConfig(**SHAPE, rope_parameters=dict(LLAMA3)),
    "llama_yarn_rope": lambda: LlamaConfig(**SHAPE, rope_parameters=dict(YARN)),
    "mistral_window": lambda: MistralConfig(**SHAPE, sliding_window=16),
    "mistral_no_window": lambda: MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen2_tied_windows": lambda: Qwen2Config(
        **SHAPE, tie_word_embeddings=True, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=32),
    "qwen3_bias_windows": lambda: Qwen3Config(
        **SHAPE, head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=16, layer_types=MIXED
    ),
    "gemma2_windows": lambda: Gemma2Config(**GEMMA, attn_logit_softcapping=4.0, final_logit_softcapping=10.0),
    "gemma2_windows_untied": lambda: Gemma2Config(
        **GEMMA, tie_word_embeddings=False, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma2_as_published": lambda: Gemma2Config(**{**GEMMA, "query_pre_attn_scalar": 32, "rms_norm_eps": 1e-5}),
    "gemma3_as_published": lambda: Gemma3TextConfig(
        **{**GEMMA, "num_hidden_layers": 7, "query_pre_attn_scalar": 32, "rms_norm_eps": 1e-5},
        rope_parameters=dict(TWO_BASES),
    ),
    "gemma3_windows": lambda: Gemma3TextConfig(**GEMMA, rope_parameters=dict(TWO_BASES), sliding_window_pattern=2),
    "gemma3_windows_untied": lambda: Gemma3TextConfig(
        **{**GEMMA, "num_hidden_layers": 6},
        tie_word_embeddings=False,
        attention_bias=True,
        final_logit_softcapping=10.0,
    ),
    "gemma4_two_sizes": lambda: Gemma4TextConfig(**GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True),
    "gemma4_layer_inputs": lambda: Gemma4TextConfig(
        **{
            **GEMMA4,
            "hidden_size_per_layer_input": 32,
            "num_hidden_layers": 8,
            "layer_types": (LOCAL_2 + FULL) * 2 + FULL * 2,
        },
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        final_logit_softcapping=10.0,
    ),
    "gemma4_mixture": lambda: Gemma4TextConfig(
        **GEMMA4,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        attention_bias=True,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=48,
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **{**GEMMA4, "hidden_size_per_layer_input": 32, "num_hidden_layers": 7, "layer_types": None},
        num_kv_shared_layers=1,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=48,
        final_logit_softcapping=10.0,
    ),
    "opt": lambda: OPTConfig(**OPT_SHAPE),
    "opt_norms_after": lambda: OPTConfig(**OPT_SHAPE, do_layer_norm_before=False, word_embed_proj_dim=48),
    "opt_untied_without_biases": lambda: OPTConfig(
        **OPT_SHAPE, tie_word_embeddings=False, enable_bias=False, activation_function="gelu"
    ),
    "gpt2": lambda: GPT2Config(**GPT2_SHAPE),
    "gpt2_untied": lambda: GPT2Config(
        **GPT2_SHAPE, tie_word_embeddings=False, n_inner=80, scale_attn_weights=False, activation_function="relu"
    ),
    "phi3": lambda: Phi3Config(**SHAPE, **NO_PADDING),
    "phi3_long_rope": lambda: Phi3Config(
        **SHAPE, **NO_PADDING, original_max_position_embeddings=32, rope_parameters=longrope(12, 0.75)
    ),
    "phi3_short_rope_window": lambda: Phi3Config(
        **SHAPE, **NO_PADDING, original_max_position_embeddings=256, rope_parameters=longrope(16), sliding_window=16
    ),
    "smollm3": lambda: SmolLM3Config(**DEEP, **NO_PADDING),
    "smollm3_windows": lambda: SmolLM3Config(
        **SHAPE,
        **NO_PADDING,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=16,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
    ),
    "granite": lambda: GraniteConfig(**SHAPE, **GRANITE_NUMBERS),
    "granite_tied": lambda: GraniteConfig(
        **SHAPE, **GRANITE_NUMBERS, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "olmo2_as_many_heads": lambda: Olmo2Config(**{**SHAPE, "num_key_value_heads": 4}, attention_bias=True),
    "olmo3_windows": lambda: Olmo3Config(
        **DEEP,
        sliding_window=16,
        rope_parameters={
            "full_attention": {**YARN, "attention_factor": 1.2},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "glm": lambda: GlmConfig(**SHAPE, **NO_PADDING, head_dim=32, rms_norm_eps=1e-5),
    "glm4": lambda: Glm4Config(**SHAPE, **NO_PADDING, head_dim=32, attention_bias=False),
    "seed_oss": lambda: SeedOssConfig(**SHAPE, head_dim=32, attention_out_bias=True),
    "ministral_windows": lambda: MinistralConfig(**SHAPE, head_dim=16, sliding_window=16, layer_types=MIXED),
    "ministral3": lambda: Ministral3Config(
        **SHAPE,
        head_dim=32,
        rope_parameters={
            **YARN,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "helium": lambda: HeliumConfig(**SHAPE, head_dim=16, attention_bias=True),
    "cohere": lambda: CohereConfig(**{**SHAPE, "initializer_range": 0.3}, attention_bias=True, logit_scale=0.25),
    "cohere2_windows": lambda: Cohere2Config(
        **{**DEEP, "initializer_range": 0.3}, sliding_window=16, sliding_window_pattern=2, logit_scale=0.5
    ),
    "hunyuan": lambda: HunYuanDenseV1Config(**SHAPE, head_dim=32),
    "hunyuan_alpha": lambda: HunYuanDenseV1Config(
        **SHAPE,
        head_dim=16,
        attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
    ),
    "ernie4_5": lambda: Ernie4_5Config(**SHAPE, head_dim=32),
    "ernie4_5_biases_untied": lambda: Ernie4_5Config(**SHAPE, head_dim=16, use_bias=True, tie_word_embeddings=False),
    "exaone4": lambda: Exaone4Config(**SHAPE, sliding_window=None, layer_types=["full_attention"] * 3),
    "exaone4_windows": lambda: Exaone4Config(**DEEP, sliding_window=16, tie_word_embeddings=True),
    "nemotron": lambda: NemotronConfig(**SHAPE),
    "nemotron_biases": lambda: NemotronConfig(
        **SHAPE, head_dim=32, attention_bias=True, mlp_bias=True, partial_rotary_factor=0.25
    ),
    "apertus": lambda: ApertusConfig(**SHAPE, rope_parameters=dict(LLAMA3)),
    "starcoder2": lambda: Starcoder2Config(**SHAPE),
    "starcoder2_window_untied": lambda: Starcoder2Config(
        **SHAPE, sliding_window=16, use_bias=False, tie_word_embeddings=False, hidden_act="gelu"
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**NEOX_SHAPE),
    "gpt_neox_one_after_the_other": lambda: GPTNeoXConfig(
        **NEOX_SHAPE, use_parallel_residual=False, attention_bias=False, rotary_pct=0.5, tie_word_embeddings=True
    ),
    "phi": lambda: PhiConfig(**SHAPE),
    "stablelm": lambda: StableLmConfig(**SHAPE),
    "stablelm_parallel": lambda: StableLmConfig(
        **SHAPE, use_parallel_residual=True, use_qkv_bias=True, partial_rotary_factor=0.5, tie_word_embeddings=True
    ),
}
CASES |= mixtures(SHAPE, GRANITE_NUMBERS, YARN)
MIXTURES = (*mixtures(SHAPE, GRANITE_NUMBERS, YARN), "gemma4_mixture", "gemma4")
STATEFUL: dict[str, Any] = hybrids(SHAPE, GRANITE_NUMBERS)
"""of layers that keep states"""


LATENT = latents(SHAPE, YARN)
"""of layers that keep latents"""


def make_model(case: str) -> PreTrainedModel:
    """In float32, eager attention; biases and norm weights are random too, so that a forgotten one shows."""
    torch.manual_seed(0)
    config = (CASES | STATEFUL | LATENT)[case]()
    make = AutoModelForCausalLM.from_config
    if isinstance(config, Mistral4Config):  # which the library makes as a part of another model alone
        make = Mistral4ForCausalLM._from_config
    model = make(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.3)
            elif "norm" in name or ".ln_" in name or name.endswith("scale"):
                parameter.uniform_(0.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.3)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    return model


def save(model: PreTrainedModel, directory: Path, max_shard_size: str = "50GB") -> str:
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return str(directory)


def hf_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float()


def hf_greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()
