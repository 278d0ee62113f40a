"""Model directories made on the spot: shapes of known models without weights, and tiny random ones by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from gpu.context import load_test_module

_QWEN3: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "num_key_value_heads": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, object]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
HYBRID = "qwen3.5-0.8b"
SHAPES[HYBRID] = SHAPES["qwen3-0.6b"] | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 24,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 3584,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_DRY_HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2} | {
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_DRY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
"""head_dim 64, the smallest that the GPU kernels have"""


def shape_directory(name: str, folder: Path, dry: bool) -> Path:
    """A model directory of the named shape, for `load_format="dummy"`; `dry`: shrunk to a toy."""
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    toy = _DRY | (_DRY_HYBRID if name == HYBRID else {}) if dry else {}
    (path / "config.json").write_text(json.dumps(SHAPES[name] | toy))
    save_tokenizer(path)
    return path


def read_config(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((path / "config.json").read_text())
    return loaded


def save_tiny(family: str, path: Path) -> torch.nn.Module:
    """Random weights in a shape that the GPU kernels serve, with the tests' flags of the family; transformers' module
    in float32 on the CPU."""
    import transformers

    tiny = load_test_module("end_to_end", "tiny_families")
    flags = (tiny.TINY_FAMILIES | tiny.STATE_FAMILIES)[family]
    kind = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    sizes = {} if "kv_lora_rank" in flags else {"head_dim": 64}  # heads of latents have several
    # transformers 5.17 has one group in the norm behind Granite's Mamba layers, whatever the model says.
    sizes |= {"mamba_n_groups": 1} if family == "GraniteMoeHybrid" else {}
    config = kind(**{**_TINY, **flags, **sizes})
    torch.manual_seed(11)
    model: torch.nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    model.set_attn_implementation("eager")  # type: ignore[operator]  # sdpa leaves soft caps out
    model.save_pretrained(path)  # type: ignore[operator]  # transformers' module
    save_tokenizer(path)
    return model


def save_tokenizer(path: Path) -> None:
    """One token per byte; the suite works with ids, the engine wants a tokenizer to know where a text ends."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{c: i + 3 for i, c in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(path)
