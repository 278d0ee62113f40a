"""DecoderSpec: all that makes one decoder-only transformer different from another, as data. Torch-free.

A *family* (`engine/models/families/*.py`) is a pure function from a Hugging Face config (a dict) to a `DecoderSpec`
and a weight-name map; `engine.models.decoder.Decoder` builds the one module from it.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding, "neox" halves. `kind` names the frequency rule; `params` are its numbers as in the HF
    config."""

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: float = 10000.0
    rotary_dim: int
    params: dict[str, float] = {}
    original_max_position: int | None = None


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What may differ between layers of one model."""

    window: int | None = None


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    rope: RopeSpec
    norm_eps: float
    activation: Literal["silu"] = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k (Qwen3)"""
    tie_embeddings: bool = False
    max_position: int
    scale: float
    """attention score scale, usually head_dim ** -0.5"""
    soft_cap: float | None = None
    logit_cap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def linear_weights(self) -> int:
        """Weights that every token is multiplied with: all layers' projections, without biases and the unembedding."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (heads + 3 * self.intermediate_size)
