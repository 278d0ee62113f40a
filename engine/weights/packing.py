"""Matrices packed for CPUs: from a checkpoint's rows to `PackedLinear`.

Matrix by matrix, as the loader reads them: what was dense is dropped before the next one is read, so at no time are two
copies of the model in memory. A matrix that cannot be packed (its inputs are no multiple of what the format groups)
stays dense, and is computed by the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.config import Quantization
from engine.cpu_kernels.experts import ExpertWeights, expert_biases
from engine.cpu_kernels.formats import PANEL, Format, packable
from engine.cpu_kernels.linear import LinearOps, interleave_gate_up, pack_bf16, pack_float32
from engine.cpu_kernels.quantize import PACK_DENSE, pack_blocks
from engine.models.decoder import Decoder
from engine.models.decoder_layer import AnyLinear, DecoderLayer
from engine.models.device_packed import StoredEmbedding, StoredLinear
from engine.models.experts import Experts, Router
from engine.models.layers import Embedding, Linear, RMSNorm
from engine.models.mixers import MixerSpec
from engine.models.packed import (
    FUSED_GATES,
    ActivatedLinear,
    HeadRotation,
    JoinedLinear,
    PackedEmbedding,
    PackedLinear,
    ReorderedLinear,
    RowNorm,
)
from engine.models.packed_experts import GatedBeside, PackedExperts
from engine.models.spec import Activation
from engine.weights.packed_rows import HEAD_FORMAT, MATRIX_FORMAT, Rows, RowsPacker
from engine.weights.source import Part, WeightSource


def _packed(run: Rows) -> torch.Tensor:
    if run.format is Format.BFLOAT16:
        return pack_bf16(run.rows)
    if run.rows.dtype == torch.uint8:
        return pack_blocks(run.rows, run.format)
    return PACK_DENSE[run.format](run.rows)


class Tables(Protocol):
    """What a model has of embedding and unembedding."""

    embed_tokens: Embedding | PackedEmbedding | StoredEmbedding
    lm_head: Linear | PackedLinear | StoredLinear


class Packer(RowsPacker):
    """Puts packed layers where `model` has dense ones. `quantization`: "none" packs bfloat16; "gguf" and "stored" keep
    what the checkpoint has encoded, "int8", "int4" and "fp8" what it has in no more bits, and quantise the rest.
    `adapts`: adapters will change layers, which are not fused with others then."""

    def __init__(self, ops: LinearOps, quantization: Quantization, adapts: bool = False) -> None:
        super().__init__(quantization, torch.bfloat16, torch.device("cpu"))
        self._ops, self._adapts = ops, adapts

    def _possible(self, n: int, k: int, format: Format) -> bool:
        return packable(n, k, format)

    @property
    def ops(self) -> LinearOps:
        """What packed layers call."""
        return self._ops

    def pack_linear(self, layer: Linear, parts: Sequence[Part], source: WeightSource | None) -> AnyLinear:
        """What takes the place of `layer`, whose bias is filled and whose weight is `parts` of `source`, one below the
        other; without a source its weight is filled, too."""
        k = layer.weight.shape[1]
        runs = self._encoded(layer.weight, parts, source, {} if layer.keeps_bits else MATRIX_FORMAT)
        if runs is None:
            return layer
        if layer.gated and layer.activation in FUSED_GATES and layer.weight.shape[0] % PANEL == 0:
            return self._gated(layer, runs, parts, source)
        packed = []
        first = 0
        for run in runs:
            count = run.rows.shape[0]
            bias = None if layer.bias is None else layer.bias.detach()[first : first + count].clone()
            packed.append(self._linear(run, count, k, bias))
            first += count
        joined = packed[0] if len(packed) == 1 else JoinedLinear(packed)
        return joined if layer.activation is None else ActivatedLinear(joined, layer.activation, layer.gated)

    def pack_experts(
        self, layer: Experts, gate_up: Sequence[Part], down: Sequence[Part], source: WeightSource | None
    ) -> Experts | PackedExperts:
        """What takes the place of `layer`, whose biases are filled and whose weights are the parts of `source`, one
        expert's after another's; without a source its weights are filled, too. `layer` itself, filled, where not even
        bfloat16 can be packed, or the kernels do not have its gate."""
        count, hidden, inner = layer.down.shape
        known = layer.kernel_gate is not None
        possible = packable(2 * inner, hidden, Format.BFLOAT16) and packable(hidden, inner, Format.BFLOAT16)
        if not known or not possible or (2 * inner) % PANEL:
            self._fill_experts(layer.gate_up, gate_up, source)
            self._fill_experts(layer.down, down, source)
            return layer
        first = self._stacked(layer.gate_up, gate_up, source, interleave_gate_up)
        second = self._stacked(layer.down, down, source, torch.Tensor.contiguous)
        biases = expert_biases(count, hidden, inner, layer.gate_up_bias, layer.down_bias)
        weights = ExpertWeights(first[1], second[1], first[0], second[0], hidden, inner, *biases)
        return PackedExperts(self._ops, weights, layer.activation, layer.places)

    def _stacked(
        self,
        weights: torch.Tensor,
        parts: Sequence[Part],
        source: WeightSource | None,
        order: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[Format, torch.Tensor]:
        """All experts' matrices in one format: the first one's, or bfloat16 where others have another."""
        each = len(parts) // len(weights)
        stacked: torch.Tensor | None = None
        format = None
        for expert in range(len(weights)):
            weight = weights[expert] if source is None else torch.empty_like(weights[expert])
            run = self._one_run(weight, parts[each * expert : each * (expert + 1)], source)
            if stacked is not None and run.format is not format:
                dense = Packer(self._ops, "none")
                return dense._stacked(weights, parts, source, order)
            packed = _packed(Rows(run.format, order(run.rows)))
            if stacked is None:
                format, stacked = run.format, packed.new_empty((len(weights), *packed.shape))
            stacked[expert] = packed
        assert stacked is not None and format is not None
        return format, stacked

    def fuse_heads_and_norms(self, model: Decoder) -> None:
        """RoPE and the norms of heads by the operator that does both, and so the norms that stand alone."""
        for layer, spec in zip(model.layers, model.spec.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            if isinstance(spec.mixer, MixerSpec) and _turns_natively(spec.mixer, layer):
                heads = (spec.mixer.num_heads, spec.mixer.num_kv_heads, spec.mixer.head_dim)
                layer.rotation = HeadRotation(self._ops, *heads, spec.mixer.qk_norm)
            gate, first, second = None if self._adapts else layer.beside_gate, layer.gate_up_proj, layer.down_proj
            if isinstance(gate, PackedLinear) and isinstance(first, PackedLinear) and isinstance(second, PackedLinear):
                layer.beside = GatedBeside(self._ops, gate, first, second)
                layer.beside_gate = layer.gate_up_proj = layer.down_proj = None
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.rows = RowNorm(self._ops)
            if isinstance(module, Router):
                module.use(self._ops.route)
                self._widen(module)

    def _widen(self, router: Router) -> None:
        """Logits come as float32, from weights of float32 too."""
        dense = router.logits
        if isinstance(dense, Linear) and dense.weight.dtype == torch.float32 and dense.bias is None:
            packed = pack_float32(dense.weight.detach())
            n, k = dense.weight.shape
            router.logits = PackedLinear(self._ops, packed, n, k, Format.FLOAT32)
        if isinstance(router.logits, PackedLinear):
            router.logits.wide = True

    def pack_tables(
        self, model: Tables, embedding_part: Part, head_part: Part | None, source: WeightSource | None
    ) -> None:
        """Embedding and unembedding; `head_part` None: they are tied, and share one packed matrix. An embedding of its
        own stays dense, unless blocks are kept."""
        if head_part is not None:
            self.pack_embedding(model, embedding_part, source, tied=False)
            self.pack_head(model, head_part, source)
            return
        self.pack_embedding(model, embedding_part, source, tied=True)
        table = model.embed_tokens
        if isinstance(table, PackedEmbedding):
            model.lm_head = PackedLinear(self._ops, table.weight, table.n, table.k, Format(table.format), wide=True)

    def pack_embedding(self, model: Tables, part: Part, source: WeightSource | None, *, tied: bool) -> None:
        """`tied`: as the unembedding is packed, which it is, too."""
        embedding = model.embed_tokens
        assert isinstance(embedding, Embedding)
        n, k = embedding.weight.shape
        if tied or (self._quantization in ("gguf", "stored") and source is not None):
            run = self._table(embedding.weight, part, source)
        else:
            run = None if source is None else self._kept(part, k, source, Format.INT8)
        if run is not None and run.order is None:
            model.embed_tokens = PackedEmbedding(self._ops, _packed(run), n, k, run.format)
        elif not tied:
            self._fill(embedding.weight, [part], source)

    def pack_head(self, model: Tables, part: Part, source: WeightSource | None) -> None:
        """An unembedding of its own."""
        head = model.lm_head
        assert isinstance(head, Linear)
        n, k = head.weight.shape
        run = self._table(head.weight, part, source)
        if run is not None:
            bias = None if head.bias is None else head.bias.detach().clone()
            model.lm_head = PackedLinear(self._ops, _packed(run), n, k, run.format, bias=bias, wide=True)

    def _table(self, weight: torch.Tensor, part: Part, source: WeightSource | None) -> Rows | None:
        runs = self._encoded(weight, [part], source, HEAD_FORMAT)
        if runs is None or runs[0].order is None:
            return runs[0] if runs else None
        return self._made(weight, [part], source, HEAD_FORMAT)

    def _gated(self, layer: Linear, runs: list[Rows], parts: Sequence[Part], source: WeightSource | None) -> AnyLinear:
        n, k = layer.weight.shape
        run = self._as_one(runs, layer.weight, parts, source)
        bias = None if layer.bias is None else interleave_gate_up(layer.bias.detach())
        mixed = Rows(run.format, interleave_gate_up(run.rows), run.order)
        return self._linear(mixed, n, k, bias, layer.activation)

    def _linear(
        self, run: Rows, n: int, k: int, bias: torch.Tensor | None, gate: Activation | None = None
    ) -> PackedLinear:
        if run.order is None:
            return PackedLinear(self._ops, _packed(run), n, k, run.format, bias=bias, gate=gate)
        return ReorderedLinear(self._ops, _packed(run), n, k, run.format, bias=bias, gate=gate).reordered(run.order)


def _turns_natively(mixer: MixerSpec, layer: DecoderLayer) -> bool:
    """Norms over rows of q and k are one call of the operator where those are equally wide; it wants keys beside
    queries."""
    if mixer.shares is not None or mixer.values != "own":
        return False
    if mixer.qk_norm is None:
        return layer.turns
    return isinstance(layer.q_norm, RMSNorm) and (mixer.qk_norm != "row" or mixer.num_heads == mixer.num_kv_heads)
