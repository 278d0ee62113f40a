"""Metadata that llama.cpp's converter writes of a Gemma 4 beside what it writes of every model."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGUFWriter


def add_gemma4(writer: GGUFWriter, config: Any) -> None:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    wide = config.per_layer_config[sliding.index(False)]
    layers, own = config.num_hidden_layers, config.num_hidden_layers - config.num_kv_shared_layers
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_sliding_window_pattern(sliding)
    writer.add_key_length(wide.head_dim)
    writer.add_value_length(wide.head_dim)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    if config.use_double_wide_mlp:
        writer.add_feed_forward_length([config.intermediate_size * (1 + (layer >= own)) for layer in range(layers)])
    if wide.num_key_value_heads != config.num_key_value_heads:
        heads = (wide.num_key_value_heads, config.num_key_value_heads)
        writer.add_head_count_kv([heads[its] for its in sliding])
    writer.add_rope_dimension_count(wide.head_dim)
    writer.add_rope_dimension_count_swa(config.head_dim)
    full = config.rope_parameters["full_attention"]
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    turned = int(wide.head_dim * full["partial_rotary_factor"] / 2)
    divisors = np.array([1.0] * turned + [1e30] * (wide.head_dim // 2 - turned), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
