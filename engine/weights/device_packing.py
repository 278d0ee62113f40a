"""Matrices kept packed on a GPU: from a checkpoint's rows to `StoredLinear`.

The model is built and filled on the CPU, whose memory a dense layer takes only while it is filled; what is packed goes
to the device matrix by matrix, and the rest behind it. A matrix that cannot be packed (its inputs are no multiple of
what the format groups) stays dense.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.cpu_kernels.formats import Format, device_packable
from engine.models.decoder import Decoder
from engine.models.decoder_layer import AnyLinear
from engine.models.device_packed import StoredEmbedding, StoredExperts, StoredLinear
from engine.models.expert_op import route
from engine.models.experts import Experts, Router
from engine.models.layers import Embedding, Linear
from engine.models.packed import ActivatedLinear, JoinedLinear
from engine.models.product_kernels import DENSE, Matrix
from engine.weights import device_layouts
from engine.weights.packed_rows import HEAD_FORMAT, MATRIX_FORMAT, Rows, RowsPacker
from engine.weights.packing import Tables
from engine.weights.source import Part, WeightSource


class DevicePacker(RowsPacker):
    """As `engine.weights.packing.Packer`, for `device`."""

    def _possible(self, n: int, k: int, format: Format) -> bool:
        return device_packable(n, k, format)

    def _takes(self, run: Rows, k: int) -> bool:
        return run.order is None and super()._takes(run, k)

    def pack_linear(self, layer: Linear, parts: Sequence[Part], source: WeightSource | None) -> AnyLinear:
        """What takes the place of `layer`, whose bias is filled and whose weight is `parts` of `source`, one below the
        other; without a source its weight is filled, too."""
        runs = self._encoded(layer.weight, parts, source, {} if layer.keeps_bits else MATRIX_FORMAT)
        if runs is None or all(run.format is Format.BFLOAT16 for run in runs):
            return self._left(layer, runs)
        bias = None if layer.bias is None else layer.bias.detach().to(self.device)
        if len(runs) == 1:
            return StoredLinear(self._matrix(runs[0]), bias, layer.activation, layer.gated)
        sizes = [run.rows.shape[0] for run in runs]
        biases = [None] * len(runs) if bias is None else torch.split(bias, sizes)
        joined = JoinedLinear([StoredLinear(self._matrix(run), part) for run, part in zip(runs, biases, strict=True)])
        return joined if layer.activation is None else ActivatedLinear(joined, layer.activation, layer.gated)

    def pack_experts(
        self, layer: Experts, gate_up: Sequence[Part], down: Sequence[Part], source: WeightSource | None
    ) -> Experts | StoredExperts:
        """What takes the place of `layer`; see `Packer.pack_experts`."""
        gate = layer.kernel_gate
        if gate is None:
            self._fill_experts(layer.gate_up, gate_up, source)
            self._fill_experts(layer.down, down, source)
            return layer
        biases = (layer.gate_up_bias, layer.down_bias)
        moved = tuple(None if each is None else each.detach().to(self.device) for each in biases)
        first, second = self._stacked(layer.gate_up, gate_up, source), self._stacked(layer.down, down, source)
        places = None if layer.places is None else layer.places.to(self.device)
        return StoredExperts(first, second, (moved[0], moved[1]), gate, places)

    def _stacked(self, weights: torch.Tensor, parts: Sequence[Part], source: WeightSource | None) -> Matrix:
        """All experts' matrices in one format: the first one's, or dense where others have another."""
        each = len(parts) // len(weights)
        stacked: Matrix | None = None
        for expert in range(len(weights)):
            weight = weights[expert] if source is None else torch.empty_like(weights[expert])
            matrix = self._matrix(self._one_run(weight, parts[each * expert : each * (expert + 1)], source))
            if stacked is None:
                count, of = len(weights), matrix.scales
                scales = None if of is None else of.new_empty((count, *of.shape))
                stacked = Matrix(matrix.levels.new_empty((count, *matrix.levels.shape)), scales, matrix.format)
            if matrix.format != stacked.format:
                return DevicePacker("none", self._dtype, self.device)._stacked(weights, parts, source)
            stacked.levels[expert] = matrix.levels
            if stacked.scales is not None and matrix.scales is not None:
                stacked.scales[expert] = matrix.scales
        assert stacked is not None
        return stacked

    def pack_tables(
        self, model: Tables, embedding_part: Part, head_part: Part | None, source: WeightSource | None
    ) -> None:
        """Embedding and unembedding; `head_part` None: they are tied, and share one matrix. An embedding of its own
        stays dense, unless blocks are kept."""
        embedding, head = model.embed_tokens, model.lm_head
        assert isinstance(embedding, Embedding) and isinstance(head, Linear)
        k = embedding.weight.shape[1]
        if head_part is None or (self._quantization in ("gguf", "stored") and source is not None):
            matrix = self._table(embedding.weight, embedding_part, source)
            if matrix is not None:
                model.embed_tokens = StoredEmbedding(matrix, k, self._dtype)
                if head_part is None:
                    model.lm_head = StoredLinear(matrix)
        else:
            self._fill(embedding.weight, [embedding_part], source)
        if head_part is not None:
            matrix = self._table(head.weight, head_part, source)
            if matrix is not None:
                model.lm_head = StoredLinear(matrix, None if head.bias is None else head.bias.detach().to(self.device))

    def pack_embedding(self, model: Tables, part: Part, source: WeightSource | None, *, tied: bool) -> None:
        raise NotImplementedError("stages compute on CPUs")

    def pack_head(self, model: Tables, part: Part, source: WeightSource | None) -> None:
        raise NotImplementedError("stages compute on CPUs")

    def fuse_heads_and_norms(self, model: Decoder) -> None:
        """What is no matrix, to the device."""
        for module in model.modules():
            if isinstance(module, Router):
                module.use(route)
        model.to(self.device)

    def _table(self, weight: torch.Tensor, part: Part, source: WeightSource | None) -> Matrix | None:
        """None: it stays dense, and is filled."""
        runs = self._encoded(weight, [part], source, HEAD_FORMAT)
        if runs is None or runs[0].format is Format.BFLOAT16:
            if runs is not None and runs[0].rows.data_ptr() != weight.data_ptr():
                weight.copy_(runs[0].rows)
            return None
        return self._matrix(runs[0])

    def _left(self, layer: Linear, runs: Sequence[Rows] | None) -> Linear:
        if runs is not None and runs[0].rows.data_ptr() != layer.weight.data_ptr():
            torch.cat([run.rows for run in runs], out=layer.weight.data)
        return layer.to(self.device)

    def _matrix(self, run: Rows) -> Matrix:
        """On the device."""
        if run.format is Format.BFLOAT16:
            return Matrix(run.rows.to(self.device, self._dtype), None, DENSE)
        if run.rows.dtype == torch.uint8:
            made = device_layouts.arranged(run)
        else:
            made = device_layouts.MADE[run.format](run.rows)
        assert made.scales is not None
        return Matrix(made.levels.to(self.device), made.scales.to(self.device), made.format)
