"""Qwen2 and Qwen2.5: biases on Q, K and V only; sliding windows on some layers where `use_sliding_window` says so.
MiMo-7B is one with layers that predict further tokens, which are left out."""

from __future__ import annotations

from engine.models.families.common import Config, Family, decoder_spec, layer_type_windows
from engine.models.families.names import LLAMA_NAMES
from engine.models.heads import HEADS, REWARD
from engine.models.spec import DecoderSpec


def qwen2_spec(config: Config, family: str = "qwen2") -> DecoderSpec:
    return decoder_spec(config, family, windows=layer_type_windows(config), qkv_bias=True, default_kv_heads=32)


def mimo_spec(config: Config) -> DecoderSpec:
    return qwen2_spec(config, "mimo")


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", qwen2_spec, LLAMA_NAMES.rows, heads={**HEADS, "ForRewardModel": REWARD})
MIMO = Family("mimo", "MiMoForCausalLM", mimo_spec, LLAMA_NAMES.rows, predicts_more=True)
