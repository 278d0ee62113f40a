"""Attention over one sequence with dense K and V, for `Decoder.set_attention`."""

from __future__ import annotations

import torch

from engine.models.decoder import Decoder
from engine.models.spec import DecoderSpec


class DenseAttention:
    """Appends each call's k, v to what its layer has seen, and attends causally within the layer's window."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.spec = spec
        self.keys: list[list[torch.Tensor]] = [[] for _ in spec.layers]
        self.values: list[list[torch.Tensor]] = [[] for _ in spec.layers]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int) -> None:
        self.keys[layer].append(k.clone())
        self.values[layer].append(v.clone())
        groups = self.spec.num_heads // self.spec.num_kv_heads
        keys = torch.cat(self.keys[layer]).repeat_interleave(groups, dim=1)
        values = torch.cat(self.values[layer]).repeat_interleave(groups, dim=1)
        key_at = torch.arange(keys.shape[0])[None]
        query_at = torch.arange(keys.shape[0] - q.shape[0], keys.shape[0])[:, None]
        visible = key_at <= query_at
        window = self.spec.layers[layer].window
        if window is not None:
            visible &= key_at > query_at - window
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * self.spec.scale
        if self.spec.soft_cap is not None:
            scores = self.spec.soft_cap * torch.tanh(scores / self.spec.soft_cap)
        weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, values.float()))


def logits_of(model: Decoder, token_ids: list[int], chunks: tuple[int, ...] = ()) -> torch.Tensor:
    """float32 [len(token_ids), vocab_size]; the prompt is fed in pieces of the given sizes, then the rest at once."""
    model.set_attention(DenseAttention(model.spec))
    ids, at, parts = torch.tensor(token_ids), 0, []
    for size in (*chunks, len(token_ids) - sum(chunks)):
        parts.append(model.compute_logits(model(ids[at : at + size], torch.arange(at, at + size))))
        at += size
    return torch.cat(parts)


def greedy(model: Decoder, prompt: list[int], num_tokens: int) -> list[int]:
    model.set_attention(DenseAttention(model.spec))
    ids, at, tokens = prompt, 0, []
    for _ in range(num_tokens):
        hidden = model(torch.tensor(ids), torch.arange(at, at + len(ids)))
        at += len(ids)
        ids = [int(model.compute_logits(hidden[-1:]).argmax())]
        tokens += ids
    return tokens
