"""Encoders of BERT's kind: LayerNorm behind the residual, learned positions, a plain MLP, biases, and attention that
looks both ways. RoBERTa's positions begin behind the padding token's id; DistilBERT has no token types."""

from __future__ import annotations

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.families.common import Config, Family, activation_of, flag, integer, number, refuse
from engine.models.families.names import Names
from engine.models.families.rows import Rows
from engine.models.heads import HeadForm
from engine.models.json_file import shown
from engine.models.mixers import MixerSpec
from engine.models.spec import DecoderSpec, LayerSpec, MlpSpec

_EACH = HeadForm(pooled="all", out="classifier", out_bias=True)
_KEYS = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
"""DistilBERT's names in BERT's"""


def _encoder_spec(config: Config, family: str, *, first_position: int = 0, token_types: int = 0) -> DecoderSpec:
    refuse(config, {"is_decoder": "an encoder looks both ways", "add_cross_attention": "there is no other encoder"})
    if config.get("position_embedding_type") not in (None, "absolute"):
        kind = shown(config["position_embedding_type"])
        raise UnsupportedModelError(f"position_embedding_type {kind} is not supported; absolute is")
    hidden, heads = integer(config, "hidden_size", 768), integer(config, "num_attention_heads", 12)
    positions = integer(config, "max_position_embeddings", 512)
    if hidden % heads:
        raise ConfigError(f"hidden_size {hidden} is not a multiple of {heads} heads")
    if positions <= first_position:
        raise ConfigError(f"max_position_embeddings must exceed {first_position}, found {positions}")
    head_dim = hidden // heads
    mixer = MixerSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5, qkv_bias=True, o_bias=True
    )
    mlp = MlpSpec(
        intermediate_size=integer(config, "intermediate_size", 3072),
        activation=activation_of(config, "hidden_act", "gelu"),
        gated=False,
        bias=True,
    )
    return DecoderSpec(
        family=family,
        vocab_size=integer(config, "vocab_size", 30522),
        hidden_size=hidden,
        layers=(LayerSpec(mixer=mixer, mlp=mlp),) * integer(config, "num_hidden_layers", 12),
        causal=False,
        position_offset=first_position,
        token_types=token_types,
        embedding_norm=True,
        norm="layer",
        norm_placement="after",
        final_norm=False,
        norm_eps=number(config, "layer_norm_eps", 1e-12),
        tie_embeddings=True,
        max_position=positions - first_position,
    )


def bert_spec(config: Config) -> DecoderSpec:
    return _encoder_spec(config, "bert", token_types=integer(config, "type_vocab_size", 2))


def roberta_spec(config: Config, family: str = "roberta") -> DecoderSpec:
    padding = config.get("pad_token_id", 1)
    if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
        raise ConfigError(f"pad_token_id must be a token id, found {shown(padding)}")
    return _encoder_spec(config, family, first_position=padding + 1, token_types=integer(config, "type_vocab_size", 2))


def xlm_roberta_spec(config: Config) -> DecoderSpec:
    return roberta_spec(config, "xlm-roberta")


def camembert_spec(config: Config) -> DecoderSpec:
    return roberta_spec(config, "camembert")


def distilbert_spec(config: Config) -> DecoderSpec:
    if flag(config, "sinusoidal_pos_embds"):
        raise UnsupportedModelError("sinusoidal_pos_embds=true is not supported: positions are learned")
    return _encoder_spec({**config, **{ours: config.get(name) for name, ours in _KEYS.items()}}, "distilbert")


class EncoderNames(Names, frozen=True, kw_only=True):
    """With what stands beside the embedding of tokens."""

    embeddings: str

    def rows(self, spec: DecoderSpec) -> dict[str, Rows]:
        rows = super().rows(spec)
        positions = spec.max_position + (spec.position_offset or 0)
        rows[f"{self.embeddings}.position_embeddings.weight"] = Rows("embed_positions.weight", 0, positions)
        if spec.token_types:
            rows[f"{self.embeddings}.token_type_embeddings.weight"] = Rows("embed_types.weight", 0, spec.token_types)
        return rows


def _names(prefix: str) -> EncoderNames:
    return EncoderNames(
        embeddings=f"{prefix}embeddings",
        embedding_norm=f"{prefix}embeddings.LayerNorm",
        embedding=f"{prefix}embeddings.word_embeddings",
        layers=f"{prefix}encoder.layer",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        o="attention.output.dense",
        gate_up=("intermediate.dense",),
        down="output.dense",
        norms=(("attention.output.LayerNorm", "input_norm"), ("output.LayerNorm", "mlp_norm")),
    )


_DISTILBERT_NAMES = EncoderNames(
    embeddings="distilbert.embeddings",
    embedding_norm="distilbert.embeddings.LayerNorm",
    embedding="distilbert.embeddings.word_embeddings",
    layers="distilbert.transformer.layer",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    o="attention.out_lin",
    gate_up=("ffn.lin1",),
    down="ffn.lin2",
    norms=(("sa_layer_norm", "input_norm"), ("output_layer_norm", "mlp_norm")),
)
_POOLED = HeadForm(pooled="cls", out="classifier", out_bias=True, dense="bert.pooler.dense")
_ROBERTA_HEAD = HeadForm(pooled="cls", out="classifier.out_proj", out_bias=True, dense="classifier.dense")
_DISTILBERT_HEAD = HeadForm(pooled="cls", out="classifier", out_bias=True, dense="pre_classifier", activation="relu")
_LEFT_OUT = (
    "position_ids",
    "pooler.dense.weight",
    "pooler.dense.bias",
    *(f"cls.predictions.{name}" for name in ("bias", "decoder.weight", "decoder.bias")),
    *(f"cls.predictions.transform.{name}.{part}" for name in ("dense", "LayerNorm") for part in ("weight", "bias")),
    *(f"cls.predictions.transform.LayerNorm.{part}" for part in ("gamma", "beta")),
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
    "lm_head.bias",
    *(f"lm_head.{name}.{part}" for name in ("dense", "layer_norm", "decoder") for part in ("weight", "bias")),
    *(f"vocab_{name}.{part}" for name in ("transform", "layer_norm", "projector") for part in ("weight", "bias")),
)
"""of heads that fill in words, and a pooler that nobody asks"""
_FORMERLY = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""in checkpoints that were made from TensorFlow's, as google-bert/bert-base-uncased"""


def _heads(of_texts: HeadForm) -> dict[str, HeadForm]:
    return {"ForSequenceClassification": of_texts, "ForTokenClassification": _EACH}


def _roberta(name: str, architecture: str, spec: object) -> Family:
    return Family(
        name,
        architecture,
        spec,  # type: ignore[arg-type]
        _names("roberta.").rows,
        prefix="roberta.",
        formerly=_FORMERLY,
        ignored=_LEFT_OUT,
        causal=False,
        heads=_heads(_ROBERTA_HEAD),
    )


BERT = Family(
    "bert",
    "BertModel",
    bert_spec,
    _names("bert.").rows,
    prefix="bert.",
    formerly=_FORMERLY,
    ignored=_LEFT_OUT,
    causal=False,
    heads=_heads(_POOLED),
)
ROBERTA = _roberta("roberta", "RobertaModel", roberta_spec)
XLM_ROBERTA = _roberta("xlm-roberta", "XLMRobertaModel", xlm_roberta_spec)
CAMEMBERT = _roberta("camembert", "CamembertModel", camembert_spec)
DISTILBERT = Family(
    "distilbert",
    "DistilBertModel",
    distilbert_spec,
    _DISTILBERT_NAMES.rows,
    prefix="distilbert.",
    ignored=_LEFT_OUT,
    causal=False,
    heads=_heads(_DISTILBERT_HEAD),
)
