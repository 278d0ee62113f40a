"""The runner's side of graphs, for tests: static buffers, attention that spares padded rows, and the comparison."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from toy_llama import ToyLlama, batch, causal, eager

from compilation.graphs.dispatcher import Route
from compilation.graphs.graph_set import GraphSet


class Step:
    """What a runner is to the graphs: static buffers, and attention that reads the current step's length.

    `device_tokens` is the length as a full graph reads it; `attend` fills the padded rows of its output with NaN.
    """

    def __init__(self, largest: int = 24, device: str = "cpu") -> None:
        self.ids = torch.full((largest,), 63, device=device)
        self.positions = torch.full((largest,), 511, device=device)
        self.device_tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.tokens = 0
        self.layers: list[int] = []
        self.prepared: list[tuple[Route, int]] = []

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        return self.ids, self.positions

    def build(self, tokens: int, size: int) -> None:
        for buffer, real in zip(self.inputs, batch(tokens), strict=True):
            buffer.fill_(63)  # rows beyond `size` are of other steps
            buffer[:size] = 0
            buffer[:tokens] = real
        self.tokens = tokens
        self.device_tokens.fill_(tokens)

    def before_capture(self, route: Route, size: int) -> None:
        self.prepared.append((route, size))
        self.build(0, size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        n = self.tokens
        self.layers.append(layer)
        out.fill_(float("nan"))
        if n:
            causal(q[:n], k[:n], v[:n], out[:n], layer)

    def attend_on_device(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
        """The same without reading the length on the host, as a capture-safe backend has to."""
        index = torch.arange(q.shape[0], device=q.device)
        real = index < self.device_tokens
        groups = q.shape[1] // k.shape[1]
        padding = ~real[:, None, None]
        keys, values = (x.masked_fill(padding, 0.0).repeat_interleave(groups, 1) for x in (k, v))
        mask = (index[:, None] >= index) & real
        scale = (1 + 0.1 * layer) / q.shape[2] ** 0.5
        scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
        result = torch.einsum("hqk,khd->qhd", weights, values)
        out.copy_(result.masked_fill(padding, float("nan")))


def assert_replays_equal_eager(
    graphs: GraphSet, step: Step, model: ToyLlama, route: Route, seed: int = 0, tolerance: float = 1e-5
) -> None:
    """Every number of real tokens at every size that holds it, in random order. `model` is on the CPU."""
    cases = [(tokens, size) for size in graphs.captured(route) for tokens in range(1, size + 1)]
    random.Random(seed).shuffle(cases)
    expected = {tokens: eager(model, tokens) for tokens in {tokens for tokens, _ in cases}}
    for tokens, size in cases:
        step.build(tokens, size)
        output = graphs.replay(route, size)
        assert output.shape[0] == size
        torch.testing.assert_close(output[:tokens].cpu(), expected[tokens], rtol=tolerance, atol=tolerance)
        assert size == tokens or output[tokens:].isnan().any(), "the poison never reached the padded rows"
