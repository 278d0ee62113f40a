"""Tiny random models of each family, made by transformers and saved as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers

_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}

TINY_FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 100},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Gemma2": {"head_dim": 32, "sliding_window": 100},
    "OPT": {"ffn_dim": 96, "init_std": 0.3},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 100},
    # This one has no family of ours: the library's module, with experts.
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    "DeepseekV3": {
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}

STATE_FAMILIES: dict[str, dict[str, Any]] = {
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "Qwen3_5": {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "GraniteMoeHybrid": {
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "FalconH1": {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 16, "attention_out_multiplier": 0.75},
    "KimiLinear": {
        "pad_token_id": 0,
        "num_key_value_heads": 4,
        "kv_lora_rank": 40,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "linear_head_dim": 16,
        "linear_num_heads": 3,
        "mlp_layer_types": ["dense", "dense", "dense"],
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}
"""whose layers keep states"""


def save_tiny(family: str, path: Path, **changes: Any) -> torch.nn.Module:
    """Write the model and a byte-level tokenizer to `path`; return transformers' module in float32."""
    import transformers

    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = kind(**{**_SHAPE, **TINY_FAMILIES.get(family, {}), **changes})
    torch.manual_seed(11)
    model: torch.nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    model.save_pretrained(path)  # type: ignore[operator]  # transformers' module
    save_tokenizer(path)
    return model


def save_tokenizer(path: Path) -> None:
    from tokenizers import decoders
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{c: i + 3 for i, c in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)
