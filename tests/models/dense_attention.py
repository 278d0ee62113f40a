"""Attention over one sequence with dense K and V, for `Decoder.set_attention`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.models.decoder import Decoder
from engine.models.facts import ModelFacts
from engine.models.spec import DecoderSpec
from engine.models.state_layers import Segment, StateStep


class DenseAttention:
    """Appends each call's k, v to what its layer has seen, and attends causally within the layer's window."""

    def __init__(
        self,
        model: DecoderSpec | ModelFacts,
        sinks: Sequence[torch.Tensor] = (),
        latents: Sequence[torch.Tensor] = (),
    ) -> None:
        """`sinks`: of the layers that have them; `latents`: what makes keys and values of them, likewise."""
        self.layers = (model.facts if isinstance(model, DecoderSpec) else model).layers
        self.keys: list[list[torch.Tensor]] = [[] for _ in self.layers]
        self.values: list[list[torch.Tensor]] = [[] for _ in self.layers]
        given = iter(sinks)
        self.sinks = [next(given) if layer.sinks else None for layer in self.layers]
        matrices = iter(latents)
        self.matrices = [None if layer.latent is None else next(matrices) for layer in self.layers]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        heads = self.layers[layer]
        groups = heads.num_heads // heads.num_kv_heads
        if heads.latent is not None:
            latent, turned = k[:, 0].split([heads.latent.kv_lora_rank, heads.latent.qk_rope_head_dim], dim=-1)
            made = (latent @ self.matrices[layer].T).view(len(k), heads.num_heads, -1)
            k, v = made.split([heads.latent.qk_nope_head_dim, heads.latent.v_head_dim], dim=-1)
            k, groups = torch.cat((k, turned[:, None].expand(-1, heads.num_heads, -1)), dim=-1), 1
        if heads.shares is None:
            self.keys[layer].append(k.clone())
            self.values[layer].append(v.clone())
        else:
            self.keys[layer], self.values[layer] = self.keys[heads.shares], self.values[heads.shares]
        keys = torch.cat(self.keys[layer]).repeat_interleave(groups, dim=1)
        values = torch.cat(self.values[layer]).repeat_interleave(groups, dim=1)
        key_at = torch.arange(keys.shape[0])[None]
        query_at = torch.arange(keys.shape[0] - q.shape[0], keys.shape[0])[:, None]
        visible = key_at <= query_at
        if heads.window is not None:
            visible &= key_at > query_at - heads.window
        if heads.chunk is not None:
            visible &= key_at >= query_at // heads.chunk * heads.chunk
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * heads.scale
        if heads.soft_cap is not None:
            scores = heads.soft_cap * torch.tanh(scores / heads.soft_cap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if (sinks := self.sinks[layer]) is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[0]]
        out.copy_(torch.einsum("hqk,khd->qhd", weights, values.float()))


class DenseStates:
    """Keeps the state of each layer of one sequence, for `Decoder.set_mixing`."""

    def __init__(self, model: Decoder) -> None:
        self.layers = model.mixing
        sizes = [layer.facts.state_bytes(model.dtype.itemsize) for layer in self.layers]
        self.states = [torch.zeros(1, size, dtype=torch.uint8) for size in sizes]

    def __call__(self, x: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        self.layers[layer](x, out, _OneState(self, layer, len(x), self.layers[layer].facts.taps - 1))


class _OneState:
    place = None

    def __init__(self, states: DenseStates, layer: int, tokens: int, before: int) -> None:
        self._states, self._layer = states, layer
        one, whole = torch.zeros(1, dtype=torch.int64), [Segment(0, 0, tokens, 0)]
        own = torch.arange(before, before + tokens)
        last = torch.arange(tokens, tokens + before)[None]
        single = torch.zeros(3, int(tokens == 1), dtype=torch.int64)
        past = torch.arange(before)[None]
        self.step = StateStep(
            one[:, None] > 0, one, past, own, one, last, single, whole if tokens > 1 else [], one, one, None
        )

    def read(self) -> torch.Tensor:
        return self._states.states[self._layer].clone()

    def write(self, states: torch.Tensor) -> None:
        self._states.states[self._layer] = states


def bind(model: Decoder) -> None:
    """To a sequence that begins."""
    model.set_attention(DenseAttention(model.spec, model.sinks, model.latents))
    model.set_mixing(DenseStates(model))


def logits_of(model: Decoder, token_ids: list[int], chunks: tuple[int, ...] = ()) -> torch.Tensor:
    """float32 [len(token_ids), vocab_size]; the prompt is fed in pieces of the given sizes, then the rest at once."""
    bind(model)
    ids, at, parts = torch.tensor(token_ids), 0, []
    for size in (*chunks, len(token_ids) - sum(chunks)):
        parts.append(model.compute_logits(model(ids[at : at + size], torch.arange(at, at + size))))
        at += size
    return torch.cat(parts)


def greedy(model: Decoder, prompt: list[int], num_tokens: int) -> list[int]:
    bind(model)
    ids, at, tokens = prompt, 0, []
    for _ in range(num_tokens):
        hidden = model(torch.tensor(ids), torch.arange(at, at + len(ids)))
        at += len(ids)
        ids = [int(model.compute_logits(hidden[-1:]).argmax())]
        tokens += ids
    return tokens
