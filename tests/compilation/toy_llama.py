"""A tiny Llama like the engine's decoder: merged QKV and gate/up, rope by index, one marker op for attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compilation.interface import CompiledModel, CompileReport, CompileSettings
from compilation.model import compile_model
from compilation.split import Piece, split
from compilation.stitch import stitch
from compilation.trace import trace

OP = "toy::attention"


@torch.library.custom_op(OP, mutates_args=("out",))
def attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
    raise RuntimeError("a marker never runs")


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
    return None


def causal(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int) -> None:
    """What tests bind: dense causal attention over the step's own tokens, a little different in every layer."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
    scale = (1 + 0.1 * layer) / q.shape[2] ** 0.5
    result = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, is_causal=True, scale=scale)
    out.copy_(result.transpose(0, 1))


class Norm(nn.Module):
    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, index: int, hidden: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.index, self.heads, self.kv_heads, self.head_dim = index, heads, kv_heads, head_dim
        self.norm_in, self.norm_mid = Norm(hidden, eps), Norm(hidden, eps)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Callable[..., None]) -> Tensor:
        tokens = x.shape[0]
        widths = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        q, k, v = self.qkv(self.norm_in(x)).split(widths, -1)
        q = rotate(q.view(tokens, self.heads, self.head_dim), cos, sin)
        k = rotate(k.view(tokens, self.kv_heads, self.head_dim), cos, sin)
        out = torch.empty_like(q)
        attend(q, k, v.view(tokens, self.kv_heads, self.head_dim), out, self.index)
        x = x + self.o(out.view(tokens, self.heads * self.head_dim))
        gate, up = self.gate_up(self.norm_mid(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class ToyLlama(nn.Module):
    def __init__(self, layers: int = 3, seed: int = 0, eps: float = 1e-5, hidden: int = 32, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        head_dim = 8
        self.embed = nn.Embedding(64, hidden)
        self.layers = nn.ModuleList(Layer(i, hidden, heads, heads // 2, head_dim, eps) for i in range(layers))
        self.norm = Norm(hidden, eps)
        angles = torch.outer(torch.arange(512.0), 100 ** (-torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.attend: Callable[..., None] = torch.ops.toy.attention

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(input_ids)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        for layer in self.layers:
            x = layer(x, cos, sin, self.attend)
        return self.norm(x)


def batch(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + tokens)
    return torch.randint(0, 64, (tokens,), generator=generator), torch.randperm(512, generator=generator)[:tokens]


def eager(model: ToyLlama, tokens: int, attend: Callable[..., None] = causal) -> Tensor:
    """The oracle: the module itself, with the bound function in the place of the marker."""
    marker, model.attend = model.attend, attend
    try:
        with torch.no_grad():
            return model(*batch(tokens))
    finally:
        model.attend = marker


def compiled(
    model: nn.Module,
    cache_dir: Path,
    attend: Callable[..., None] = causal,
    tokens: int = 8,
    debug_asserts: bool = False,
    largest_size: int | None = None,
) -> CompiledModel:
    settings = CompileSettings("pieces", cache_dir, debug_asserts, largest_size)
    return compile_model(model, batch(tokens), frozenset({OP}), {OP: attend}, settings)


class Interpreted:
    """A piece run node by node; like a compiled one, it empties its list and drops each value at its last use."""

    def __init__(self, piece: Piece) -> None:
        self.module = piece.module

    def __call__(self, arguments: list[Any]) -> Sequence[Any]:
        outputs: Sequence[Any] = fx.Interpreter(self.module).boxed_run(arguments)
        return outputs


def interpreted(model: nn.Module, attend: Callable[..., Any], *inputs: Tensor) -> CompiledModel:
    """The flat program without Inductor: each operation of a piece is visible from Python."""
    traced = trace(model, inputs)
    steps = split(traced, frozenset({OP}))
    functions = {step: Interpreted(step) for step in steps if isinstance(step, Piece)}
    program = stitch(traced, steps, functions, {OP: attend})
    report = CompileReport(len(functions), len(functions), 0, 0, 0.0)
    return CompiledModel(program.run(), report, program.rewire)
