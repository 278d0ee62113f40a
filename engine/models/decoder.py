"""The one decoder: a transformer over a flat batch of tokens, built from a `DecoderSpec`.

It knows nothing of sequences, pages or caches: tokens of all sequences lie side by side in one dimension, and whoever
runs it supplies attention. Rounding points follow transformers, so that float32 picks the same tokens.

Traced once with the token dimension unbacked, so: no data-dependent control flow, and nothing about a layer but its
index (given to attention alone), its weights and the rows of its rope table may differ from the next, or layers would
not share compiled pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from engine.models.decoder_layer import Acts, AnyLinear, Attend, DecoderLayer, Mix, Mixing
from engine.models.device_packed import StoredEmbedding, StoredLinear
from engine.models.head import Head
from engine.models.layer_inputs import LayerInputs
from engine.models.layers import NORMS, Embedding, Linear
from engine.models.mixers import StateSpec
from engine.models.packed import PackedEmbedding, PackedLinear
from engine.models.rope import RopeTable
from engine.models.spec import DecoderSpec


def _not_set(*_: object) -> None:
    raise RuntimeError("Decoder.set_attention, or set_mixing, must be called before the first forward")


class Decoder(nn.Module):
    """Weights are uninitialised until `engine.weights.loader.load_weights` fills them; nothing requires gradients. A
    stage has an embedding only where its spec `begins`, an unembedding only where it `ends`."""

    attend: Attend
    mix: Mix
    embed_tokens: Embedding | PackedEmbedding | StoredEmbedding
    project_in: AnyLinear | None
    project_out: AnyLinear | None
    lm_head: Linear | PackedLinear | StoredLinear

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_position: int | None = None,
        shown_layers: Sequence[int] = (),
    ) -> None:
        """`max_position`: positions that the rope tables cover (the engine's max_model_len); None: the spec's.
        `shown_layers`: whose inputs `forward` returns, too."""
        super().__init__()
        device = torch.device(device)
        self.spec = spec
        self.dtype = dtype
        self.shown_layers = tuple(shown_layers)
        hidden, width = spec.hidden_size, spec.embedding_size or spec.hidden_size
        table_rows = spec.table_rows or spec.vocab_size
        if spec.begins:
            self.embed_tokens = Embedding(table_rows, width, dtype, device)
        self.embedding_scale = None
        if spec.embedding_scale is not None:
            self.embedding_scale = spec.embedding_scale
            if spec.round_embedding_scale:
                self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()
        narrow = width != hidden
        self.project_in = Linear(width, hidden, False, dtype, device) if narrow and spec.begins else None
        self.embed_positions = None
        self._first_position = spec.position_offset or 0
        if spec.position_offset is not None:
            self.embed_positions = Embedding(spec.max_position + spec.position_offset, hidden, dtype, device)
        self.embed_types = Embedding(spec.token_types, hidden, dtype, device) if spec.token_types else None
        self.embedding_norm = NORMS[spec.norm](hidden, spec.norm_eps, dtype, device) if spec.embedding_norm else None
        self.layer_inputs = None
        if spec.layer_inputs is not None:
            self.layer_inputs = LayerInputs(spec, spec.layer_inputs, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(spec, layer, dtype, device) for layer in spec.layers)
        self.norm = NORMS[spec.norm](hidden, spec.norm_eps, dtype, device) if spec.final_norm else None
        self.project_out = Linear(hidden, width, False, dtype, device) if narrow and spec.ends else None
        if spec.ends:
            place = torch.device("meta") if spec.tie_embeddings else device
            self.lm_head = Linear(width, table_rows, spec.head_bias, dtype, place)
        if spec.ends and spec.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.head = None if spec.head is None else Head(spec.head, width, spec.norm_eps, device)
        self.ropes = nn.ModuleList(RopeTable(rope, max_position or spec.max_position, device) for rope in spec.ropes)
        attends = [not isinstance(layer.mixer, StateSpec) for layer in spec.layers]
        keeps = [layer.state is not None for layer in spec.layers]
        self._rope_of = [None if isinstance(layer.mixer, StateSpec) else layer.mixer.rope for layer in spec.layers]
        self._places = [(sum(attends[:index]), sum(keeps[:index])) for index in range(spec.num_layers)]
        """among the layers that attend, and among those that keep states"""
        self.set_attention(_not_set)
        self.set_mixing(_not_set)

    @property
    def sinks(self) -> tuple[torch.Tensor, ...]:
        """float32 [num_heads] each, of the layers whose attention has them, for whoever supplies it."""
        layers = (layer for layer in self.layers if isinstance(layer, DecoderLayer))
        return tuple(layer.sinks for layer in layers if layer.sinks is not None)

    @property
    def mixing(self) -> tuple[Mixing, ...]:
        """What layers that keep states make of them, for whoever keeps these."""
        layers = (layer.mixing for layer in self.layers if isinstance(layer, DecoderLayer))
        return tuple(each for each in layers if each is not None)

    @property
    def latents(self) -> tuple[torch.Tensor, ...]:
        """`LatentHeads.kv_b`, of the layers that keep latents, for whoever supplies attention."""
        layers = (layer.latent for layer in self.layers if isinstance(layer, DecoderLayer))
        return tuple(latent.kv_b for latent in layers if latent is not None)

    def set_attention(self, attend: Attend) -> None:
        """Bind what computes attention: an operator while tracing, a function of the runner when eager."""
        # Past nn.Module's own __setattr__, which would make a module given here a part of this one.
        object.__setattr__(self, "attend", attend)

    def set_mixing(self, mix: Mix) -> None:
        """As `set_attention`, for layers that keep states."""
        object.__setattr__(self, "mix", mix)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [tokens], int64 [tokens] → [tokens, hidden_size] in the model's dtype, after the final norm. A later
        stage is given what the one before it returned, in the place of tokens.

        With `shown_layers` [tokens, (1 + shown) * hidden_size]: behind that, what each of these layers was given, in
        their order. One tensor, because that is what a compiled program returns and a graph keeps.
        """
        hidden = self._embedded(input_ids, positions) if self.spec.begins else input_ids
        ropes = [rope(positions, self.dtype) for rope in self.ropes]
        own: Sequence[torch.Tensor | None] = [None] * len(self.layers)
        if self.layer_inputs is not None:
            own = self.layer_inputs(input_ids, hidden)
        shown = []
        for index, layer in enumerate(self.layers):
            if index in self.shown_layers:
                shown.append(hidden if self.spec.state_unit == 1.0 else hidden * self.spec.state_unit)
            rope = self._rope_of[index]
            attention, state = self._places[index]
            acts = Acts(self.attend, attention, self.mix, state)
            hidden = layer(hidden, None if rope is None else ropes[rope], acts, own[index])
        last = hidden if self.norm is None else self.norm(hidden)
        return torch.cat((last, *shown), dim=-1) if shown else last

    def _embedded(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        kinds = None
        if self.embed_types is not None:
            kinds = input_ids // self.spec.vocab_size
            input_ids = input_ids - kinds * self.spec.vocab_size
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        if self.embedding_scale is not None:
            hidden = hidden * self.embedding_scale
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions + self._first_position)
        if self.embed_types is not None and kinds is not None:
            hidden = hidden + self.embed_types(kinds)
        return hidden if self.embedding_norm is None else self.embedding_norm(hidden)

    def final_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of what `forward` returns → what the head is given: [rows, embedding_size], transformers'
        last_hidden_state."""
        if self.shown_layers:
            hidden = hidden.narrow(1, 0, self.spec.hidden_size).contiguous()
        return hidden if self.project_out is None else self.project_out(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of what `forward` returns → float32 [rows, vocab_size], rounded to the model's dtype first (as
        transformers); a scale and a cap are applied to float32."""
        logits = self.lm_head(self.final_states(hidden)).float()
        scale, cap = self.spec.logit_scale, self.spec.logit_cap
        if scale is not None:
            logits = logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap
