"""Which matrices a quantised checkpoint holds, told from names, shapes and types of its tensors alone: without torch,
so that plans can be made of a checkpoint that is not loaded.

Sources of the layouts: AutoGPTQ's and GPTQModel's `QuantLinear`, AutoAWQ's `WQLinear_GEMM`, the compressors of
compressed-tensors, DeepSeek-V3's `weight_dequant`, transformers' `integrations/mxfp4.py`, bitsandbytes' `QuantState`
and `Int8Params`, torchao's `flatten_tensor_state_dict` with `Int8Tensor`, `IntxUnpackedToInt8Tensor`, `Float8Tensor`
and `Int4Tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import isfinite, prod
from typing import Annotated

import msgspec

from engine.errors import WeightsError
from engine.models.bounds import QUANT_STATE_BYTES
from engine.models.quantization import StoredFormat

_WORD_BITS = 32
_WHOLE = ("I8", "U8", "I32", "I64")
_FLOATING = ("F16", "BF16", "F32")
_E5M2 = "F8_E5M2"
_FLOAT8 = ("F8_E4M3", _E5M2)
_EXPONENTS = ("U8", "F8_E8M0")
_CALIBRATION = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".input_scale_ub",
    "activation_scale",
    ".input_g_idx",
    ".output_scale",
    ".output_zero_point",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".k_zero_point",
    ".v_zero_point",
)
"""of activations, which run in 16 bits or are quantised as they come, and of the KV cache"""


class Kind(Enum):
    """How the tensors of a module make its weight; values for messages."""

    GPTQ = "qweight [k / 8, n]"
    AWQ = "qweight [k, n / 8]"
    PACKED = "weight_packed, whole numbers"
    INT8 = "weight, int8"
    FLOAT8_WIDE = "weight, e5m2 with scales"
    FLOAT8 = "weight, float8"
    NVFP4 = "weight_packed, e2m1 with scales in e4m3"
    MXFP4 = "weight_packed, e2m1 with scales in e8m0"
    EXPERTS = "blocks and scales of experts"
    LLM_INT8 = "weight, int8, and the largest magnitude of each output"
    CODES = "weight, numbers of a table's values"
    INT4_SUMS = "_weight_qdata, int4 with what is added to their products"


WHOLE_NUMBERS = frozenset({Kind.GPTQ, Kind.AWQ, Kind.PACKED, Kind.INT8, Kind.LLM_INT8})
"""with a scale, and perhaps a zero point"""


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    file: str


class CodeState(msgspec.Struct, frozen=True):
    """What bitsandbytes notes of a matrix, as JSON in a tensor of bytes."""

    shape: tuple[Annotated[int, msgspec.Meta(gt=0)], Annotated[int, msgspec.Meta(gt=0)]]
    blocksize: Annotated[int, msgspec.Meta(gt=0, le=2**20)]
    """weights, row after row, that share a scale"""
    nested_blocksize: Annotated[int, msgspec.Meta(gt=0, le=2**20)] | None = None
    """of those, which are then codes themselves"""
    nested_offset: float = 0.0

    @property
    def blocks(self) -> int:
        return -(-prod(self.shape) // self.blocksize)

    def parts(self) -> list[tuple[str, str, int]]:
        """What belongs to the codes: name, type, size."""
        parts = [("quant_map", "F32", 16)]
        if self.nested_blocksize is None:
            return [*parts, ("absmax", "F32", self.blocks)]
        nested = -(-self.blocks // self.nested_blocksize)
        return [
            *parts,
            ("absmax", "U8", self.blocks),
            ("nested_absmax", "F32", nested),
            ("nested_quant_map", "F32", 256),
        ]

    @classmethod
    def read(cls, numbers: Sequence[int]) -> CodeState | None:
        """None: it is none."""
        try:
            found = msgspec.json.decode(bytes(numbers), type=cls)
        except (msgspec.DecodeError, ValueError):
            return None
        return found if isfinite(found.nested_offset) else None


@dataclass(frozen=True)
class StoredMatrix:
    """`shape`: of the weight that it stands for, [outputs, inputs]; of experts [experts, inputs, outputs]."""

    name: str
    kind: Kind
    prefix: str
    """of the names of its tensors"""
    shape: tuple[int, ...]
    bits: int
    groups: int
    """along the inputs, which share a scale"""
    group: int
    """inputs of one, of the last perhaps fewer"""
    has_zeros: bool
    """may have zero points that are not in the middle"""
    codes: CodeState | None = None


def tensor_name(stored: StoredFormat, prefix: str, part: str) -> str:
    """Of a part that most call weight, weight_scale or weight_zero_point."""
    if stored.layout == "torchao":
        part = "_weight_qdata" if part == "weight" else f"_{part}"
    return f"{prefix}.{part}"


Headers = Mapping[str, Header]
Integers = Callable[[str], Sequence[int]]
"""what a small tensor of whole numbers holds"""


def stored_matrices(headers: Headers, stored: StoredFormat, integers: Integers) -> tuple[list[StoredMatrix], set[str]]:
    """The quantised matrices, and the names of all tensors that are theirs, or belong to activations.

    Raises WeightsError naming tensor, file, what was expected and what was found.
    """
    reader = _Reader(headers, stored, integers)
    matrices = list(reader.matrices())
    used = reader.used | {name for name in headers if name.endswith(_CALIBRATION)}
    return matrices, used


class _Reader:
    def __init__(self, headers: Headers, stored: StoredFormat, integers: Integers) -> None:
        self._headers, self._stored, self._integers = headers, stored, integers
        self.used: set[str] = set()

    def matrices(self) -> Iterator[StoredMatrix]:
        for name, header in self._headers.items():
            prefix, _, kind = name.rpartition(".")
            layout = self._stored.layout
            if kind == "qweight" and layout in ("gptq", "awq"):
                yield self._gptq(prefix) if layout == "gptq" else self._awq(prefix)
            elif kind == "weight_packed" and layout == "compressed-tensors":
                yield self._packed(prefix) if header.dtype == "I32" else self._four_bit_floats(prefix)
            elif layout == "bitsandbytes":
                if kind == "weight" and header.dtype == "I8":
                    yield self._llm_int8(prefix)
                elif kind == "weight" and header.dtype == "U8":
                    yield self._codes(prefix)
            elif name == tensor_name(self._stored, prefix, "weight") and header.dtype == "I8":
                added = self._headers.get(tensor_name(self._stored, prefix, "weight_zero_point"))
                is_sums = layout == "torchao" and added is not None and added.dtype in _FLOATING
                yield self._int4_sums(prefix) if is_sums else self._int8(prefix)
            elif name == tensor_name(self._stored, prefix, "weight") and header.dtype in _FLOAT8:
                yield self._float8(prefix)
            elif name.endswith("_blocks") and header.dtype == "U8" and layout == "mxfp4":
                yield self._experts(name.removesuffix("_blocks"))

    def _gptq(self, prefix: str) -> StoredMatrix:
        words, n = self._sizes(f"{prefix}.qweight", 2, ("I32",))
        groups = self._sizes(f"{prefix}.scales", 2, _FLOATING)[0]
        zero_words = self._sizes(f"{prefix}.qzeros", 2, ("I32",))[1]
        bits = self._bits(f"{prefix}.qzeros", zero_words * _WORD_BITS, n)
        k = words * _WORD_BITS // bits
        self._expect(f"{prefix}.scales", (groups, n))
        self._expect(f"{prefix}.qzeros", (groups, zero_words))
        self._optional(f"{prefix}.g_idx", (k,), ("I32", "I64"))
        zeros = not self._stored.symmetric
        return self._matrix(Kind.GPTQ, prefix, n, k, bits, groups, zeros)

    def _awq(self, prefix: str) -> StoredMatrix:
        k, words = self._sizes(f"{prefix}.qweight", 2, ("I32",))
        groups, n = self._sizes(f"{prefix}.scales", 2, _FLOATING)
        bits = self._bits(f"{prefix}.qweight", words * _WORD_BITS, n)
        if bits != 4:
            raise self._wrong(f"{prefix}.qweight", f"[k, {n // 8}], 4 bits for each of the {n} outputs of its scales")
        self._sizes(f"{prefix}.qzeros", 2, ("I32",))
        self._expect(f"{prefix}.qzeros", (groups, words))
        return self._matrix(Kind.AWQ, prefix, n, k, bits, groups, not self._stored.symmetric)

    def _packed(self, prefix: str) -> StoredMatrix:
        name = f"{prefix}.weight_packed"
        n, words = self._sizes(name, 2, ("I32",))
        self._sizes(f"{prefix}.weight_shape", 1, ("I32", "I64"))
        self._expect(f"{prefix}.weight_shape", (2,))
        rows, k = self._integers(f"{prefix}.weight_shape")
        fitting = [bits for bits in (4, 8) if -(-k * bits // _WORD_BITS) == words]
        if rows != n or k < 1 or not fitting:
            raise self._wrong(name, f"the {rows} × {k} numbers of its weight_shape in 4 or 8 bits")
        bits = fitting[0]
        groups = self._scale_groups(f"{prefix}.weight_scale", n, _FLOATING)
        zero = f"{prefix}.weight_zero_point"
        zeros = self._optional(zero, (-(-n * bits // _WORD_BITS), groups), ("I32",))
        self._optional(f"{prefix}.weight_g_idx", (k,), ("I32", "I64"))
        return self._matrix(Kind.PACKED, prefix, n, k, bits, groups, zeros)

    def _int8(self, prefix: str) -> StoredMatrix:
        name, scale, zero = (
            tensor_name(self._stored, prefix, part) for part in ("weight", "weight_scale", "weight_zero_point")
        )
        n, k = self._sizes(name, 2, ("I8",))
        groups = self._scale_groups(scale, n, _FLOATING)
        zeros = zero in self._headers
        if zeros:
            self._sizes(zero, None, _WHOLE)
            self._expect(zero, self._headers[scale].shape)
        return self._matrix(Kind.INT8, prefix, n, k, 8, groups, zeros)

    def _float8(self, prefix: str) -> StoredMatrix:
        n, k = self._sizes(tensor_name(self._stored, prefix, "weight"), 2, _FLOAT8)
        inverse = f"{prefix}.weight_scale_inv"
        name = inverse if inverse in self._headers else tensor_name(self._stored, prefix, "weight_scale")
        shape = self._sizes(name, None, (*_FLOATING, *_EXPONENTS))
        high, wide = self._stored.block
        one = all(size == 1 for size in shape)
        if not one and shape not in ((n,), (n, 1), (-(-n // high), -(-k // wide))):
            raise self._wrong(name, f"one scale, {n}, or one for {high} × {wide} weights of {n} × {k}")
        is_wide = self._headers[tensor_name(self._stored, prefix, "weight")].dtype == _E5M2
        whole = self._matrix(Kind.FLOAT8_WIDE if is_wide else Kind.FLOAT8, prefix, n, k, 8, 1, False)
        return whole if one or len(shape) == 1 or shape[1] == 1 else replace(whole, groups=shape[1], group=wide)

    def _four_bit_floats(self, prefix: str) -> StoredMatrix:
        n, half = self._sizes(f"{prefix}.weight_packed", 2, ("U8",))
        total = f"{prefix}.weight_global_scale"
        is_nvfp4 = total in self._headers
        group = 16 if is_nvfp4 else 32
        self._sizes(f"{prefix}.weight_scale", 2, ("F8_E4M3",) if is_nvfp4 else _EXPONENTS)
        self._expect(f"{prefix}.weight_scale", (n, 2 * half // group))
        if is_nvfp4 and any(size != 1 for size in self._sizes(total, None, _FLOATING)):
            raise self._wrong(total, "one number")
        if 2 * half % group:
            raise self._wrong(f"{prefix}.weight_packed", f"[n, k / 2] with k a multiple of {group}")
        kind = Kind.NVFP4 if is_nvfp4 else Kind.MXFP4
        return self._matrix(kind, prefix, n, 2 * half, 4, 2 * half // group, False)

    def _experts(self, prefix: str) -> StoredMatrix:
        experts, n, groups, half = self._sizes(f"{prefix}_blocks", 4, ("U8",))
        if half != 16:
            raise self._wrong(f"{prefix}_blocks", "[experts, outputs, groups, 16]")
        self._sizes(f"{prefix}_scales", 3, _EXPONENTS)
        self._expect(f"{prefix}_scales", (experts, n, groups))
        return StoredMatrix(prefix, Kind.EXPERTS, prefix, (experts, 32 * groups, n), 4, groups, 32, False)

    def _llm_int8(self, prefix: str) -> StoredMatrix:
        n, k = self._sizes(f"{prefix}.weight", 2, ("I8",))
        self._sizes(f"{prefix}.SCB", 1, _FLOATING)
        self._expect(f"{prefix}.SCB", (n,))
        name = f"{prefix}.weight_format"
        if name in self._headers:
            self._sizes(name, None, ("U8",))
        return self._matrix(Kind.LLM_INT8, prefix, n, k, 8, 1, False)

    def _codes(self, prefix: str) -> StoredMatrix:
        name = f"{prefix}.weight"
        count = prod(self._sizes(name, None, ("U8",)))
        states = (each for each in self._headers if each.startswith(f"{name}.quant_state.bitsandbytes__"))
        state = next(states, None)
        if state is None:
            raise WeightsError(f"{self._headers[name].file}: tensor {name} is U8, and its quant_state is missing")
        if self._sizes(state, 1, ("U8",))[0] > QUANT_STATE_BYTES:
            raise self._wrong(state, f"at most {QUANT_STATE_BYTES} bytes")
        told = CodeState.read(self._integers(state))
        if told is None:
            raise WeightsError(f"{self._headers[state].file}: tensor {state} is no state of a quantised matrix")
        (n, k), blocks = told.shape, told.blocks
        if count != -(-n * k // 2):
            raise self._wrong(name, f"two of {n} × {k} weights to a byte")
        for part, kind, size in told.parts():
            self._sizes(f"{name}.{part}", 1, (kind,))
            self._expect(f"{name}.{part}", (size,))
        return StoredMatrix(name, Kind.CODES, prefix, (n, k), 4, blocks, told.blocksize, False, told)

    def _int4_sums(self, prefix: str) -> StoredMatrix:
        name, scale, added = (f"{prefix}._weight_{part}" for part in ("qdata", "scale", "zero_point"))
        n, half = self._sizes(name, 2, ("I8",))
        groups, _ = self._sizes(scale, 2, _FLOATING)
        if n < 1 or groups < 1 or half < 1 or 2 * half % groups:
            raise self._wrong(scale, f"groups of equal size of {2 * half} inputs")
        for each in (scale, added):
            self._sizes(each, 2, _FLOATING)
            self._expect(each, (groups, n))
        group = 2 * half // groups
        return StoredMatrix(f"{prefix}.weight", Kind.INT4_SUMS, prefix, (n, 2 * half), 4, groups, group, False)

    def _matrix(self, kind: Kind, prefix: str, n: int, k: int, bits: int, groups: int, has_zeros: bool) -> StoredMatrix:
        if n < 1 or k < 1:
            name = next(each for each in self._headers if each.startswith(f"{prefix}.") and each in self.used)
            raise self._wrong(name, "a matrix that is not empty")
        group = self._stored.group_size or k if kind in (Kind.GPTQ, Kind.AWQ) else None
        if group is None or -(-k // group) != groups:
            if groups < 1 or k % groups:
                named = kind in (Kind.GPTQ, Kind.AWQ)
                scales = f"{prefix}.scales" if named else tensor_name(self._stored, prefix, "weight_scale")
                raise self._wrong(scales, f"groups of {group or 'equal size'} of {k} inputs")
            group = k // groups
        return StoredMatrix(f"{prefix}.weight", kind, prefix, (n, k), bits, groups, min(group, k), has_zeros)

    def _scale_groups(self, name: str, n: int, dtypes: tuple[str, ...]) -> int:
        """How many scales an output has, which may share one."""
        shape = self._sizes(name, None, dtypes)
        if shape in ((), (1,), (n,)):
            return 1
        if len(shape) != 2 or shape[0] not in (1, n) or (shape[0] != n and shape[1] != 1):
            raise self._wrong(name, f"one scale, or [{n}, groups]")
        return shape[1]

    def _bits(self, name: str, stored_bits: int, outputs: int) -> int:
        bits = stored_bits // outputs if outputs else 0
        if bits not in (4, 8) or bits * outputs != stored_bits:
            raise self._wrong(name, f"4 or 8 bits for each of {outputs} outputs")
        return bits

    def _sizes(self, name: str, dimensions: int | None, dtypes: tuple[str, ...]) -> tuple[int, ...]:
        header = self._headers.get(name)
        if header is None:
            module = name.rpartition(".")[0] + "."
            beside = (header.file for other, header in self._headers.items() if other.startswith(module))
            file = next(beside, next(iter(self._headers.values())).file)  # a module without a name has nothing beside
            raise WeightsError(f"{file}: tensor {name} is missing, without which the weights beside it mean nothing")
        self.used.add(name)
        if header.dtype not in dtypes:
            raise WeightsError(
                f"{header.file}: tensor {name} is stored as {header.dtype}, expected {' or '.join(dtypes)}"
            )
        if dimensions is not None and len(header.shape) != dimensions:
            raise self._wrong(name, f"{dimensions} dimensions")
        return header.shape

    def _optional(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> bool:
        if name not in self._headers:
            return False
        self._sizes(name, len(shape), dtypes)
        self._expect(name, shape)
        return True

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        if self._headers[name].shape != shape:
            raise self._wrong(name, str(shape))

    def _wrong(self, name: str, expected: str) -> WeightsError:
        header = self._headers[name]
        return WeightsError(f"{header.file}: tensor {name} has shape {header.shape}, expected {expected}")
