"""Recurrences whose state is a matrix for each head: S [keys, values] forgets, takes over k v', and a query reads S'q.

With the delta rule it takes over what a key's value differs from what it holds for it, in part: S = a S + b k (v - a
S'k)'. Tokens of a chunk are computed at once: what earlier ones of it add is a product with a triangular matrix (Dao
and Gu, *Transformers are SSMs*, 2024); with the delta rule they are solved for first (Yang et al., *Gated Delta
Networks*, 2024, and *Parallelizing Linear Transformers with the Delta Rule*, 2024).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.models.facts import DeltaFacts, MambaFacts
from engine.models.state_layers import LayerStates, StateStep

_CHUNK = 64
_CHUNK_OF_NUMBERS = 16
"""where numbers of a key are kept in parts of their own, for which there is a matrix of tokens each"""

MatrixFacts = DeltaFacts | MambaFacts


def read_states(states: LayerStates, facts: MatrixFacts, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The convolution's inputs [sequences, taps - 1, channels] in `dtype`, and float32 [sequences, heads, keys,
    values]."""
    data, before = states.read(), facts.taps - 1
    inputs = data[:, : before * facts.channels * dtype.itemsize].contiguous().view(dtype)
    matrices = data[:, facts.inputs_bytes(dtype.itemsize) :].contiguous().view(torch.float32)
    return inputs.view(len(data), before, facts.channels), matrices.view(len(data), *facts.matrices)


def as_bytes(facts: MatrixFacts, inputs: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """What `read_states` reads."""
    first = inputs.flatten(1).view(torch.uint8)
    padding = facts.inputs_bytes(inputs.itemsize) - first.size(1)
    return torch.cat((functional.pad(first, (0, padding)), matrices.flatten(1).view(torch.uint8)), dim=1)


def recur(
    step: StateStep,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What queries read, [tokens, heads, values], and the states that are to be kept, [writes, heads, keys, values].

    All float32: q, k [tokens, groups of heads, keys]; v [tokens, heads, values]; log_decay [tokens, heads, 1], or of
    each number of a key [tokens, heads, keys]; beta [tokens, heads]; state [sequences, heads, keys, values]. `beta`:
    None: without the delta rule.
    """
    made, written = torch.zeros_like(v), state.new_empty(len(step.written), *state.shape[1:])
    if step.kernels is not None:
        step.kernels.one_token(q, k, v, log_decay, beta, state, step.single, made, written)
    else:
        sequence, token, write = step.single
        some = None if beta is None else beta[token]
        made[token], written[write] = one_token(q[token], k[token], v[token], log_decay[token], some, state[sequence])
    for each in step.segments:
        at = slice(each.begin, each.end)
        some = None if beta is None else beta[at]
        made[at], state[each.sequence] = many_tokens(q[at], k[at], v[at], log_decay[at], some, state[each.sequence])
        if each.write >= 0:
            written[each.write] = state[each.sequence]
    return made, written


def one_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each of several sequences, in the place of tokens: what its query reads, and its state."""
    q, k = (each.repeat_interleave(v.size(1) // each.size(1), dim=1) for each in (q, k))
    state = state * log_decay.exp()[..., None]
    if beta is not None:
        v = (v - torch.einsum("shkv,shk->shv", state, k)) * beta[..., None]
    state = state + k[..., None] * v[..., None, :]
    return torch.einsum("shkv,shk->shv", state, q), state


def many_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one sequence's consecutive tokens; state [heads, keys, values]."""
    parts = []
    size = _CHUNK if log_decay.size(2) == 1 else _CHUNK_OF_NUMBERS
    for at in range(0, len(q), size):
        some = slice(at, at + size)
        queries, keys, values, decays = (each[some].transpose(0, 1) for each in (q, k, v, log_decay))
        part, state = _chunk(queries, keys, values, decays, None if beta is None else beta[some].T, state)
        parts.append(part.transpose(0, 1))
    return torch.cat(parts), state


def _chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `many_tokens`, [heads, tokens, ...]."""
    q, k = (each.repeat_interleave(v.size(0) // each.size(0), dim=0) for each in (q, k))
    since = log_decay.cumsum(1)  # the chunk's beginning
    later = torch.ones(q.size(1), q.size(1), dtype=torch.bool, device=q.device).triu(1)
    between = (since[:, :, None] - since[:, None]).masked_fill(later[..., None], float("-inf")).exp()
    if beta is not None:
        taken = k * beta[..., None]
        depends = _products(taken, k, between)  # its diagonal is not looked at
        known = torch.cat((v * beta[..., None], taken * since.exp()), dim=2)
        solved = torch.linalg.solve_triangular(depends, known, upper=False, unitriangular=True)
        values, keys = torch.split(solved, [v.size(2), k.size(2)], dim=2)
        v = values - keys @ state
    made = (q * since.exp()) @ state + _products(q, k, between) @ v
    left = (since[:, -1:] - since).exp()
    return made, state * since[:, -1].exp()[..., None] + (k * left).transpose(1, 2) @ v


def _products(of: torch.Tensor, k: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, tokens]: of each with each key, of which so much is left; between [heads, tokens, tokens, 1 or
    keys]."""
    if between.size(3) == 1:
        return (of @ k.transpose(1, 2)) * between[..., 0]
    return torch.einsum("htk,hsk,htsk->hts", of, k, between)
