"""A quantised Hugging Face checkpoint under the names of the unquantised one: each matrix dequantised when it is read,
or in blocks that run packed."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from engine.errors import WeightsError
from engine.models.quantization import StoredFormat
from engine.sizes import size_text
from engine.weights import block_floats
from engine.weights.code_tables import dequantize_codes, dequantize_int4_sums, nested_scales
from engine.weights.group_integers import GroupIntegers
from engine.weights.integer_layouts import (
    awq_integers,
    gptq_integers,
    int8_integers,
    llm_int8_integers,
    packed_integers,
)
from engine.weights.safetensors_source import SafetensorsSource
from engine.weights.source import EncodedRows
from engine.weights.stored_matrices import WHOLE_NUMBERS, Kind, StoredMatrix, stored_matrices, tensor_name

logger = logging.getLogger(__name__)

_READERS = {
    Kind.GPTQ: gptq_integers,
    Kind.AWQ: awq_integers,
    Kind.PACKED: packed_integers,
    Kind.INT8: int8_integers,
    Kind.LLM_INT8: llm_int8_integers,
}
_ASKED_FOR = "packed layers need 16 bits, a form that the device packs, and quantization='auto'"
_DENSE = {
    Kind.EXPERTS: "experts together",
    Kind.FLOAT8_WIDE: "no kernel multiplies e5m2",
    Kind.CODES: "no kernel multiplies codes of a table",
    Kind.INT4_SUMS: "what is added to 4 bits is no zero point",
}


class QuantizedSource:
    """`source`: of the checkpoint's tensors, and closed with this one.

    Raises WeightsError where tensors of a matrix are missing or do not fit each other, naming tensor and file; where
    their values mean nothing, when they are read.
    """

    def __init__(self, source: SafetensorsSource, stored: StoredFormat) -> None:
        self._source, self._stored = source, stored
        try:
            matrices, used = stored_matrices(source.headers(), stored, lambda name: source.integers(name).tolist())
        except BaseException:
            source.__exit__()
            raise
        self._matrices = {matrix.name: matrix for matrix in matrices}
        self._shapes = {name: shape for name, shape in source.shapes().items() if name not in used}
        self._shapes |= {name: matrix.shape for name, matrix in self._matrices.items()}
        self._dense: dict[str, set[str]] = defaultdict(set)
        """matrices that were not kept packed, by the reason"""
        self._packed: set[str] = set()
        self._dtype: torch.dtype | None = None
        """to which they were dequantised"""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def file_of(self, name: str) -> str:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._source.file_of(name)
        starts = (f"{matrix.prefix}.", f"{matrix.prefix}_")
        return self._source.file_of(next(each for each in self._source.shapes() if each.startswith(starts)))

    def read_into(self, name: str, destination: Tensor, expert: int | None = None) -> None:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._source.read_into(name, destination, expert)
        self._packed.discard(name)
        self._dtype = destination.dtype
        if not any(name in names for names in self._dense.values()):
            self._dense[_ASKED_FOR].add(name)
        if matrix.kind in WHOLE_NUMBERS:
            self._integers(matrix).dequantize_into(destination)
        elif matrix.kind in (Kind.FLOAT8, Kind.FLOAT8_WIDE):
            block_floats.dequantize_float8(*self._float8(matrix), self._stored.block, destination)
        elif matrix.kind is Kind.NVFP4:
            block_floats.dequantize_nvfp4(*self._nvfp4(matrix), destination)
        elif matrix.kind is Kind.MXFP4:
            block_floats.dequantize_mxfp4(*self._mxfp4(matrix), destination)
        elif matrix.kind is Kind.CODES:
            self._codes(matrix, destination)
        elif matrix.kind is Kind.INT4_SUMS:
            factors, added = self._finite(matrix, "._weight_scale"), self._finite(matrix, "._weight_zero_point")
            dequantize_int4_sums(self._tensor(matrix, "._weight_qdata"), factors, added, destination)
        else:
            self._experts(matrix, destination, expert)
        return None

    def mapped(self, name: str, expert: int | None = None) -> Tensor | None:
        return None if name in self._matrices else self._source.mapped(name, expert)

    def encoded(self, name: str, expert: int | None = None) -> EncodedRows | None:
        matrix = self._matrices.get(name)
        if matrix is None:
            return None
        found: EncodedRows | str
        if matrix.kind in WHOLE_NUMBERS:
            found = self._integers(matrix).encoded()
        elif matrix.kind is Kind.FLOAT8:
            found = block_floats.encoded_float8(*self._float8(matrix), self._stored.block)
        elif matrix.kind is Kind.NVFP4:
            found = block_floats.encoded_nvfp4(*self._nvfp4(matrix))
        elif matrix.kind is Kind.MXFP4:
            found = block_floats.encoded_mxfp4(*self._mxfp4(matrix))
        elif matrix.kind is Kind.EXPERTS and expert is not None:
            found = block_floats.encoded_mxfp4(*self._expert_blocks(matrix, expert))
        else:
            found = _DENSE[matrix.kind]
        if isinstance(found, EncodedRows):
            self._packed.add(name)
            return found
        self._dense[found].add(name)
        return None

    def _integers(self, matrix: StoredMatrix) -> GroupIntegers:
        return _READERS[matrix.kind](self._source, matrix, self._stored)

    def _nvfp4(self, matrix: StoredMatrix) -> tuple[Tensor, Tensor, Tensor]:
        packed, scale = self._tensor(matrix, ".weight_packed"), self._finite(matrix, ".weight_scale")
        return packed, scale, self._finite(matrix, ".weight_global_scale", divides=True)

    def _mxfp4(self, matrix: StoredMatrix) -> tuple[Tensor, Tensor]:
        return self._tensor(matrix, ".weight_packed"), self._powers(matrix, ".weight_scale")

    def _float8(self, matrix: StoredMatrix) -> tuple[Tensor, Tensor]:
        inverse = f"{matrix.prefix}.weight_scale_inv" in self._source.shapes()
        name = tensor_name(self._stored, "", "weight_scale")
        ending = ".weight_scale_inv" if inverse else name
        if self._tensor(matrix, ending).dtype is torch.uint8:  # exponents, as F8_E8M0 are
            scale = block_floats.powers(self._powers(matrix, ending))
        else:
            scale = self._finite(matrix, ending)
        return self._tensor(matrix, tensor_name(self._stored, "", "weight")), scale

    def _codes(self, matrix: StoredMatrix, destination: Tensor) -> None:
        state = matrix.codes
        assert state is not None
        if state.nested_blocksize is None:
            absmax = self._finite(matrix, ".weight.absmax")
        else:
            table, scales = (self._finite(matrix, f".weight.nested_{part}") for part in ("quant_map", "absmax"))
            codes = self._tensor(matrix, ".weight.absmax")
            absmax = nested_scales(codes, table, scales, state.nested_blocksize, state.nested_offset)
        table = self._finite(matrix, ".weight.quant_map")
        dequantize_codes(self._tensor(matrix, ".weight"), table, absmax, state.blocksize, destination)

    def _experts(self, matrix: StoredMatrix, destination: Tensor, expert: int | None) -> None:
        """[experts, inputs, outputs], of blocks that go along the inputs; or one of them."""
        _, k, n = matrix.shape
        rows = torch.empty(n, k)
        places = enumerate(destination) if expert is None else [(expert, destination)]
        for index, place in places:
            block_floats.dequantize_mxfp4(*self._expert_blocks(matrix, index), rows)
            place.copy_(rows.T)

    def _expert_blocks(self, matrix: StoredMatrix, expert: int) -> tuple[Tensor, Tensor]:
        """uint8 [outputs, inputs / 2] and [outputs, inputs / 32]."""
        blocks = self._source.tensor(f"{matrix.prefix}_blocks", expert)
        return blocks.flatten(1), self._powers(matrix, "_scales", expert)

    def _tensor(self, matrix: StoredMatrix, ending: str) -> Tensor:
        return self._source.tensor(matrix.prefix + ending)

    def _finite(self, matrix: StoredMatrix, ending: str, *, divides: bool = False) -> Tensor:
        """`divides`: weights are divided by it, so it is not zero."""
        name = matrix.prefix + ending
        scale = self._source.tensor(name)
        if not bool(scale.float().isfinite().all()) or (divides and not bool(scale.float().all())):
            raise WeightsError(f"{self._source.file_of(name)}: tensor {name} holds scales that are not finite")
        return scale

    def _powers(self, matrix: StoredMatrix, ending: str, expert: int | None = None) -> Tensor:
        name = matrix.prefix + ending
        scale = self._source.tensor(name, expert)
        if not block_floats.is_finite_e8m0(scale):
            raise WeightsError(f"{self._source.file_of(name)}: tensor {name} holds 255, which is no power of two")
        return scale

    def _report(self) -> None:
        """In the log: what became of the matrices that were read."""
        method = self._stored.method
        if self._packed:
            logger.info("%s: %d matrices run packed, as they are stored", method, len(self._packed))
        for reason, names in self._dense.items():
            if self._dtype is None:
                continue
            size = size_text(sum(prod(self._matrices[name].shape) for name in names) * self._dtype.itemsize)
            level = logging.INFO if reason is _ASKED_FOR else logging.WARNING
            dtype = str(self._dtype).removeprefix("torch.")
            logger.log(
                level, "%s: %d matrices were dequantised (%s): %s as %s", method, len(names), reason, size, dtype
            )

    def __enter__(self) -> QuantizedSource:
        return self

    def __exit__(self, *error: object) -> None:
        if not any(error):
            self._report()
        self._source.__exit__(*error)
