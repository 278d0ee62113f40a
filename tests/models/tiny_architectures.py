"""Tiny configs of the causal language models that transformers has, by model type: a shared shape and differences."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# A key applies where the config class has a field, or an attribute_map entry, of that name.
SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "sliding_window": 16,
    "use_sliding_window": True,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "shared_intermediate_size": 48,
    # multi-head latent attention: keys of 16 + 8, values of 16
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # granite, gemma
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
    "query_pre_attn_scalar": 24,
    "vocab_size_per_layer_input": 199,
    "hidden_size_per_layer_input": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    # an indexer of tokens to attend to
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "indexer_types": ["full", "shared", "full"],
    # linear attention and state spaces
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "mamba_dt_rank": 8,
    "use_mamba_kernels": False,
    "n_mamba_heads": 8,
    "chunk_size": 16,
    "state_size": 16,
    "time_step_rank": 4,
    "num_nextn_predict_layers": 0,
    "hc_mult": 2,
    # inkling
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "d_rel": 8,
    "rel_extent": 16,
    "unpadded_vocab_size": 199,
    "log_scaling_n_floor": 16,
}
ENCODER_DECODER: dict[str, Any] = {
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "decoder_start_token_id": 2,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
FOUR: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": [*WINDOWS, "full_attention"]}
HYBRID_WINDOWS = ["hybrid_sliding", "hybrid", "hybrid_sliding"]
NO_GROUPS: dict[str, Any] = {"num_key_value_heads": 4}

# qwen2_moe and phimoe tell the attention function nothing of their windows: only a mask would. diffllama calls it twice
# per layer. exaone4, exaone_moe, kolibri1 keep module.sliding_window in full layers too: believe the keyword argument.
PLAIN_ATTENTION = """
    apertus apertus1p5_text arcee biogpt bitnet cohere diffllama ernie4_5 exaone flex_olmo gemma glm glm4 glm4_moe
    gpt-sw3 gpt2 gpt_bigcode gpt_neox granitemoe granitemoeshared helium hunyuan_v1_dense hy_v3 internlm3
    iquestcoder jais2 jetmoe llama minimax_m2 ministral3 mistral mixtral nanochat nemotron olmo2 persimmon phi phi3
    phimoe sarvam_moe seed_oss solar_open stablelm starcoder2
"""
WINDOWED = """
    afmoe beam cohere2 cwm dots1 exaone4 exaone_moe gemma2 gemma3_text gpt_oss kolibri1 mellum ministral olmo3 qwen2
    qwen3 vaultgemma
"""
ATTENTION: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN_ATTENTION.split()},
    **{name: {"layer_types": WINDOWS} for name in WINDOWED.split()},
    "aria_text": {"moe_topk": 2},
    "axk1": NO_GROUPS,
    "deepseek_v3": NO_GROUPS,
    "glm4_moe_lite": NO_GROUPS,
    "sarvam_mla": NO_GROUPS,
    "codegen": {"rotary_dim": 8},
    "cohere2_moe": {"layer_types": WINDOWS, "prefix_dense_intermediate_size": 96, "layer_norm_eps": 1e-05},
    "cohere_compass_text": {
        "layer_types": WINDOWS,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "ctrl": {"dff": 96},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "max_seq_len": 256,
    },
    "deepseek_v2": {**NO_GROUPS, "head_dim": 8},
    # Layers 1 and 2 run twice under the same layer_idx, each time with keys of their own.
    "dory": {**FOUR, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "ernie4_5_moe": {"moe_k": 2, "moe_layer_end_index": 2},
    "flint": {"layer_types": WINDOWS, "mlp_only_layers": [0]},
    "gemma3n_text": {
        **FOUR,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "intermediate_size": [96, 96, 96, 96],
        "altup_num_inputs": 2,
    },
    # Full layers have fewer and longer heads. Traces only without _maybe_slice_kv_shared_inputs.
    "gemma4_text": {**FOUR, "num_kv_shared_layers": 2},
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "gptj": {"rotary_dim": 8},
    "granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "granite_swa": {"layer_types": WINDOWS, "layer_rope_theta": [10000.0, 20000.0, 10000.0]},
    "granitemoe_swa": {"layer_types": WINDOWS, "layer_rope_theta": [10000.0, 20000.0, 10000.0]},
    # num_hidden_layers = stack * H * (L + 1), the caches; layer_idx repeats 0, 1.
    "hrm_text": {
        "num_layers_per_stack": 2,
        "H_cycles": 2,
        "L_cycles": 1,
        "L_bp_cycles": [1],
        "prefix_lm": False,
        "num_hidden_layers": 8,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hyperclovax": {"residual_multiplier": 0.5},
    # Layers differ in the number of query heads.
    "laguna": {"layer_types": WINDOWS, "num_attention_heads_per_layer": [4, 8, 4]},
    # Chunks are in the mask alone; the temperature of no-rope layers counts from row 0 of the batch, not position_ids.
    "llama4_text": {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 96,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 0, 1, 0],
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "full_attention"],
        "attention_chunk_size": 16,
        "floor_scale": 8,
        "num_experts_per_tok": 1,
    },
    # Two attentions per layer, layer_idx 0..3; config.num_hidden_layers is 4.
    "longcat_flash": {
        **NO_GROUPS,
        "num_layers": 2,
        "zero_expert_num": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 48,
        "head_dim": 8,
        "qk_head_dim": 24,
    },
    # Sinks and more KV heads in the windowed layers only; keys of 24, values of 16.
    "mimo_v2_flash": {"layer_types": WINDOWS, "head_dim": 24},
    "minicpm3": {**NO_GROUPS, "head_dim": 8, "dim_model_base": 16},
    "modernbert-decoder": {"layer_types": WINDOWS, "local_attention": 32},
    "olmo": {"clip_qkv": 8.0},
    "olmoe": {"clip_qkv": 8.0},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen2_moe": {"layer_types": WINDOWS, "mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "smollm3": {"layer_types": WINDOWS, "no_rope_layers": [1, 0, 1]},
    "youtu": {**NO_GROUPS, "embedding_initializer_range": 0.2},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**NO_GROUPS, "layer_types": LINEAR, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 128},
    "falcon_mamba": {},
    "granitemoehybrid": {"layer_types": LINEAR},
    "inkling2_loop_text": {
        "layer_types": HYBRID_WINDOWS,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    "inkling2_text": {"layer_types": HYBRID_WINDOWS, "n_layers_per_attn_res_block": 2},
    "inkling_text": {"layer_types": HYBRID_WINDOWS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**NO_GROUPS, "layer_types": LINEAR, "linear_head_dim": 16, "linear_num_heads": 4},
    "lara_mini": {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "full_attn_idxs": None, "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"]},
    "mamba": {},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "minimax": {"layer_types": LINEAR, "block_size": 16, "sliding_window": None},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 48,
        "sliding_window": None,
    },
    "olmo_hybrid": {"layer_types": LINEAR, "linear_num_key_heads": 4},
    "qwen3_5_moe_text": {"layer_types": LINEAR},
    "qwen3_5_text": {"layer_types": LINEAR},
    "qwen3_next": {"layer_types": LINEAR, "mlp_only_layers": [0]},
    "qwen4_exp_text": {
        "num_hidden_layers": 4,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_embed_dim": 64,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 64},
    "xlstm": {"num_heads": 4, "num_blocks": 3, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "zamba": {
        **NO_GROUPS,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        **NO_GROUPS,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "mamba_d_state": 16,
        "adapter_rank": 8,
        "num_hidden_layers": 4,
    },
    "zaya": {"router_hidden_size": 16, "num_experts_per_tok": 1},
}
# The name of the indexed layer type changed after 5.17: it is left to the classes' defaults.
# Indexed layers, gpt_neo, falcon, mpt, qwen4_exp raise without a mask; bloom, gpt_neox_japanese, xglm, reformer are
# wrong without one; cpmant, openai-gpt, xlnet never ask; the others are called with a part of the keys or of the mask.
BYPASSING: dict[str, dict[str, Any]] = {
    "axk2": {**NO_GROUPS, "gated_norm_rank": 8},
    "bloom": {},
    "cpmant": {"dim_head": 16, "dim_ff": 96, "position_bias_num_buckets": 32, "position_bias_max_distance": 128},
    "deepseek_v32": NO_GROUPS,
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "num_key_value_heads": 1,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
        "o_lora_rank": 16,
    },
    "doge": {"sliding_window": None},
    "dots3_note_text": {
        **NO_GROUPS,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "head_dim": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
        "shared_experts_intermediate_size": 48,
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
    "glm_moe_dsa": NO_GROUPS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 16},
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},
    "hy_v4": NO_GROUPS,
    "minimax_m3_vl_text": {
        "dense_intermediate_size": 96,
        "rotary_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    },
    "mpt": {"attn_config": {"alibi": True}},
    "openai-gpt": {},
    "reformer": {
        "attention_head_size": 16,
        "feed_forward_size": 96,
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [32, 32],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "xglm": {"ffn_dim": 96, "num_layers": 3, "attention_heads": 4},
    "xlnet": {"d_inner": 96, "d_head": 16},
}
# The decoders of encoder-decoder models ignore position_ids (all but whisper); RoBERTas add pad_token_id + 1 to them.
# big_bird, megatron-bert, mvp, prophetnet, rembert, roformer, trocr bypass the interface.
PLAIN_DECODER_HALVES = """
    bert bert-generation camembert data2vec-text ernie megatron-bert roberta roberta-prelayernorm xlm-roberta
    xlm-roberta-xl
"""
PLAIN_ENCODER_DECODERS = """
    bart blenderbot blenderbot-small mbart mvp pegasus plbart trocr
"""
DECODER_HALVES: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN_DECODER_HALVES.split()},
    **{name: {**ENCODER_DECODER} for name in PLAIN_ENCODER_DECODERS.split()},
    "big_bird": {"attention_type": "original_full", "sep_token_id": 3},
    "bigbird_pegasus": {**ENCODER_DECODER, "attention_type": "original_full"},
    "electra": {"embedding_size": 64},
    "marian": {**ENCODER_DECODER, "decoder_vocab_size": 199},
    "prophetnet": {
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "num_encoder_layers": 3,
        "num_decoder_layers": 3,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "add_cross_attention": False,
    },
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 48},
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 16,
        "shape_embed_dim": 16,
        "shape_vocab_size": 16,
    },
    "roformer": {"embedding_size": 64},
    "whisper": {**ENCODER_DECODER, "max_target_positions": 256, "num_mel_bins": 8, "begin_suppress_tokens": None},
    "xmod": {"default_language": "en_XX"},
}
ARCHITECTURES: dict[str, dict[str, Any]] = {**ATTENTION, **HYBRIDS, **BYPASSING, **DECODER_HALVES}


def known() -> list[str]:
    """The model types of the table that this transformers has."""
    return [
        name for name in ARCHITECTURES if name in CONFIG_MAPPING_NAMES and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    ]


def config_of(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The tiny config of a model type; `changes` go over everything else."""
    config_class = CONFIG_MAPPING[model_type]
    names = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    values = {name: value for name, value in SHAPE.items() if name in names}
    merged: dict[str, Any] = {}
    for differences in (values, ARCHITECTURES[model_type], changes):
        merged |= {config_class.attribute_map.get(name, name): value for name, value in differences.items()}
    return config_class(**copy.deepcopy(merged))  # the classes edit what they are given
