"""Packed linear layers on CPUs: how weights are packed, and the operators that compute with them.

One packed layout for every number of rows (`csrc/linear.h`); packed weights are plain uint8 tensors, inputs of a
compiled piece like any other, so identical layers share one artifact. The operators live in a library that is compiled
on this machine once; their namespace names the build.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._ops import OpOverload

from attention_backends.crew import load_library
from attention_backends.native_build import ISAS
from attention_backends.toolchain import KernelLibrary
from engine.cpu_kernels import build, quantize
from engine.cpu_kernels.formats import PANEL, Format, packable, panel_bytes

__all__ = [
    "PANEL",
    "Format",
    "LinearOps",
    "interleave_gate_up",
    "load",
    "pack_bf16",
    "pack_float32",
    "packable",
    "panel_bytes",
    "separate_gate_up",
    "unpack",
]

_HALF = PANEL // 2


def pack_bf16(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] of any float dtype → uint8 [ceil(n / 32), panel_bytes], rounded to bf16.

    Raises ValueError: not a matrix, or k is odd.
    """
    if weight.dim() != 2:
        raise ValueError(f"a packed weight is a matrix [n, k], not {list(weight.shape)}")
    n, k = weight.shape
    size, panels, rest = panel_bytes(k, Format.BFLOAT16), -(-n // PANEL), n % PANEL
    packed = torch.empty(panels, k // 2, PANEL, 2, dtype=torch.bfloat16)
    whole = n - rest
    # copy_ rounds and re-orders at once: no second copy of a large matrix
    packed[: whole // PANEL].copy_(weight[:whole].reshape(-1, PANEL, k // 2, 2).transpose(1, 2))
    if rest:
        packed[-1].zero_()
        packed[-1, :, :rest].copy_(weight[whole:].reshape(rest, k // 2, 2).transpose(0, 1))
    return packed.view(torch.uint8).view(panels, size)


def pack_float32(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] → uint8 [ceil(n / 32), panel_bytes]: `packed_linear` makes float32 of it that nothing rounds (`wide`)."""
    n, k = weight.shape
    padded = torch.zeros(-(-n // PANEL) * PANEL, k)
    padded[:n] = weight
    return (
        padded.view(-1, PANEL, k)
        .transpose(1, 2)
        .contiguous()
        .view(torch.uint8)
        .view(-1, panel_bytes(k, Format.FLOAT32))
    )


def unpack(packed: torch.Tensor, n: int, k: int, format: Format) -> torch.Tensor:
    """The exact values of packed weights, float32 [n, k]: the oracle of the kernels, and slow."""
    if format is Format.FLOAT32:
        return packed.view(torch.float32).view(-1, k, PANEL).transpose(1, 2).reshape(-1, k)[:n]
    if format is not Format.BFLOAT16:
        return quantize.unpack(packed, n, k, format)
    pairs = packed.view(torch.bfloat16).view(-1, k // 2, PANEL, 2)
    return pairs.transpose(1, 2).reshape(-1, k)[:n].float()


def interleave_gate_up(rows: torch.Tensor) -> torch.Tensor:
    """[2 * inner, ...], gate rows then up rows → the order of gated layers: 16 gate rows, their 16 up rows, and so on.

    Raises ValueError: inner is not a multiple of 16.
    """
    if rows.size(0) % PANEL:
        raise ValueError(f"gate and up have {rows.size(0)} rows together, which is not a multiple of {PANEL}")
    halves = rows.reshape(2, -1, _HALF, *rows.shape[1:])
    return halves.transpose(0, 1).reshape(rows.shape)


def separate_gate_up(y: torch.Tensor) -> torch.Tensor:
    """What a layer of rows in that order has computed, [tokens, 2 * inner] → gates, then ups."""
    return y.view(len(y), -1, 2, _HALF).transpose(1, 2).reshape(y.shape)


@dataclass(frozen=True)
class LinearOps:
    """A loaded library.

    packed_linear(x bf16 [rows, k], weight, n, format, bias, norm_weight, norm_eps, residual, gate, wide, isa) → bf16
    [rows, n] (gate 1, SiLU, and 2, GELU by tanh: [rows, n / 2]; wide: float32); isa 0, or 1 + the index in
    `native_build.ISAS`.
    rotate_heads(x bf16 [rows, n], rope bf16 [rows, rotary_dim], q_norm, k_norm, norm_eps, q_heads, k_heads, head_dim,
    residual) → bf16 [rows, n]: the first rotary_dim elements of the first heads rotated, the rest as it was; norms of
    heads, where there are any, before. Without a rope only those, and a residual added to rows that are normed whole.
    Weights of norms are bfloat16 (normalised, rounded, weighted) or float32 (normalised, weighted, rounded).
    packed_embedding(ids int64 [tokens], weight, n, k, format) → bf16 [tokens, k].
    packed_experts(x bf16 [tokens, k], ids int32 [tokens, top_k], weights float32 [tokens, top_k], gate_up, down,
    n_inner, gate_up_format, down_format, gate_up_bias, down_bias, places, residual, gate, limit, alpha, isa) → bf16
    [tokens, k]: residual + the sum of weights · down(activation(gate x) · up x) over the experts that a token chose
    (`experts.py` packs them; gate 3: GPT-OSS' clamped SwiGLU, which limit and alpha are for). An expert that nobody
    chose is not read. places int32 [experts that ids name]: which of the packed ones each is, or -1: it is elsewhere,
    and adds nothing.
    combine_experts(rows bf16 [rows, k], positions int32 [tokens, top_k], weights float32 [tokens, top_k], residual,
    isa) → bf16 [tokens, k]: the end of `packed_experts` alone, where others made the rows that tokens chose; position
    -1: there is none.
    adapted_linear(x, weight, n, format, bias, norm_weight, norm_eps, residual, gate, step, a, b, ranks, ends) →
    `packed_linear` with B (A x) of each row's adapter added to the product (`engine/adapters/linear.py`), and its bits
    where no row has one.
    write_factors(a, b, ranks, given_a, given_b, places int64 [count, 3], scales float32 [count]): of as many parts of
    layers, given_a bfloat16 [rank, k] and given_b bfloat16 [outputs, rank], times its scale, into their place: slot,
    part, first output.
    route(logits float32 [tokens, experts], kind, top_k, normalise, bias float32 [experts], groups, top_groups, scale) →
    ids int32 [tokens, top_k], best first, equal ones by index; weights float32 [tokens, top_k]. Kinds:
    `experts.Routing`; a bias goes with scores of all experts, groups with its last.
    mix_states: `states.NativeMix`.
    RuntimeError where an argument does not fit.
    """

    isas: tuple[str, ...]
    """that this CPU runs and this build has"""
    packed_linear: OpOverload
    rotate_heads: OpOverload
    packed_embedding: OpOverload
    packed_experts: OpOverload
    combine_experts: OpOverload
    adapted_linear: OpOverload
    write_factors: OpOverload
    route: OpOverload
    mix_states: OpOverload
    choose_reading: Callable[[int, bool], None]
    """how many panels of bfloat16 weights one row meets at once, 1 to 8, and whether what is used once is read past the
    caches, in layers that are run, or put on a tape, from then on (`reading.py`)"""


def load(cache_dir: Path, *, every_isa: bool = False) -> LinearOps:
    """Builds the kernels (once per machine; seconds) and loads them (once per process): those that this CPU takes, or
    of `every_isa` (tests, comparisons). Raises BuildError."""
    library = build.build(cache_dir, every_isa=every_isa)
    return _load(library, cache_dir)


@functools.cache
def _load(library: KernelLibrary, cache_dir: Path) -> LinearOps:
    ops, new = load_library(library, cache_dir)
    if new:
        namespace = library.namespace
        torch.library.register_fake(f"{namespace}::packed_linear", _fake_linear)
        torch.library.register_fake(f"{namespace}::rotate_heads", _fake_rotation)
        torch.library.register_fake(f"{namespace}::packed_embedding", _fake_embedding)
        torch.library.register_fake(f"{namespace}::packed_experts", _fake_experts)
        torch.library.register_fake(f"{namespace}::adapted_linear", _fake_adapted)
        torch.library.register_fake(f"{namespace}::route", _fake_route)
    supported = ops.supported_isas()
    isas = tuple(isa for number, isa in enumerate(ISAS, 1) if supported >> number & 1)
    return LinearOps(
        isas,
        ops.packed_linear.default,
        ops.rotate_heads.default,
        ops.packed_embedding.default,
        ops.packed_experts.default,
        ops.combine_experts.default,
        ops.adapted_linear.default,
        ops.write_factors.default,
        ops.route.default,
        ops.mix_states.default,
        ops.choose_reading.default,
    )


def _fake_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    n: int,
    format: int,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    residual: torch.Tensor | None,
    gate: int,
    wide: bool,
    isa: int,
) -> torch.Tensor:
    return x.new_empty((x.size(0), n // 2 if gate else n), dtype=torch.float32 if wide else torch.bfloat16)


def _fake_adapted(
    x: torch.Tensor,
    weight: torch.Tensor,
    n: int,
    format: int,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    residual: torch.Tensor | None,
    gate: int,
    step: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    return x.new_empty((x.size(0), n // 2 if gate else n))


def _fake_rotation(
    x: torch.Tensor,
    rope: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    norm_eps: float,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty((x.size(0), x.size(1)))


def _fake_embedding(ids: torch.Tensor, weight: torch.Tensor, n: int, k: int, format: int) -> torch.Tensor:
    return ids.new_empty((ids.size(0), k), dtype=torch.bfloat16)


def _fake_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    n_inner: int,
    gate_up_format: int,
    down_format: int,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    places: torch.Tensor | None,
    residual: torch.Tensor | None,
    gate: int,
    limit: float,
    alpha: float,
    isa: int,
) -> torch.Tensor:
    return x.new_empty((x.size(0), x.size(1)))


def _fake_route(
    logits: torch.Tensor,
    kind: int,
    top_k: int,
    normalise: bool,
    bias: torch.Tensor | None,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.size(0), top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)
