"""Which format each matrix of a model is packed in, and its rows in it: what packers of CPUs and of GPUs share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.config import Quantization
from engine.cpu_kernels.formats import IN_EIGHT_BITS, Format, bits_of
from engine.weights.as_q8_0 import as_q8_0
from engine.weights.source import EncodedRows, Part, WeightSource

MATRIX_FORMAT = {"none": Format.BFLOAT16, "int8": Format.INT8, "int4": Format.Q4_1, "fp8": Format.FLOAT8}
"""what becomes of a matrix that is not stored in as few bits"""
HEAD_FORMAT = {"none": Format.BFLOAT16, "int8": Format.INT8, "int4": Format.INT8, "fp8": Format.INT8}
"""of the unembedding, and of the embedding that shares its rows: both are sensitive, and 4 bits would show"""
_MOST_BITS = {Format.BFLOAT16: 16.0, Format.INT8: 8.5, Format.Q4_1: 5.0, Format.FLOAT8: 8.5}
"""of a weight as a checkpoint has it, which is kept rather than made into that format"""


class Rows(EncodedRows):
    """The same, or dense [n, k], which the format is then made of."""

    def goes_with(self, other: Rows) -> bool:
        if self.format is not other.format or self.rows.dtype != other.rows.dtype:  # dense, or encoded already
            return False
        if self.order is None or other.order is None:
            return self.order is other.order
        return torch.equal(self.order, other.order)


class RowsPacker:
    """`quantization`: "gguf" and "stored" keep what the checkpoint has encoded, "int8", "int4" and "fp8" what it
    has in no more bits. `dtype`: of what is not quantised. `device`: where packed matrices lie."""

    def __init__(self, quantization: Quantization, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._quantization = quantization
        self._dtype = dtype

    def _possible(self, n: int, k: int, format: Format) -> bool:
        """Whether a matrix [n, k] can be packed so."""
        raise NotImplementedError

    def _takes(self, run: Rows, k: int) -> bool:
        return self._possible(run.rows.shape[0], k, run.format)

    def _one_run(self, weight: torch.Tensor, parts: Sequence[Part], source: WeightSource | None) -> Rows:
        runs = self._encoded(weight, parts, source, MATRIX_FORMAT)
        assert runs is not None  # whoever calls has seen that bfloat16 is possible
        run = self._as_one(runs, weight, parts, source)
        return run if run.order is None else self._surely_made(weight, parts, source)

    def _as_one(
        self, runs: list[Rows], weight: torch.Tensor, parts: Sequence[Part], source: WeightSource | None
    ) -> Rows:
        """Made anew where gate and up are encoded differently, and could not share a panel."""
        return runs[0] if len(runs) == 1 else self._surely_made(weight, parts, source)

    def _surely_made(self, weight: torch.Tensor, parts: Sequence[Part], source: WeightSource | None) -> Rows:
        run = self._made(weight, parts, source, MATRIX_FORMAT)
        assert run is not None  # whoever calls has seen that bfloat16 is possible
        return run

    def _encoded(
        self,
        weight: torch.Tensor,
        parts: Sequence[Part],
        source: WeightSource | None,
        formats: dict[str, Format],
    ) -> list[Rows] | None:
        """Runs of rows of one format; None where not even bfloat16 can be packed (then `weight` is filled)."""
        k = weight.shape[1]
        wanted = formats.get(self._quantization, Format.BFLOAT16)
        kept = [] if source is None else [self._kept(part, k, source, wanted) for part in parts]
        if source is not None and any(run is not None for run in kept):
            runs: list[Rows] = []
            for part, found in zip(parts, kept, strict=True):
                run = self._rows_of(part, k, source, wanted) if found is None else found
                if runs and runs[-1].goes_with(run):
                    run = Rows(run.format, torch.cat((runs.pop().rows, run.rows)), run.order)
                runs.append(run)
            runs = _as_eight_bits(runs)
            if all(self._takes(run, k) for run in runs):
                return runs
        made = self._made(weight, parts, source, formats)
        return None if made is None else [made]

    def _made(
        self, weight: torch.Tensor, parts: Sequence[Part], source: WeightSource | None, formats: dict[str, Format]
    ) -> Rows | None:
        """All of it, decoded, in the format that is asked for, or in bfloat16; None where not even that is possible."""
        self._fill(weight, parts, source)
        for format in (formats.get(self._quantization, Format.BFLOAT16), Format.BFLOAT16):
            if self._possible(weight.shape[0], weight.shape[1], format):
                return Rows(format, weight.detach())
        return None

    def _kept(self, part: Part, k: int, source: WeightSource, wanted: Format) -> Rows | None:
        """As it is stored, or where that cannot be packed in eight bits that hold the same; None: that is in more bits
        than `wanted` has."""
        found = None if self._quantization == "none" else source.encoded(part.name, part.expert)
        if found is None:
            return None
        run = Rows(found.format, found.rows, found.order)
        if run.format in IN_EIGHT_BITS and not self._takes(run, k):
            widened = as_q8_0(run.format, run.rows)
            run = run if widened is None else Rows(Format.Q8_0, widened)
        return None if bits_of(run.format) > _MOST_BITS[wanted] else run

    def _rows_of(self, part: Part, k: int, source: WeightSource, wanted: Format) -> Rows:
        dense = torch.empty(part.rows, k, dtype=self._dtype)
        source.read_into(part.name, dense, part.expert)
        return Rows(wanted, dense)

    def _fill(self, weight: torch.Tensor, parts: Sequence[Part], source: WeightSource | None) -> None:
        first = 0
        for part in parts if source is not None else ():
            assert source is not None
            source.read_into(part.name, weight[first : first + part.rows], part.expert)
            first += part.rows

    def _fill_experts(self, weights: torch.Tensor, parts: Sequence[Part], source: WeightSource | None) -> None:
        each = len(parts) // len(weights)
        for expert, weight in enumerate(weights):
            self._fill(weight, parts[each * expert : each * (expert + 1)], source)


def _as_eight_bits(runs: list[Rows]) -> list[Rows]:
    """As one, where all are Q8_0 or what that holds exactly: a few more bits cost less than products of their own."""
    if len(runs) == 1 or any(run.order is not None for run in runs):
        return runs
    rows = [as_q8_0(run.format, run.rows) for run in runs]
    widened = [each for each in rows if each is not None]
    return runs if len(widened) < len(runs) else [Rows(Format.Q8_0, torch.cat(widened))]
