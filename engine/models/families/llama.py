"""Llama 1 to 3.x, SmolLM, TinyLlama and others that say `LlamaForCausalLM`: full attention, optional biases."""

from __future__ import annotations

from engine.models.families.common import Config, Family, decoder_spec, flag, num_layers
from engine.models.families.names import LLAMA_NAMES
from engine.models.spec import DecoderSpec


def llama_spec(config: Config) -> DecoderSpec:
    attention_bias = flag(config, "attention_bias")
    return decoder_spec(
        config,
        "llama",
        windows=[None] * num_layers(config),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=flag(config, "mlp_bias"),
    )


LLAMA = Family("llama", "LlamaForCausalLM", llama_spec, LLAMA_NAMES.rows)
