"""Gated delta nets (Yang et al., *Gated Delta Networks*, 2024), as Qwen3-Next and Qwen3.5 have them.

The state S [keys, values] of a head forgets, and takes over what a key's value differs from what it holds for it:
S = a S + b k (v - a S'k)', and a query reads S'q. Tokens of a chunk are solved for at once (§3.3 of the paper, and Yang
et al., *Parallelizing Linear Transformers with the Delta Rule*, 2024): what each adds depends on the ones before by a
triangular matrix.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from engine.models.facts import DeltaFacts
from engine.models.layers import parameter
from engine.models.state_layers import LayerStates, convolved

_CHUNK = 64
_LENGTH_EPS = 1e-6


class DeltaNet(nn.Module):
    def __init__(self, spec: DeltaFacts, norm_eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.facts, self.outputs, self._norm_eps = spec, spec.value_size, norm_eps
        self.weight = parameter((spec.channels, 1, spec.taps), dtype, device)
        """of the convolution of keys, queries and values; the newest input's comes last"""
        self.log_decay = parameter((spec.value_heads,), torch.float32, device)
        self.decay_bias = parameter((spec.value_heads,), torch.float32, device)
        self.norm = parameter((spec.value_dim,), dtype, device)

    def forward(self, x: torch.Tensor, out: torch.Tensor, states: LayerStates) -> None:
        """x [tokens, queries, keys and values | gates of the output | of values | of decays]; out [tokens, value_heads
        * value_dim]."""
        spec, step = self.facts, states.step
        mixed, gate, amount, decay = torch.split(
            x, [spec.channels, spec.value_size, spec.value_heads, spec.value_heads], dim=1
        )
        past, state = self._read(states, x.dtype)
        sums, kept = convolved(mixed, past, step, self.weight, None)
        q, k, v = self._heads(functional.silu(sums.to(x.dtype)).float())
        beta = amount.float().sigmoid()
        log_decay = -self.log_decay.exp() * functional.softplus(decay.float() + self.decay_bias)
        made, written = torch.zeros_like(v), state.new_empty(len(step.written), *state.shape[1:])
        sequence, token, write = step.single
        made[token], written[write] = one_token(
            q[token], k[token], v[token], log_decay[token], beta[token], state[sequence]
        )
        for each in step.segments:
            some = slice(each.begin, each.end)
            made[some], state[each.sequence] = many_tokens(
                q[some], k[some], v[some], log_decay[some], beta[some], state[each.sequence]
            )
            if each.write >= 0:
                written[each.write] = state[each.sequence]
        out.copy_(self._gated(made.to(x.dtype), gate.unflatten(1, (spec.value_heads, -1))).flatten(1))  # type: ignore[no-untyped-call]
        states.write(self._as_bytes(kept, written))

    def _read(self, states: LayerStates, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolution's inputs, and float32 [sequences, value_heads, key_dim, value_dim]."""
        spec, data = self.facts, states.read()
        inputs = data[:, : (spec.taps - 1) * spec.channels * dtype.itemsize].contiguous().view(dtype)
        matrices = data[:, spec.inputs_bytes(dtype.itemsize) :].contiguous().view(torch.float32)
        shape = (spec.value_heads, spec.key_dim, spec.value_dim)
        return inputs.view(len(data), spec.taps - 1, spec.channels), matrices.view(len(data), *shape)

    def _as_bytes(self, inputs: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        first = inputs.flatten(1).view(torch.uint8)
        padding = self.facts.inputs_bytes(inputs.itemsize) - first.size(1)
        return torch.cat((functional.pad(first, (0, padding)), matrices.flatten(1).view(torch.uint8)), dim=1)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """float32 [tokens, value_heads, dimensions] each: queries and keys of length one, queries scaled."""
        spec = self.facts
        q, k, v = torch.split(qkv, [spec.key_size, spec.key_size, spec.value_size], dim=1)
        q, k = (each.unflatten(1, (spec.key_heads, -1)) for each in (q, k))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        q, k = (each * (each.square().sum(-1, keepdim=True) + _LENGTH_EPS).rsqrt() for each in (q, k))
        q, k = (each.repeat_interleave(spec.value_heads // spec.key_heads, dim=1) for each in (q, k))
        return q * spec.key_dim**-0.5, k, v.unflatten(1, (spec.value_heads, -1))  # type: ignore[no-untyped-call]

    def _gated(self, made: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide = made.float()
        normed = (wide * (wide.square().mean(-1, keepdim=True) + self._norm_eps).rsqrt()).to(made.dtype)
        return ((self.norm * normed).float() * functional.silu(gate.float())).to(made.dtype)


def one_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each of several sequences: what its query reads, and its state.

    All float32: q, k [sequences, heads, keys]; v [sequences, heads, values]; log_decay, beta [sequences, heads]; state
    [sequences, heads, keys, values].
    """
    state = state * log_decay.exp()[..., None, None]
    held = torch.einsum("shkv,shk->shv", state, k)
    state = state + k[..., None] * ((v - held) * beta[..., None])[..., None, :]
    return torch.einsum("shkv,shk->shv", state, q), state


def many_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one sequence's consecutive tokens, as `one_token` with tokens in the place of sequences; state [heads, keys,
    values]."""
    parts = []
    for at in range(0, len(q), _CHUNK):
        heads_first = (each[at : at + _CHUNK].transpose(0, 1) for each in (q, k, v, log_decay, beta))
        part, state = _chunk(*heads_first, state)
        parts.append(part.transpose(0, 1))
    return torch.cat(parts), state


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[heads, tokens, ...]"""
    since = log_decay.cumsum(1)  # the chunk's beginning
    tokens = range(q.size(1))
    later = torch.ones(len(tokens), len(tokens), dtype=torch.bool, device=q.device).triu(1)
    between = (since[:, :, None] - since[:, None]).masked_fill(later, float("-inf")).exp()
    taken = k * beta[..., None]
    depends = (taken @ k.transpose(1, 2)) * between  # its diagonal is not looked at
    known = torch.cat((v * beta[..., None], taken * since.exp()[..., None]), dim=2)
    solved = torch.linalg.solve_triangular(depends, known, upper=False, unitriangular=True)
    values, keys = torch.split(solved, [v.size(2), k.size(2)], dim=2)
    added = values - keys @ state
    made = (q * since.exp()[..., None]) @ state + ((q @ k.transpose(1, 2)) * between) @ added
    left = (since[:, -1:] - since).exp()[..., None]
    return made, state * since[:, -1].exp()[:, None, None] + (k * left).transpose(1, 2) @ added
