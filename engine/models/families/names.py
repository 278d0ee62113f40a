"""Where a checkpoint's tensors go: `Rows` of the decoder's parameters, and the names of a family as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.models.spec import DecoderSpec

Stored = Literal["as it is", "transposed", "less one", "pairs", "heads of qkv"]


class Rows(msgspec.Struct, frozen=True):
    """Where a checkpoint tensor goes: rows `start .. start + count` of a parameter of `Decoder`."""

    parameter: str
    start: int
    count: int
    stored: Stored = "as it is"
    """how the checkpoint holds what the parameter is: [inputs, outputs] (GPT-2); 1 less (Gemma's norms); with rows that
    turn together beside each other in every head (GLM), not half of what turns apart; or as q, k and v of one head
    after the other (GPT-NeoX)"""
    heads: int = 0
    """in those rows, where `stored` speaks of heads"""
    paired: int = 0
    """pairs: rows of a head that turn"""


_BEFORE = (("input_layernorm", "input_norm"), ("post_attention_layernorm", "mlp_norm"))
_AROUND = (
    ("input_layernorm", "input_norm"),
    ("post_attention_layernorm", "attention_out_norm"),
    ("pre_feedforward_layernorm", "mlp_norm"),
    ("post_feedforward_layernorm", "mlp_out_norm"),
)
_INSIDE = (("post_attention_layernorm", "attention_out_norm"), ("post_feedforward_layernorm", "mlp_out_norm"))
_NORMS = {"before": _BEFORE, "after": _BEFORE, "around": _AROUND, "inside": _INSIDE}


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """Llama's, which most families kept, but for what one of them calls otherwise."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """three, or the one that holds them all"""
    o: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """two, or the one that holds both; of a plain MLP its first"""
    down: str = "mlp.down_proj"
    norms: tuple[tuple[str, str], ...] | None = None
    """with the decoder's name of each; None: Llama's, Gemma's or OLMo 2's, by their placement"""
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    qkv_stored: Stored = "as it is"
    norms_stored: Stored = "as it is"

    def rows(self, spec: DecoderSpec) -> dict[str, Rows]:
        """Checkpoint name → place, for every tensor that a checkpoint of this spec must hold."""
        rows = {f"{self.embedding}.weight": Rows("embed_tokens.weight", 0, spec.vocab_size)}
        if spec.final_norm:
            rows |= self._norm(spec, self.final_norm, "norm", spec.hidden_size)
        if not spec.tie_embeddings:
            rows[f"{self.head}.weight"] = Rows("lm_head.weight", 0, spec.vocab_size)
        if spec.head_bias:
            rows[f"{self.head}.bias"] = Rows("lm_head.bias", 0, spec.vocab_size)
        for layer in range(spec.num_layers):
            rows |= self.layer_rows(spec, layer, f"{self.layers}.{layer}", f"layers.{layer}")
        return rows

    def layer_rows(self, spec: DecoderSpec, layer: int, source: str, target: str) -> dict[str, Rows]:
        """Of one layer: names that begin with `source` in the checkpoint, `target` in the module."""
        mixer, mlp, hidden = spec.layers[layer].mixer, spec.layers[layer].mlp, spec.hidden_size
        sizes = [mixer.qkv_size] if len(self.qkv) == 1 else [mixer.q_size, mixer.kv_size, mixer.kv_size]
        parts = [mlp.first_size // len(self.gate_up)] * len(self.gate_up)
        rows = self._qkv(spec, layer, source, f"{target}.qkv_proj", sizes)
        rows |= _linears(source, (self.o,), f"{target}.o_proj", [hidden], mixer.o_bias)
        rows |= _linears(source, self.gate_up, f"{target}.gate_up_proj", parts, mlp.bias)
        rows |= _linears(source, (self.down,), f"{target}.down_proj", [hidden], mlp.bias)
        if mlp.activation == "xielu":
            names = ("alpha_p", "alpha_n")
            rows |= {f"{source}.mlp.act_fn.{name}": Rows(f"{target}.activation.{name}", 0, 1) for name in names}
        if mixer.sinks:
            rows[f"{source}.self_attn.sinks"] = Rows(f"{target}.sinks", 0, mixer.num_heads)
        for name, parameter in self.norms or _NORMS[spec.norm_placement]:
            if parameter != "mlp_norm" or spec.parallel != "one_norm":
                rows |= self._norm(spec, f"{source}.{name}", f"{target}.{parameter}", hidden)
        if mixer.qk_norm is not None:
            is_row = mixer.qk_norm == "row"
            widths = (mixer.q_size, mixer.kv_size) if is_row else (mixer.head_dim, mixer.head_dim)
            for name, parameter, width in zip(self.qk_norms, ("q_norm", "k_norm"), widths, strict=True):
                rows |= self._norm(spec, f"{source}.{name}", f"{target}.{parameter}", width)
        return rows

    def _qkv(self, spec: DecoderSpec, layer: int, source: str, target: str, sizes: list[int]) -> dict[str, Rows]:
        mixer = spec.layers[layer].mixer
        rows = _linears(source, self.qkv, target, sizes, mixer.qkv_bias)
        if self.qkv_stored == "heads of qkv":
            return {name: _stored(row, "heads of qkv", mixer.num_heads) for name, row in rows.items()}
        if self.qkv_stored == "pairs" and spec.ropes:
            paired = spec.ropes[0].rotary_dim  # of layers that turn nothing, too: any order of them gives equal scores
            turned = {0: mixer.num_heads, mixer.q_size: mixer.num_kv_heads}
            return {
                name: _stored(row, "pairs", turned[row.start], paired) if row.start in turned else row
                for name, row in rows.items()
            }
        return rows

    def _norm(self, spec: DecoderSpec, source: str, target: str, width: int) -> dict[str, Rows]:
        rows = {f"{source}.weight": Rows(f"{target}.weight", 0, width, self.norms_stored)}
        if spec.norm == "layer":
            rows[f"{source}.bias"] = Rows(f"{target}.bias", 0, width)
        return rows


LLAMA_NAMES = Names()


def _linears(source: str, names: tuple[str, ...], target: str, sizes: list[int], bias: bool) -> dict[str, Rows]:
    """Matrices, and biases, one below the other in one parameter."""
    rows, start = {}, 0
    for name, count in zip(names, sizes, strict=True):
        for part in ("weight", "bias") if bias else ("weight",):
            rows[f"{source}.{name}.{part}"] = Rows(f"{target}.{part}", start, count)
        start += count
    return rows


def _stored(row: Rows, stored: Stored, heads: int, paired: int = 0) -> Rows:
    return msgspec.structs.replace(row, stored=stored, heads=heads, paired=paired)
