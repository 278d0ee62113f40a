"""The names that a family's checkpoints give to the decoder's parameters, as data."""

from __future__ import annotations

import msgspec

from engine.models.families.rows import ExpertNames, Rows, Stored, linears
from engine.models.mixers import ConvSpec, DeltaSpec, LatentSpec, MambaSpec, MixerSpec, StateSpec
from engine.models.spec import DecoderSpec, ExpertsSpec, MlpSpec

_BEFORE = (("input_layernorm", "input_norm"), ("post_attention_layernorm", "mlp_norm"))
_AROUND = (
    ("input_layernorm", "input_norm"),
    ("post_attention_layernorm", "attention_out_norm"),
    ("pre_feedforward_layernorm", "mlp_norm"),
    ("post_feedforward_layernorm", "mlp_out_norm"),
)
_INSIDE = (("post_attention_layernorm", "attention_out_norm"), ("post_feedforward_layernorm", "mlp_out_norm"))
_APART = (
    ("post_feedforward_layernorm_1", "behind_dense"),
    ("pre_feedforward_layernorm_2", "of_experts"),
    ("post_feedforward_layernorm_2", "behind_experts"),
)
_NORMS = {"before": _BEFORE, "after": _BEFORE, "around": _AROUND, "inside": _INSIDE}


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """Llama's, which most families kept, but for what one of them calls otherwise."""

    embedding: str = "model.embed_tokens"
    embedding_norm: str = ""
    """of models that have one"""
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
    conv: tuple[str, str, str] = ("conv.in_proj", "conv.conv", "conv.out_proj")
    """of layers that keep a convolution's inputs"""
    delta: str = "linear_attn"
    """of gated delta nets"""
    delta_in: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    mamba: str = "mamba"
    qkv_stored: Stored = "as it is"
    norms_stored: Stored = "as it is"
    experts: ExpertNames = ExpertNames()

    def rows(self, spec: DecoderSpec) -> dict[str, Rows]:
        """Checkpoint name → place, for every tensor that a checkpoint of this spec must hold."""
        rows = {f"{self.embedding}.weight": Rows("embed_tokens.weight", 0, spec.vocab_size)}
        if spec.embedding_norm:
            rows |= self._norm(spec, self.embedding_norm, "embedding_norm", spec.hidden_size)
        if spec.final_norm:
            rows |= self._norm(spec, self.final_norm, "norm", spec.hidden_size)
        if not spec.tie_embeddings:
            rows[f"{self.head}.weight"] = Rows("lm_head.weight", 0, spec.vocab_size)
        if spec.head_bias:
            rows[f"{self.head}.bias"] = Rows("lm_head.bias", 0, spec.vocab_size)
        if spec.layer_inputs is not None:
            size = spec.layer_inputs.size
            for name, parameter, count in (
                ("embed_tokens_per_layer", "embed", spec.layer_inputs.vocab_size),
                ("per_layer_model_projection", "project", spec.num_layers * size),
                ("per_layer_projection_norm", "norm", size),
            ):
                rows[f"model.{name}.weight"] = Rows(f"layer_inputs.{parameter}.weight", 0, count)
        for layer in range(spec.num_layers):
            rows |= self.layer_rows(spec, layer, f"{self.layers}.{layer}", f"layers.{layer}")
        return rows

    def layer_rows(self, spec: DecoderSpec, layer: int, source: str, target: str) -> dict[str, Rows]:
        """Of one layer: names that begin with `source` in the checkpoint, `target` in the module."""
        layer_spec, hidden = spec.layers[layer], spec.hidden_size
        mixer = layer_spec.mixer
        rows = self._mixer(spec, mixer, source, target)
        if layer_spec.side is not None:
            rows |= self._mamba(
                spec, layer_spec.side, f"{source}.{self.mamba}", target, mixer.first_size, "side_o_proj"
            )
        if layer_spec.mlp is not None:
            shared = layer_spec.experts is not None
            *first, down = self.experts.shared if shared else (*self.gate_up, self.down)
            rows |= _mlp(layer_spec.mlp, hidden, source, target, first, down)
        if layer_spec.experts is not None:
            rows |= _router(layer_spec.experts, self.experts, source, target)
            rows |= _experts(layer_spec.experts, hidden, self.experts, source, target)
            if layer_spec.experts.apart:
                rows[f"{source}.router.scale"] = Rows(f"{target}.apart.of_router.weight", 0, hidden, "times root")
                for name, parameter in _APART:
                    rows |= self._norm(spec, f"{source}.{name}", f"{target}.apart.{parameter}", hidden)
        if spec.layer_scales:
            rows[f"{source}.layer_scalar"] = Rows(f"{target}.scale", 0, 1)
        if spec.layer_inputs is not None:
            for name, parameter, width in (
                ("per_layer_input_gate", "gate", spec.layer_inputs.size),
                ("per_layer_projection", "out", hidden),
                ("post_per_layer_input_norm", "norm", hidden),
            ):
                rows[f"{source}.{name}.weight"] = Rows(f"{target}.own_input.{parameter}.weight", 0, width)
        for name, parameter in self.norms or _NORMS[spec.norm_placement]:
            absent = (parameter == "input_norm" and not layer_spec.input_norm) or (
                parameter == "mlp_norm" and (spec.parallel == "one_norm" or layer_spec.ends_with_mixer)
            )
            if not absent:
                rows |= self._norm(spec, f"{source}.{name}", f"{target}.{parameter}", hidden)
        if isinstance(mixer, MixerSpec) and mixer.qk_norm is not None and mixer.qk_weights:
            is_row = mixer.qk_norm == "row"
            widths = (mixer.q_size, mixer.kv_size) if is_row else (mixer.head_dim, mixer.head_dim)
            for name, parameter, width in zip(self.qk_norms, ("q_norm", "k_norm"), widths, strict=True):
                if parameter == "k_norm" and mixer.shares is not None:
                    continue
                rows |= self._norm(spec, f"{source}.{name}", f"{target}.{parameter}", width)
        return rows

    def _mixer(
        self, spec: DecoderSpec, mixer: MixerSpec | LatentSpec | StateSpec, source: str, target: str
    ) -> dict[str, Rows]:
        if isinstance(mixer, LatentSpec):
            rows = _latent(mixer, f"{source}.self_attn", target)
            return rows | linears(source, (self.o,), f"{target}.o_proj", [spec.hidden_size], False)
        if isinstance(mixer, ConvSpec):
            first, conv, last = self.conv
            rows = linears(source, (first,), f"{target}.qkv_proj", [mixer.first_size], mixer.bias)
            rows |= linears(source, (conv,), f"{target}.mixing", [mixer.channels], mixer.bias)
            return rows | linears(source, (last,), f"{target}.o_proj", [spec.hidden_size], mixer.bias)
        if isinstance(mixer, DeltaSpec):
            return self.delta_rows(spec, mixer, f"{source}.{self.delta}", target)
        if isinstance(mixer, MambaSpec):
            return self._mamba(spec, mixer, f"{source}.{self.mamba}", target)
        sizes = [mixer.qkv_size] if len(self.qkv) == 1 else [mixer.q_size, mixer.kv_size, mixer.kv_size]
        rows = self._qkv(spec, mixer, source, f"{target}.qkv_proj", sizes)
        rows |= linears(source, (self.o,), f"{target}.o_proj", [spec.hidden_size], mixer.o_bias)
        if mixer.sinks:
            rows[f"{source}.self_attn.sinks"] = Rows(f"{target}.sinks", 0, mixer.num_heads)
        return rows

    def delta_rows(self, spec: DecoderSpec, mixer: DeltaSpec, source: str, target: str) -> dict[str, Rows]:
        heads, place = mixer.value_heads, f"{target}.mixing"
        if len(self.delta_in) == 2:
            first = linears(
                source, self.delta_in, f"{target}.qkv_proj", [mixer.channels + mixer.value_size, 2 * heads], False
            )
            rows = {
                name: _stored(row, "delta in heads", mixer.key_heads, 0 if row.start else mixer.key_dim)
                for name, row in first.items()
            }
        else:
            sizes = [mixer.channels, mixer.value_size, heads, heads]
            rows = linears(source, self.delta_in, f"{target}.qkv_proj", sizes, False)
        rows |= linears(source, ("out_proj",), f"{target}.o_proj", [spec.hidden_size], False)
        rows[f"{source}.conv1d.weight"] = Rows(f"{place}.weight", 0, mixer.channels)
        rows[f"{source}.A_log"] = Rows(f"{place}.log_decay", 0, heads)
        rows[f"{source}.dt_bias"] = Rows(f"{place}.decay_bias", 0, heads)
        rows[f"{source}.norm.weight"] = Rows(f"{place}.norm", 0, mixer.value_dim)
        return rows

    def _mamba(
        self, spec: DecoderSpec, mixer: MambaSpec, source: str, target: str, start: int = 0, last: str = "o_proj"
    ) -> dict[str, Rows]:
        """`start`: of its rows in the layer's first matrix; `last`: its last one."""
        place = f"{target}.mixing"
        rows = linears(source, ("in_proj",), f"{target}.qkv_proj", [mixer.first_size], mixer.bias, start)
        rows |= linears(source, ("out_proj",), f"{target}.{last}", [spec.hidden_size], mixer.bias)
        rows |= linears(source, ("conv1d",), place, [mixer.channels], mixer.conv_bias)
        for name, parameter in (("A_log", "log_decay"), ("dt_bias", "decay_bias"), ("D", "passed_on")):
            rows[f"{source}.{name}"] = Rows(f"{place}.{parameter}", 0, mixer.heads)
        if mixer.normed:
            rows[f"{source}.norm.weight"] = Rows(f"{place}.norm", 0, mixer.inner_size)
        return rows

    def _qkv(self, spec: DecoderSpec, mixer: MixerSpec, source: str, target: str, sizes: list[int]) -> dict[str, Rows]:
        made = 1 if mixer.shares is not None else 2 if mixer.values == "normed_keys" else 3
        if mixer.gated:
            sizes = [2 * mixer.q_size, *sizes[1:]]
        rows = linears(source, self.qkv[:made], target, sizes[:made], mixer.qkv_bias)
        if mixer.gated:
            rows |= {
                name: _stored(row, "gates in heads", mixer.num_heads) for name, row in rows.items() if not row.start
            }
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


def _mlp(mlp: MlpSpec, hidden: int, source: str, target: str, first: list[str], down: str) -> dict[str, Rows]:
    parts = [mlp.first_size // len(first)] * len(first)
    rows = linears(source, first, f"{target}.gate_up_proj", parts, mlp.bias)
    rows |= linears(source, (down,), f"{target}.down_proj", [hidden], mlp.bias)
    if mlp.activation == "xielu":
        names = ("alpha_p", "alpha_n")
        rows |= {f"{source}.mlp.act_fn.{name}": Rows(f"{target}.activation.{name}", 0, 1) for name in names}
    return rows


def _router(experts: ExpertsSpec, names: ExpertNames, source: str, target: str) -> dict[str, Rows]:
    rows = linears(source, (names.router,), f"{target}.router.logits", [experts.count], experts.router.bias)
    if experts.router.correction:
        rows[f"{source}.{names.correction}"] = Rows(
            f"{target}.router.correction", 0, experts.count, names.correction_stored
        )
    if experts.router.expert_scales:
        rows[f"{source}.{names.scales}"] = Rows(f"{target}.router.scales", 0, experts.count)
    if experts.gated_beside:
        rows |= linears(source, (names.shared_gate,), f"{target}.beside_gate", [1], False)
    return rows


def _experts(experts: ExpertsSpec, hidden: int, names: ExpertNames, source: str, target: str) -> dict[str, Rows]:
    rows, first = {}, experts.first_size
    *gates, down = names.parts
    sizes = [first // len(gates)] * len(gates)
    places = [*zip(gates, ["gate_up"] * len(gates), range(0, first, sizes[0]), sizes, strict=True)]
    for name, parameter, start, count in [*places, (down, "down", 0, hidden)]:
        stored = names.turns if parameter == "gate_up" else "as it is"
        kinds = {"": names.transposed, "_bias": False} if experts.bias else {"": names.transposed}
        for kind, transposed in kinds.items():
            place = Rows(f"{target}.experts.{parameter}{kind}", start, count, stored, transposed=transposed)
            if names.stacked:
                rows[f"{source}.{names.experts}.{name}{kind}"] = msgspec.structs.replace(place, expert="all")
                continue
            ending = ".bias" if kind else ".weight"
            for expert in range(experts.count):
                of_one = msgspec.structs.replace(place, expert=expert)
                rows[f"{source}.{names.experts}.{expert}.{name}{ending}"] = of_one
    return rows


def _latent(mixer: LatentSpec, source: str, target: str) -> dict[str, Rows]:
    facts, first = mixer.latent, mixer.q_lora_rank or mixer.q_size
    q_name = "q_proj" if mixer.q_lora_rank is None else "q_a_proj"
    q = f"{source}.q_proj.weight" if mixer.q_lora_rank is None else f"{source}.q_b_proj.weight"
    kv, sizes = f"{source}.kv_a_proj_with_mqa.weight", [first, facts.row_size]
    rows = linears(source, (q_name, "kv_a_proj_with_mqa"), f"{target}.qkv_proj", sizes, False)
    if mixer.q_lora_rank is not None:
        rows[q] = Rows(f"{target}.latent.q_b_proj.weight", 0, mixer.q_size)
        rows[f"{source}.q_a_layernorm.weight"] = Rows(f"{target}.latent.q_a_norm.weight", 0, first)
    rows[f"{source}.kv_a_layernorm.weight"] = Rows(f"{target}.latent.kv_a_norm.weight", 0, facts.kv_lora_rank)
    rows[f"{source}.kv_b_proj.weight"] = Rows(f"{target}.latent.kv_b", 0, mixer.num_heads * facts.made_size)
    for name, heads, passing in ((q, mixer.num_heads, facts.qk_nope_head_dim), (kv, 1, facts.kv_lora_rank)):
        paired = _stored(rows[name], "pairs", heads, facts.qk_rope_head_dim)
        rows[name] = msgspec.structs.replace(paired, passing=passing)
    return rows


def _stored(row: Rows, stored: Stored, heads: int, paired: int = 0) -> Rows:
    return msgspec.structs.replace(row, stored=stored, heads=heads, paired=paired)
