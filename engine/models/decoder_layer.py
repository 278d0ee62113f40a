"""One layer of the decoder: a mixer of tokens, then what each token goes through alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from engine.models.convolution import Convolution
from engine.models.delta_net import DeltaNet, LowRankGates
from engine.models.device_packed import StoredExperts, StoredLinear
from engine.models.experts import Experts, NormsApart, Router
from engine.models.latent import LatentHeads
from engine.models.layer_inputs import LayerInput
from engine.models.layers import NORMS, XIELU, LayerNorm, Linear, RMSNorm, ScaledGate, normalised, parameter
from engine.models.mamba import Mamba
from engine.models.mixers import ConvSpec, DeltaSpec, LatentSpec, MambaSpec, MixerSpec, StateSpec
from engine.models.packed import ActivatedLinear, HeadRotation, JoinedLinear, PackedLinear
from engine.models.packed_experts import GatedBeside, PackedExperts
from engine.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, MlpSpec

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int], None]
"""(q, k, v, out, layer index): writes attention's result into `out`.

q [tokens, num_heads, head_dim] and k, v [tokens, num_kv_heads, head_dim] may be views with a free token stride; out is
contiguous and shaped like q. Of latents k and v are the rows that are kept, and q and out have other dimensions (see
`engine.models.facts.HeadsSpec`).
"""


Mix = Callable[[torch.Tensor, torch.Tensor, int], None]
"""(x, out, index among the layers that keep states): what their states make of x [tokens, outputs of the first matrix],
written into `out` [tokens, inputs of the last one]"""


class Acts(NamedTuple):
    """What a layer calls, and its index there."""

    attend: Attend
    attention_index: int
    mix: Mix
    state_index: int


Mixing = Convolution | DeltaNet | Mamba
AnyLinear = Linear | PackedLinear | StoredLinear | JoinedLinear | ActivatedLinear
AnyNorm = RMSNorm | LayerNorm


class DecoderLayer(nn.Module):
    """Its linear layers and experts may be replaced by packed ones before the first forward, and be given an operator
    that rotates heads."""

    qkv_proj: AnyLinear
    o_proj: AnyLinear
    side_o_proj: AnyLinear | None
    """of a layer that keeps a state beside attention; then `qkv_proj` makes what both are given"""
    gate_up_proj: AnyLinear | None
    """of a plain MLP: its first matrix"""
    activation: XIELU | ScaledGate | None
    """that stands alone"""
    down_proj: AnyLinear | None
    beside_gate: AnyLinear | None
    beside: GatedBeside | None
    """in the place of `beside_gate` and of the dense MLP that it gates"""
    router: Router | None
    experts: Experts | PackedExperts | StoredExperts | None
    apart: NormsApart | None
    rotation: HeadRotation | None
    mixing: Mixing | None
    """of a layer that keeps a state; `qkv_proj` makes what it is given"""
    low_rank: LowRankGates | None
    """of a delta net with some, between `qkv_proj` and it"""
    latent: LatentHeads | None
    """of a layer that keeps latents; then `qkv_proj` makes what it is given"""

    def __init__(self, spec: DecoderSpec, layer: LayerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden = spec.hidden_size

        def norm(size: int, exists: bool = True) -> AnyNorm | None:
            return NORMS[spec.norm](size, spec.norm_eps, dtype, device) if exists else None

        ahead, behind = spec.norm_placement != "inside", spec.norm_placement in ("around", "inside")
        self.norms_first = spec.norm_placement != "after"
        self.parallel, self.norm_eps = spec.parallel is not None, spec.norm_eps
        self.input_norm = norm(hidden, ahead and layer.input_norm)
        self._build_mixer(spec, layer, norm, dtype, device)
        self.attention_out_norm = norm(hidden, behind)
        follows = not layer.ends_with_mixer
        self.mlp_norm = self.input_norm if spec.parallel == "one_norm" else norm(hidden, ahead and follows)
        self.mlp_out_norm = norm(hidden, behind and follows)
        self.rotation = None
        self._build_mlp(layer.mlp, hidden, dtype, device)
        self._build_experts(layer.experts, hidden, dtype, device)
        self.apart = None
        if layer.experts is not None and layer.experts.apart:
            self.apart = NormsApart(spec.norm, hidden, spec.norm_eps, dtype, device)
        self.own_input = None if spec.layer_inputs is None else LayerInput(spec, spec.layer_inputs, dtype, device)
        self.scale = parameter((1,), dtype, device) if spec.layer_scales else None

    def _build_mixer(
        self,
        spec: DecoderSpec,
        layer: LayerSpec,
        norm: Callable[[int, bool], AnyNorm | None],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        hidden, mixer, side, state = spec.hidden_size, layer.mixer, layer.side, layer.state
        self.mixing = self.latent = self.q_norm = self.k_norm = self.sinks = self.qk_norm = None
        self.gate_size = 0
        first_bias, last_bias = _biases(mixer)
        self.qkv_proj = Linear(hidden, layer.first_size, first_bias, dtype, device)
        self.o_proj = Linear(mixer.last_size, hidden, last_bias, dtype, device)
        self.low_rank = None
        if isinstance(state, DeltaSpec) and state.rank is not None:
            self.low_rank = LowRankGates(state, state.rank, dtype, device)
        self.mixing = None if state is None else _mixing(spec, state, dtype, device)
        self.side_o_proj = None if side is None else Linear(side.last_size, hidden, False, dtype, device)
        self.own_size = mixer.first_size
        if isinstance(mixer, StateSpec):
            return
        rope = None if mixer.rope is None else spec.ropes[mixer.rope]
        self.turns = rope is not None and rope.rotary_dim > 0
        self.queries_grow = rope is not None and rope.growth is not None
        if isinstance(mixer, LatentSpec):
            self.latent = LatentHeads(mixer, dtype, device)
            return
        self.gate_size = mixer.q_size * mixer.gated
        kv_heads = mixer.num_kv_heads if mixer.shares is None else 0
        self.heads = [mixer.num_heads, kv_heads, kv_heads]
        self.head_dim, self.qk_norm, self.values = mixer.head_dim, mixer.qk_norm, mixer.values
        is_row = mixer.qk_norm == "row"
        self.q_norm = norm(mixer.q_size if is_row else mixer.head_dim, mixer.qk_norm is not None)
        self.k_norm = norm(mixer.kv_size if is_row else mixer.head_dim, mixer.qk_norm is not None and kv_heads > 0)
        for each in () if mixer.qk_weights else (self.q_norm, self.k_norm):
            if each is not None:
                each.weight.fill_(1.0)
        self.sinks = parameter((mixer.num_heads,), torch.float32, device) if mixer.sinks else None
        """for whoever supplies attention"""

    def _build_mlp(self, mlp: MlpSpec | None, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self.gate_up_proj = self.activation = self.down_proj = None
        if mlp is not None:
            if mlp.activation == "xielu":
                self.activation = XIELU(dtype, device)
            elif (mlp.gate_scale, mlp.inner_scale) != (1.0, 1.0):
                self.activation = ScaledGate(mlp.activation, mlp.gate_scale, mlp.inner_scale)
            fused = (mlp.activation, mlp.gated) if self.activation is None else (None, False)
            self.gate_up_proj = Linear(hidden, mlp.first_size, mlp.bias, dtype, device, *fused)
            self.down_proj = Linear(mlp.intermediate_size, hidden, mlp.bias, dtype, device)

    def _build_experts(
        self, experts: ExpertsSpec | None, hidden: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.router = self.experts = self.beside_gate = self.beside = None
        if experts is not None:
            self.router = Router(experts.router, hidden, experts.count, dtype, device)
            self.experts = Experts(experts, hidden, dtype, device)
            self.beside_gate = Linear(hidden, 1, False, dtype, device) if experts.gated_beside else None

    def forward(
        self,
        hidden: torch.Tensor,
        rope: torch.Tensor | None,
        acts: Acts,
        own: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden [tokens, hidden_size]; rope [tokens, rotary_dim], a row of the rope table for each token (one more
        element where queries grow); own [tokens, size], where a layer has inputs of its own."""
        attended = self.attention(hidden, rope, acts)
        made = self._tokens_alone(attended, hidden if self.parallel else attended)
        if self.own_input is not None and own is not None:
            made = self.own_input(made, own)
        return made if self.scale is None else made * self.scale

    def _tokens_alone(self, attended: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """The second half, by MLP and experts."""
        if self.apart is not None:
            return self._mixed_apart(attended, self.apart)
        if self.router is not None and self.experts is not None:
            return self._mixed(attended, given, self.router, self.experts)
        if self.down_proj is None:
            return attended
        inner = self._inner(given, self.mlp_norm if self.norms_first else None)
        return self._add(attended, self.down_proj, inner, self.mlp_norm, self.mlp_out_norm)

    def _inner(self, x: torch.Tensor, norm: AnyNorm | None) -> torch.Tensor:
        assert self.gate_up_proj is not None
        inner: torch.Tensor = self.gate_up_proj(x, norm)
        return inner if self.activation is None else self.activation(inner)

    def _mixed(
        self, attended: torch.Tensor, x: torch.Tensor, router: Router, experts: Experts | PackedExperts | StoredExperts
    ) -> torch.Tensor:
        """What experts, and a dense MLP beside them, make of `x`, and the residual and the norms around it."""
        out_norm, ahead = self.mlp_out_norm, self.mlp_norm if self.norms_first else None
        rows = x if ahead is None else ahead(x)
        sum_so_far = attended if out_norm is None else None
        if self.beside is not None:
            sum_so_far = self.beside(rows, sum_so_far)
        elif self.down_proj is not None and self.beside_gate is None:
            sum_so_far = self.down_proj(self._inner(rows, None), residual=sum_so_far)
        elif self.down_proj is not None and self.beside_gate is not None:
            beside = torch.sigmoid(self.beside_gate(rows)) * self.down_proj(self._inner(rows, None))
            sum_so_far = beside if sum_so_far is None else sum_so_far + beside
        ids, factors = router(rows)
        if router.spec.of_inputs:
            rows, factors = rows * factors.to(rows.dtype), torch.ones_like(factors)
        added: torch.Tensor = experts(rows, ids, factors, sum_so_far)
        if out_norm is not None:
            added = out_norm(added, attended)
        return added if self.norms_first or self.mlp_norm is None else self.mlp_norm.forward(added)

    def _mixed_apart(self, attended: torch.Tensor, apart: NormsApart) -> torch.Tensor:
        assert self.router is not None and self.experts is not None and self.down_proj is not None
        assert self.mlp_out_norm is not None
        dense = apart.behind_dense(self.down_proj(self._inner(attended, self.mlp_norm)))
        ids, factors = self.router(apart.of_router(attended))
        chosen = self.experts(apart.of_experts(attended), ids, factors)
        both: torch.Tensor = self.mlp_out_norm(apart.behind_experts(chosen, dense), attended)
        return both

    def attention(self, hidden: torch.Tensor, rope: torch.Tensor | None, acts: Acts) -> torch.Tensor:
        """The first half of `forward`, with the residual and the norms around it."""
        qkv = self.qkv_proj(hidden, self.input_norm if self.norms_first else None)
        attend, layer_index = acts.attend, acts.attention_index
        if self.side_o_proj is not None:
            qkv, given = torch.split(qkv, [self.own_size, qkv.size(1) - self.own_size], dim=1)
            hidden = self.side_o_proj(self._by_state(given, acts), residual=hidden)
            out = self.attended(qkv.contiguous(), rope, attend, layer_index)
        elif self.mixing is not None:
            out = self._by_state(qkv if self.low_rank is None else self.low_rank(qkv), acts)
        elif self.gate_size:
            gate, qkv = torch.split(qkv, [self.gate_size, qkv.size(1) - self.gate_size], dim=1)
            out = self.attended(qkv.contiguous(), rope, attend, layer_index) * torch.sigmoid(gate)
        else:
            out = self.attended(qkv, rope, attend, layer_index)
        return self._add(hidden, self.o_proj, out, self.input_norm, self.attention_out_norm)

    def _by_state(self, given: torch.Tensor, acts: Acts) -> torch.Tensor:
        assert self.mixing is not None
        out = given.new_empty(given.size(0), self.mixing.outputs)
        acts.mix(given, out, acts.state_index)
        return out

    def attended(self, qkv: torch.Tensor, rope: torch.Tensor | None, attend: Attend, layer_index: int) -> torch.Tensor:
        """What the heads find: [tokens, outputs of the first matrix] to [tokens, inputs of the last one]."""
        growth = None
        if self.queries_grow and rope is not None:
            growth = rope[:, -1:, None]
            rope = rope[:, :-1] if self.turns else None
        if self.latent is not None:
            q, k = self.latent(qkv, rope, growth, _rotate)
            found: torch.Tensor = q.new_empty(q.size(0), self.latent.heads, self.latent.v_dim)
            attend(q, k, k, found, layer_index)
            return found.flatten(1)
        if self.rotation is not None:
            rotated = self.rotation(qkv, rope, self.q_norm, self.k_norm).unflatten(-1, (-1, self.head_dim))
            q, k, v = torch.split(rotated, self.heads, dim=1)
        elif self.qk_norm == "row":
            q, k, v = self._with_normed_rows(qkv, rope)
        else:
            heads = qkv.unflatten(-1, (-1, self.head_dim))  # type: ignore[no-untyped-call]  # torch leaves it untyped
            q, k, v = self._rotated(heads, rope)
        if growth is not None:
            q = (q * growth).to(q.dtype)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        attend(q, k, v, out, layer_index)
        return out.flatten(1)

    def _add(
        self, hidden: torch.Tensor, linear: AnyLinear, x: torch.Tensor, norm: AnyNorm | None, out_norm: AnyNorm | None
    ) -> torch.Tensor:
        """The residual and what a linear layer makes of `x`, normed wherever the model does so behind it."""
        added: torch.Tensor = linear(x, residual=hidden) if out_norm is None else out_norm(linear(x), hidden)
        return added if self.norms_first or norm is None else norm.forward(added)

    def _rotated(self, qkv: torch.Tensor, rope: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.values == "own":
            qk, v = torch.split(qkv, [self.heads[0] + self.heads[1], self.heads[2]], dim=1)
        else:
            qk, v = qkv[:, : self.heads[0] + self.heads[1]], qkv[:, qkv.size(1) - self.heads[2] :]
            v = normalised(v, self.norm_eps).to(v.dtype)
        if self.qk_norm == "head":
            qk = self._with_normed_heads(qk)
        if rope is not None:
            qk = _rotate(qk, rope)
        if self.qk_norm == "turned_head":
            qk = self._with_normed_heads(qk)
        q, k = torch.split(qk, self.heads[:2], dim=1)
        return q, k, v

    def _with_normed_heads(self, qk: torch.Tensor) -> torch.Tensor:
        assert self.q_norm is not None
        # q and k at once, head by head: as two norms, they are two more kernels of a GPU's step
        norms = [self.q_norm] if self.k_norm is None else [self.q_norm, self.k_norm]
        pairs = zip(norms, self.heads, strict=False)
        return self.q_norm.weighted(qk, torch.cat([norm.weight.expand(heads, -1) for norm, heads in pairs]))

    def _with_normed_rows(
        self, qkv: torch.Tensor, rope: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = torch.split(qkv, [heads * self.head_dim for heads in self.heads], dim=1)
        assert self.q_norm is not None
        normed = k if self.k_norm is None else self.k_norm.weighted(k, self.k_norm.weight)
        rows = (self.q_norm.weighted(q, self.q_norm.weight), normed, v)
        q, k, v = (row.unflatten(-1, (-1, self.head_dim)) for row in rows)  # type: ignore[no-untyped-call]  # as above
        return (q, k, v) if rope is None else (_rotate(q, rope), _rotate(k, rope), v)


def _biases(mixer: MixerSpec | LatentSpec | StateSpec) -> tuple[bool, bool]:
    """Of the first matrix, and of the last one."""
    if isinstance(mixer, MixerSpec):
        return mixer.qkv_bias, mixer.o_bias
    bias = isinstance(mixer, ConvSpec | MambaSpec) and mixer.bias
    return bias, bias


def _mixing(spec: DecoderSpec, mixer: StateSpec, dtype: torch.dtype, device: torch.device) -> Mixing:
    if isinstance(mixer, ConvSpec):
        return Convolution(mixer, mixer.bias, dtype, device)
    if isinstance(mixer, MambaSpec):
        return Mamba(mixer, dtype, device)
    return DeltaNet(mixer, spec.norm_eps, dtype, device)


def _rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + rotary_dim / 2) of each head's first elements. x [tokens, heads, head_dim], rope [tokens,
    rotary_dim]."""
    cos, sin = rope[:, None].chunk(2, dim=-1)
    passing: Sequence[torch.Tensor] = ()
    if rope.shape[-1] < x.shape[-1]:
        x, *passing = torch.split(x, [rope.shape[-1], x.shape[-1] - rope.shape[-1]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, *passing), dim=-1)
