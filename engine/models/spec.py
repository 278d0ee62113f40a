"""DecoderSpec: all that makes one decoder-only transformer different from another, as data. Torch-free.

A *family* (`engine/models/families/*.py`) is a pure function from a Hugging Face config (a dict) to a `DecoderSpec`
and a weight-name map; `engine.models.decoder.Decoder` builds the one module from it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.models.facts import HeadsSpec, ModelFacts
from engine.models.heads import HeadSpec
from engine.models.mixers import DeltaSpec, LatentSpec, MambaSpec, MixerSpec, StateSpec

NormKind = Literal["rms", "rms_wide", "layer", "layer_no_bias"]
"""RMSNorm, rounded before it is weighted (Llama), or weighted in float32 and rounded once at the end (Gemma); LayerNorm
with and without bias"""
NormPlacement = Literal["before", "around", "after", "inside"]
"""where a norm stands: before attention and MLP; before and after each, within the residual (Gemma 2, 3); after each,
around the residual (OPT-350m); after each, within the residual (OLMo 2)"""
Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]
"""relu2: the square of ReLU"""


class QueryGrowth(msgspec.Struct, frozen=True):
    """Queries are multiplied by 1 + rate * ln(1 + (position + ahead) // period)."""

    rate: float
    period: int
    ahead: int = 0


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding, "neox" halves of each head's first `rotary_dim` elements; the others pass through. `kind` names
    the frequency rule; `params` are its numbers as in the HF config. With `rotary_dim` 0 nothing is turned, and queries
    only grow."""

    kind: Literal["default", "linear", "proportional", "llama3", "yarn", "longrope"] = "default"
    """proportional: the first `params["share"]` of the pairs turn, with frequencies as if all did"""
    theta: float = 10000.0
    rotary_dim: int
    params: dict[str, float] = {}
    original_max_position: int | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """longrope: what each frequency is divided by, where no position, or one, is beyond original_max_position"""
    growth: QueryGrowth | None = None
    """Llama 4's attention temperature, which Ministral 3 has, too"""


class MlpSpec(msgspec.Struct, frozen=True, kw_only=True):
    intermediate_size: int
    activation: Activation | Literal["xielu"] = "silu"
    """xielu: with two learnt numbers in each layer (Apertus)"""
    gated: bool = True
    """activation(gate) * up; else the activation alone"""
    bias: bool = False
    gate_scale: float = 1.0
    """of a gate, before its activation"""
    inner_scale: float = 1.0
    """of a gated MLP: of what the last matrix is given"""

    @property
    def first_size(self) -> int:
        """Outputs of the first matrix: gate and up, or the one."""
        return (1 + self.gated) * self.intermediate_size


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """From a token's logits to the experts that it is given to, and the factors of what they return, in float32."""

    kind: Literal["softmax", "chosen_softmax", "sigmoid"] = "softmax"
    """scores: softmax over all experts; logits, and factors a softmax over those of the chosen; sigmoids"""
    top_k: int
    normalise: bool = True
    """factors are divided by their sum"""
    correction: bool = False
    """a learnt number joins each expert's score where experts are chosen, but not its factor (DeepSeek-V3)"""
    groups: int = 1
    """of experts, of which `top_groups` are looked at: those whose two best scores have the largest sum"""
    top_groups: int = 1
    scale: float = 1.0
    """of factors, in the end"""
    bias: bool = False
    """of logits"""
    by_best: bool = False
    """of groups, those whose best score is the largest (DeepSeek-V2)"""
    wide: bool = False
    """logits are made in float32, whatever the model's dtype"""
    of_inputs: bool = False
    """the one factor is multiplied with what an expert is given, not with what it returns (Llama 4)"""
    expert_scales: bool = False
    """factors are multiplied with a learnt number of each expert, in the end (Gemma 4)"""


class ClampedSwiGLU(msgspec.Struct, frozen=True):
    """GPT-OSS's gate: the gate at most `limit`, up within ± `limit`; gate · sigmoid(alpha · gate) · (up + 1)."""

    limit: float = 7.0
    alpha: float = 1.702


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """MLPs, of which a router chooses some for each token."""

    count: int
    """that the router knows"""
    inner_size: int
    router: RouterSpec
    own: tuple[int, ...] | None = None
    """of those, in ascending order, what a rank's part of a model has; None: all"""
    activation: Activation | ClampedSwiGLU = "silu"
    gated: bool = True
    """activation(gate) * up; else the activation alone"""
    bias: bool = False
    gated_beside: bool = False
    """the dense MLP beside them is multiplied with a sigmoid of its own (Qwen2-MoE)"""
    apart: bool = False
    """they and the dense MLP beside them have norms of their own, and so has the router (Gemma 4)"""

    @property
    def held(self) -> int:
        """Experts whose matrices are here."""
        return self.count if self.own is None else len(self.own)

    @property
    def first_size(self) -> int:
        """Outputs of an expert's first matrix: gate and up, or the one."""
        return (1 + self.gated) * self.inner_size


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What mixes tokens in a layer, and what each token then goes through alone: a dense MLP, experts, or both."""

    mixer: MixerSpec | LatentSpec | StateSpec
    side: MambaSpec | None = None
    """of a layer that attends: keeps a state, is given what attention is, by the same first matrix, and joins the
    residual, too (Falcon-H1)"""
    input_norm: bool = True
    """where norms stand before: the mixer has one"""
    mlp: MlpSpec | None = None
    experts: ExpertsSpec | None = None

    @property
    def state(self) -> StateSpec | None:
        """Of a layer that keeps one, in the place of keys and values or beside them."""
        return self.mixer if isinstance(self.mixer, StateSpec) else self.side

    @property
    def first_size(self) -> int:
        """Outputs of the first matrix."""
        return self.mixer.first_size + (0 if self.side is None else self.side.first_size)

    @property
    def ends_with_mixer(self) -> bool:
        """Nothing follows."""
        return self.mlp is None and self.experts is None

    @property
    def attention(self) -> MixerSpec:
        """Of a layer that attends."""
        assert isinstance(self.mixer, MixerSpec)
        return self.mixer


class LayerInputsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Each layer is given `size` numbers of its own for each token: a row of a table, and a part of the token's
    embedding, projected (Gemma 4's per-layer embeddings)."""

    size: int
    vocab_size: int
    activation: Activation


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    causal: bool = True
    """a token sees those before it; else an encoder's: all of its prompt, and nothing is kept"""
    ropes: tuple[RopeSpec, ...] = ()
    position_offset: int | None = None
    """row of position 0 in a table of learned positions (GPT-2: 0, OPT: 2); None: there is no such table"""
    token_types: int = 0
    """rows of a table of kinds of tokens; a token of kind k comes as its id + k * vocab_size; 0: there is no table"""
    embedding_norm: bool = False
    """behind the sum of all embeddings"""
    norm: NormKind = "rms"
    norm_placement: NormPlacement = "before"
    parallel: Literal["one_norm", "two_norms"] | None = None
    """the MLP is given what attention is, behind the same norm or one of its own, and both join the residual at once;
    None: the MLP is given what attention has made"""
    final_norm: bool = True
    norm_eps: float
    tie_embeddings: bool = False
    head_bias: bool = False
    begins: bool = True
    """a model, or its first stage, which is given tokens; else a later stage, which is given states"""
    ends: bool = True
    """a model, or its last stage, which makes logits"""
    table_rows: int | None = None
    """of embedding and unembedding, of a rank's part of a model; None: vocab_size"""
    embedding_size: int | None = None
    """of a token in the table, projected to and from hidden_size (OPT-350m); None: hidden_size"""
    embedding_scale: float | None = None
    """that embeddings are multiplied with"""
    round_embedding_scale: bool = False
    """to the model's dtype (Gemma, which was trained with it)"""
    state_unit: float = 1.0
    """what passes from layer to layer is what the model's authors call so divided by this (`families/granite.py`)"""
    layer_inputs: LayerInputsSpec | None = None
    layer_scales: bool = False
    """what a layer returns is multiplied with a learnt number"""
    max_position: int
    logit_scale: float | None = None
    """that logits are multiplied with, before they are capped"""
    logit_cap: float | None = None
    head: HeadSpec | None = None
    """of a model that classifies, beside what it would generate with"""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def facts(self) -> ModelFacts:
        hidden = self.hidden_size
        outputs = 2 if self.norm_placement == "before" and self.parallel is None else 3
        mixers = [_mixer_weights(layer, hidden) for layer in self.layers]
        given, tables = 0, 0
        if self.layer_inputs is not None:
            given = self.num_layers * self.layer_inputs.size
            tables = given * self.layer_inputs.vocab_size
            mixers.append(3 * hidden * given)
        return ModelFacts(
            family=self.family,
            vocab_size=self.vocab_size,
            hidden_size=hidden,
            final_size=self.embedding_size or hidden,
            layers=tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, HeadsSpec)),
            states=tuple(layer.state for layer in self.layers if layer.state is not None),
            intermediate_size=max(_widest(layer) for layer in self.layers),
            mlp_values=given
            + max((1 + outputs) * hidden + max(_values(layer, hidden) for layer in self.layers), 6 * given),
            linear_weights=tables
            + sum(mixers)
            + sum(_mlp_weights(layer, hidden, all_experts=True) for layer in self.layers),
            active_weights=sum(mixers) + sum(_mlp_weights(layer, hidden, all_experts=False) for layer in self.layers),
            tie_embeddings=self.tie_embeddings,
            max_position=self.max_position,
            keeps_kv=self.causal,
            token_types=max(self.token_types, 1),
            rope_by_length=any(rope.kind == "longrope" for rope in self.ropes),
        )


def _widest(layer: LayerSpec) -> int:
    mlp, experts = layer.mlp, layer.experts
    return max(mlp.intermediate_size if mlp else 0, experts.inner_size if experts else 0)


def _values(layer: LayerSpec, hidden: int) -> int:
    """Of one token, alive at once in what follows attention, beside its state."""
    mlp, experts = layer.mlp, layer.experts
    dense = mlp.first_size + mlp.intermediate_size if mlp else 0
    if experts is None:
        return dense
    return (
        max(dense, experts.router.top_k * (experts.first_size + experts.inner_size + 2 * hidden) + 2 * experts.count)
        + hidden
    )


def layer_weights(spec: DecoderSpec, layer: LayerSpec) -> int:
    """Of its matrices."""
    return _mixer_weights(layer, spec.hidden_size) + _mlp_weights(layer, spec.hidden_size, all_experts=True)


def _mixer_weights(layer: LayerSpec, hidden: int) -> int:
    mixer = layer.mixer
    inner = mixer.inner_weights if isinstance(mixer, LatentSpec | DeltaSpec) else 0
    side = 0 if layer.side is None else layer.side.last_size
    return hidden * (layer.first_size + mixer.last_size + side) + inner


def _mlp_weights(layer: LayerSpec, hidden: int, *, all_experts: bool) -> int:
    mlp, experts = layer.mlp, layer.experts
    dense = hidden * (mlp.first_size + mlp.intermediate_size) if mlp else 0
    if experts is None:
        return dense
    of_each = (experts.first_size + experts.inner_size) * hidden
    many = experts.held if all_experts else min(experts.router.top_k, experts.held)
    return dense + hidden * experts.count + many * of_each
