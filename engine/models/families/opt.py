"""OPT: LayerNorm, learned positions from row 2 on, a plain MLP with ReLU, biases. OPT-350m norms behind the residual
and has narrow embeddings, projected to the hidden size and back."""

from __future__ import annotations

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.families.common import Config, Family, activation_of, flag, integer
from engine.models.families.rows import Rows
from engine.models.spec import DecoderSpec, LayerSpec, MixerSpec, MlpSpec


def opt_spec(config: Config) -> DecoderSpec:
    if not flag(config, "layer_norm_elementwise_affine", True):
        raise UnsupportedModelError("layer_norm_elementwise_affine=false is not supported: LayerNorms have weights")
    hidden_size, num_heads = integer(config, "hidden_size", 768), integer(config, "num_attention_heads", 12)
    if hidden_size % num_heads:
        raise ConfigError(f"hidden_size {hidden_size} is not a multiple of {num_heads} heads")
    embedding_size = integer(config, "word_embed_proj_dim", hidden_size)
    norms_first = flag(config, "do_layer_norm_before", True)
    bias = flag(config, "enable_bias", True)
    head_dim = hidden_size // num_heads
    mixer = MixerSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=bias,
        o_bias=bias,
    )
    mlp = MlpSpec(
        intermediate_size=integer(config, "ffn_dim", 3072),
        activation=activation_of(config, "activation_function", "relu"),
        gated=False,
        bias=bias,
    )
    return DecoderSpec(
        family="opt",
        vocab_size=integer(config, "vocab_size", 50272),
        hidden_size=hidden_size,
        layers=(LayerSpec(mixer=mixer, mlp=mlp),) * integer(config, "num_hidden_layers", 12),
        position_offset=2,
        norm="layer",
        norm_placement="before" if norms_first else "after",
        final_norm=norms_first and not flag(config, "_remove_final_layer_norm"),
        norm_eps=1e-5,
        tie_embeddings=flag(config, "tie_word_embeddings", True),
        embedding_size=embedding_size if embedding_size != hidden_size else None,
        max_position=integer(config, "max_position_embeddings", 2048),
    )


def opt_weight_rows(spec: DecoderSpec) -> dict[str, Rows]:
    hidden, width = spec.hidden_size, spec.embedding_size
    mixer, mlp = spec.layers[0].attention, spec.layers[0].mlp
    assert mlp is not None
    rows = {
        "model.decoder.embed_tokens.weight": Rows("embed_tokens.weight", 0, spec.vocab_size),
        "model.decoder.embed_positions.weight": Rows("embed_positions.weight", 0, spec.max_position + 2),
    }
    if width is not None:
        rows["model.decoder.project_in.weight"] = Rows("project_in.weight", 0, hidden)
        rows["model.decoder.project_out.weight"] = Rows("project_out.weight", 0, width)
    if not spec.tie_embeddings:
        rows["lm_head.weight"] = Rows("lm_head.weight", 0, spec.vocab_size)
    if spec.final_norm:
        rows |= {f"model.decoder.final_layer_norm.{p}": Rows(f"norm.{p}", 0, hidden) for p in ("weight", "bias")}
    parts = [
        ("self_attn.q_proj", "qkv_proj", 0, hidden, mixer.qkv_bias),
        ("self_attn.k_proj", "qkv_proj", hidden, hidden, mixer.qkv_bias),
        ("self_attn.v_proj", "qkv_proj", 2 * hidden, hidden, mixer.qkv_bias),
        ("self_attn.out_proj", "o_proj", 0, hidden, mixer.o_bias),
        ("self_attn_layer_norm", "input_norm", 0, hidden, True),
        ("fc1", "gate_up_proj", 0, mlp.intermediate_size, mlp.bias),
        ("fc2", "down_proj", 0, hidden, mlp.bias),
        ("final_layer_norm", "mlp_norm", 0, hidden, True),
    ]
    for layer in range(spec.num_layers):
        for source, target, start, count, bias in parts:
            for part in ("weight", "bias") if bias else ("weight",):
                name = f"model.decoder.layers.{layer}.{source}.{part}"
                rows[name] = Rows(f"layers.{layer}.{target}.{part}", start, count)
    return rows


OPT = Family("opt", "OPTForCausalLM", opt_spec, opt_weight_rows)
