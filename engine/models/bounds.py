"""What a model may plausibly be: the values that a number of its config may take, all in one place.

A file that says more is damaged, or means harm, and is refused by the name of the field, before anything is counted or
allocated by it. Largest are several times those of the largest model published. What is within these bounds and still
does not fit this machine, `engine.resolve` refuses.
"""

from __future__ import annotations

from engine.limits import Range

CONFIG_BYTES = 8 * 2**20
"""of config.json and generation_config.json"""
INDEX_BYTES = 64 * 2**20
"""of model.safetensors.index.json"""
ROPE_FACTORS = 2**12
"""of a list: half of what a head turns"""
QUANT_STATE_BYTES = 2**10
"""of what bitsandbytes notes of a matrix"""
TOKENIZER_BYTES = 256 * 2**20
"""of one file that a tokenizer is made of"""

_VOCABULARY = Range(1, 2**24)
_WIDTH = Range(1, 2**17)
_INNER = Range(1, 2**20)
_LAYERS = Range(1, 2**11)
_EXPERTS = Range(1, 2**13)
_CHOSEN = Range(1, 2**8)
_HEADS = Range(1, 2**12)
_HEAD_DIM = Range(1, 2**12)
_POSITIONS = Range(1, 2**24)
_STRETCH = Range(1e-3, 1e6)
_EPSILON = Range(0.0, 1.0, open_low=True)
_MULTIPLIER = Range(1e-6, 1e6)

CONFIG_RANGES = {
    "vocab_size": _VOCABULARY,
    "draft_vocab_size": _VOCABULARY,
    "vocab_size_per_layer_input": _VOCABULARY,
    "num_labels": Range(1, 2**16),
    "target_hidden_size": _WIDTH,
    "hidden_size": _WIDTH,
    "type_vocab_size": Range(0, 2**8),
    "hidden_size_per_layer_input": Range(0, 2**17),
    "n_embd": _WIDTH,
    "word_embed_proj_dim": _WIDTH,
    "intermediate_size": _INNER,
    "block_ff_dim": _INNER,
    "block_multiple_of": _INNER,
    "block_ffn_dim_multiplier": _MULTIPLIER,
    "conv_L_cache": Range(2, 2**6),
    "num_dense_layers": _LAYERS,
    "mamba_expand": Range(1, 2**6),
    "mamba_d_ssm": _INNER,
    "mamba_n_heads": _HEADS,
    "mamba_n_groups": _HEADS,
    "mamba_num_heads": _HEADS,
    "mamba_head_dim": _HEAD_DIM,
    "n_groups": _HEADS,
    "ssm_state_size": _HEAD_DIM,
    "conv_kernel": Range(2, 2**6),
    "mamba_d_head": _HEAD_DIM,
    "mamba_d_state": _HEAD_DIM,
    "mamba_d_conv": Range(2, 2**6),
    "linear_num_key_heads": _HEADS,
    "linear_num_value_heads": _HEADS,
    "linear_key_head_dim": _HEAD_DIM,
    "linear_value_head_dim": _HEAD_DIM,
    "linear_conv_kernel_dim": Range(2, 2**6),
    "linear_num_heads": _HEADS,
    "linear_head_dim": _HEAD_DIM,
    "full_attention_interval": _LAYERS,
    "intermediate_size_mlp": _INNER,
    "n_inner": _INNER,
    "ffn_dim": _INNER,
    "moe_intermediate_size": _INNER,
    "shared_expert_intermediate_size": _INNER,
    "moe_shared_expert_intermediate_size": _INNER,
    "shared_intermediate_size": _INNER,
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "n_routed_experts": _EXPERTS,
    "moe_num_experts": _EXPERTS,
    "n_shared_experts": _EXPERTS,
    "moe_num_shared_experts": _EXPERTS,
    "num_experts_per_tok": _CHOSEN,
    "top_k_experts": _CHOSEN,
    "moe_k": _CHOSEN,
    "n_group": _EXPERTS,
    "topk_group": _EXPERTS,
    "routed_scaling_factor": Range(0.0, 1e3, open_low=True),
    "moe_norm_min": Range(0.0, 1.0),
    "swiglu_limit": Range(0.0, 1e6, open_low=True),
    "swiglu_alpha": Range(0.0, 1e3, open_low=True),
    "rotary_dim": _HEAD_DIM,
    "num_hidden_layers": _LAYERS,
    "decoder_sparse_step": _LAYERS,
    "interleave_moe_layer_step": _LAYERS,
    "num_kv_shared_layers": Range(0, 2**11),
    "first_k_dense_replace": Range(0, 2**11),
    "max_window_layers": Range(0, 2**11),
    "moe_layer_interval": _LAYERS,
    "moe_layer_start_index": Range(0, 2**11),
    "moe_layer_end_index": Range(-1, 2**11),
    "n_layer": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "num_global_key_value_heads": _HEADS,
    "n_head": _HEADS,
    "head_dim": _HEAD_DIM,
    "q_lora_rank": _WIDTH,
    "kv_lora_rank": _WIDTH,
    "qk_nope_head_dim": _HEAD_DIM,
    "qk_rope_head_dim": _HEAD_DIM,
    "v_head_dim": _HEAD_DIM,
    "global_head_dim": _HEAD_DIM,
    "max_position_embeddings": _POSITIONS,
    "n_positions": _POSITIONS,
    "original_max_position_embeddings": _POSITIONS,
    "sliding_window": _POSITIONS,
    "sliding_window_pattern": _LAYERS,
    "attention_chunk_size": _POSITIONS,
    "floor_scale": _POSITIONS,
    "attn_scale": Range(0.0, 1e3),
    "local_attention": Range(2, 2**24),
    "global_attn_every_n_layers": _LAYERS,
    "rms_norm_eps": _EPSILON,
    "layer_norm_epsilon": _EPSILON,
    "layer_norm_eps": _EPSILON,
    "norm_eps": _EPSILON,
    "norm_epsilon": _EPSILON,
    "attention_multiplier": _MULTIPLIER,
    "embedding_multiplier": _MULTIPLIER,
    "lm_head_multiplier": _MULTIPLIER,
    "key_multiplier": _MULTIPLIER,
    "attention_in_multiplier": _MULTIPLIER,
    "attention_out_multiplier": Range(1e-3, 1e3),
    "mlp_multipliers": _MULTIPLIER,
    "ssm_multipliers": _MULTIPLIER,
    "ssm_in_multiplier": _MULTIPLIER,
    "ssm_out_multiplier": _MULTIPLIER,
    "residual_multiplier": Range(1e-3, 1e3),
    "logits_scaling": _MULTIPLIER,
    "logit_scale": _MULTIPLIER,
    "no_rope_layer_interval": _LAYERS,
    "alpha": _STRETCH,
    "llama_4_scaling_beta": Range(0.0, 1e3),
    "query_pre_attn_scalar": Range(1e-6, 1e6),
    "attn_logit_softcapping": Range(1e-6, 1e6),
    "final_logit_softcapping": Range(1e-6, 1e6),
    "partial_rotary_factor": Range(0.0, 1.0, open_low=True),
    "rope_theta": Range(1.0, 1e15, open_low=True),
    "factor": _STRETCH,
    "short_factor": _STRETCH,
    "long_factor": _STRETCH,
    "low_freq_factor": _STRETCH,
    "high_freq_factor": _STRETCH,
    "attention_factor": _STRETCH,
    "beta_fast": _STRETCH,
    "beta_slow": _STRETCH,
    "mscale": Range(0.0, 1e3),
    "mscale_all_dim": Range(0.0, 1e3),
    "truncate": Range(0, 1),
}
"""by the names of Hugging Face's configs"""

GGUF_RANGES = {
    "embedding_length": _WIDTH,
    "embedding_length_per_layer_input": _WIDTH,
    "feed_forward_length": _INNER,
    "block_count": _LAYERS,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _HEADS,
    "attention.key_length": _HEAD_DIM,
    "attention.key_length_swa": _HEAD_DIM,
    "attention.value_length": _HEAD_DIM,
    "attention.sliding_window": _POSITIONS,
    "rope.dimension_count": _HEAD_DIM,
    "rope.dimension_count_swa": _HEAD_DIM,
    "expert_count": _EXPERTS,
    "expert_used_count": _CHOSEN,
    "expert_shared_count": _EXPERTS,
    "expert_group_count": _EXPERTS,
    "expert_group_used_count": _EXPERTS,
    "expert_feed_forward_length": _INNER,
    "expert_shared_feed_forward_length": _INNER,
    "context_length": _POSITIONS,
    "rope.scaling.original_context_length": _POSITIONS,
}
"""the same of GGUF metadata, by its keys behind the architecture's name"""
