"""DecoderSpec: all that makes one decoder-only transformer different from another, as data. Torch-free.

A *family* (`engine/models/families/*.py`) is a pure function from a Hugging Face config (a dict) to a `DecoderSpec`
and a weight-name map; `engine.models.decoder.Decoder` builds the one module from it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

NormKind = Literal["rms", "rms_one_plus", "layer"]
"""RMSNorm; RMSNorm times 1 + weight, rounded once at the end (Gemma); LayerNorm with bias"""
NormPlacement = Literal["before", "around", "after"]
"""where a norm stands: before attention and MLP; before and after each, within the residual (Gemma 2, 3); after each,
around the residual (OPT-350m)"""
Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]


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
    rope: RopeSpec | None = None
    """None: positions are not rotated"""
    local_rope: RopeSpec | None = None
    """of layers with a window, where they have one of their own (Gemma 3)"""
    position_offset: int | None = None
    """row of position 0 in a table of learned positions (GPT-2: 0, OPT: 2); None: there is no such table"""
    norm: NormKind = "rms"
    norm_placement: NormPlacement = "before"
    final_norm: bool = True
    norm_eps: float
    activation: Activation = "silu"
    gated: bool = True
    """the MLP is activation(gate) * up; else the activation alone"""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """a norm of the model's kind over each head of q and k (Qwen3, Gemma 3)"""
    sinks: bool = False
    """a learned logit of each head joins the softmax (GPT-OSS)"""
    tie_embeddings: bool = False
    embedding_size: int | None = None
    """of a token in the table, projected to and from hidden_size (OPT-350m); None: hidden_size"""
    embedding_scale: float | None = None
    """that embeddings are multiplied with, rounded to the model's dtype (Gemma: the root of hidden_size)"""
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
        matrices = 3 if self.gated else 2
        return self.num_layers * self.hidden_size * (heads + matrices * self.intermediate_size)
