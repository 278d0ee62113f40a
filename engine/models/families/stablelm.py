"""StableLM: Llama with LayerNorms and partial rotary; in some, attention and MLP are side by side behind one norm."""

from __future__ import annotations

from msgspec.structs import replace

from engine.models.families.common import Config, Family, decoder_spec, flag, num_layers, refuse, with_defaults
from engine.models.families.names import LLAMA_NAMES
from engine.models.spec import DecoderSpec


def stablelm_spec(config: Config) -> DecoderSpec:
    refuse(config, {"qk_layernorm": "there are no norms of q and k"})
    spec = decoder_spec(
        with_defaults({**config, "head_dim": None}, layer_norm_eps=1e-5),
        "stablelm",
        windows=[None] * num_layers(config),
        qkv_bias=flag(config, "use_qkv_bias"),
        default_rotary=0.25,
        default_kv_heads=32,
        epsilon="layer_norm_eps",
    )
    return replace(spec, norm="layer", parallel="one_norm" if flag(config, "use_parallel_residual") else None)


STABLELM = Family("stablelm", "StableLmForCausalLM", stablelm_spec, LLAMA_NAMES.rows)
