"""DecoderSpec: all that makes one decoder-only transformer different from another, as data. Torch-free.

A *family* (`engine/models/families/*.py`) is a pure function from a Hugging Face config (a dict) to a `DecoderSpec`
and a weight-name map; `engine.models.decoder.Decoder` builds the one module from it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.models.facts import HeadsSpec, ModelFacts

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


class MixerSpec(HeadsSpec, frozen=True, kw_only=True):
    """A mixer of tokens: attention over heads that one matrix makes and another brings together."""

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """a norm of the model's kind over each head of q and k (Qwen3, Gemma 3)"""
    rope: int | None = None
    """which of the model's ropes turns q and k; None: they are not turned"""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Outputs of the one matrix that makes q, k and v."""
        return self.q_size + 2 * self.kv_size


class MlpSpec(msgspec.Struct, frozen=True, kw_only=True):
    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    """activation(gate) * up; else the activation alone"""
    bias: bool = False

    @property
    def first_size(self) -> int:
        """Outputs of the first matrix: gate and up, or the one."""
        return (1 + self.gated) * self.intermediate_size


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What mixes tokens in a layer, and what each token then goes through alone."""

    mixer: MixerSpec
    mlp: MlpSpec


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...] = ()
    position_offset: int | None = None
    """row of position 0 in a table of learned positions (GPT-2: 0, OPT: 2); None: there is no such table"""
    norm: NormKind = "rms"
    norm_placement: NormPlacement = "before"
    final_norm: bool = True
    norm_eps: float
    tie_embeddings: bool = False
    embedding_size: int | None = None
    """of a token in the table, projected to and from hidden_size (OPT-350m); None: hidden_size"""
    embedding_scale: float | None = None
    """that embeddings are multiplied with, rounded to the model's dtype (Gemma: the root of hidden_size)"""
    max_position: int
    logit_cap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def facts(self) -> ModelFacts:
        hidden = self.hidden_size
        outputs = 2 if self.norm_placement == "before" else 3
        mlps = [layer.mlp for layer in self.layers]
        return ModelFacts(
            family=self.family,
            vocab_size=self.vocab_size,
            hidden_size=hidden,
            final_size=self.embedding_size or hidden,
            layers=tuple(layer.mixer for layer in self.layers),
            intermediate_size=max(mlp.intermediate_size for mlp in mlps),
            mlp_values=(1 + outputs) * hidden + max(mlp.first_size + mlp.intermediate_size for mlp in mlps),
            linear_weights=sum(_matrix_weights(layer, hidden) for layer in self.layers),
            tie_embeddings=self.tie_embeddings,
            max_position=self.max_position,
        )


def _matrix_weights(layer: LayerSpec, hidden: int) -> int:
    mixer, mlp = layer.mixer, layer.mlp
    return hidden * (mixer.qkv_size + mixer.q_size + mlp.first_size + mlp.intermediate_size)
