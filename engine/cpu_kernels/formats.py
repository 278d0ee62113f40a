"""The formats of packed weights and the size of their panels, which `csrc/linear.h` lays out, and of rows on a GPU."""

from __future__ import annotations

from enum import IntEnum

PANEL = 32
"""outputs that are packed together"""


class Format(IntEnum):
    """How weights are packed; numbers as in `csrc/linear.h`."""

    BFLOAT16 = 0
    INT8 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 4
    Q4_K = 5
    Q6_K = 6
    INT4_GROUP = 7
    """4 bits with a zero point, exact: what GPTQ, AWQ and compressed-tensors hold"""
    MXFP4 = 8
    """e2m1 with a power of two for 32 inputs"""
    NVFP4 = 9
    """e2m1 with an e4m3 for 16 inputs, and a float32 for an output that divides those"""
    FLOAT8 = 10
    """e4m3 with a float32 for an output (also what --quantization fp8 makes)"""
    FLOAT8_BLOCK = 11
    """e4m3 with a float32 for 128 inputs of an output"""
    Q5_0 = 12
    Q5_1 = 13
    Q5_K = 14
    Q3_K = 15
    Q2_K = 16
    IQ4_NL = 17
    IQ4_XS = 18
    FLOAT32 = 19
    """of routers; outputs are not rounded"""


FORMAT_OF_GGUF: dict[int, Format] = {
    2: Format.Q4_0,
    3: Format.Q4_1,
    6: Format.Q5_0,
    7: Format.Q5_1,
    8: Format.Q8_0,
    10: Format.Q2_K,
    11: Format.Q3_K,
    12: Format.Q4_K,
    13: Format.Q5_K,
    14: Format.Q6_K,
    20: Format.IQ4_NL,
    23: Format.IQ4_XS,
    39: Format.MXFP4,
}
"""keys: values of gguf.GGMLQuantizationType, whose members find them too; the library need not be imported for it"""
_GROUPS: dict[Format, tuple[int, int]] = {
    Format.Q4_0: (32, 576),
    Format.Q4_1: (32, 640),
    Format.Q8_0: (32, 1088),
    Format.Q4_K: (256, 4736),
    Format.Q6_K: (256, 6720),
    Format.INT4_GROUP: (32, 640),
    Format.Q5_0: (32, 704),
    Format.Q5_1: (32, 768),
    Format.Q5_K: (256, 5760),
    Format.Q3_K: (256, 3648),
    Format.Q2_K: (256, 2688),
    Format.IQ4_NL: (32, 576),
    Format.IQ4_XS: (256, 4416),
    Format.MXFP4: (64, 1088),
    Format.NVFP4: (32, 576),
    Format.FLOAT8: (4, 128),
    Format.FLOAT8_BLOCK: (128, 4224),
}
"""inputs of a group, bytes of it in a panel"""
_TAILS = {Format.NVFP4: 128, Format.FLOAT8: 128}
"""bytes behind all groups of a panel"""
_DEVICE_GROUPS: dict[Format, tuple[int, int]] = {
    Format.Q4_0: (32, 18),
    Format.Q4_1: (32, 20),
    Format.Q8_0: (32, 34),
    Format.Q4_K: (256, 148),
    Format.Q6_K: (256, 210),
    Format.INT4_GROUP: (32, 20),
    Format.FLOAT8: (32, 32),
    Format.FLOAT8_BLOCK: (128, 132),
}
"""inputs of a group, bytes of it in a row of `engine.weights.device_layouts`"""
IN_EIGHT_BITS = frozenset({Format.Q5_0, Format.IQ4_NL, Format.MXFP4})
"""whose values Q8_0 holds, too; it runs where these have no kernel"""
_INPUTS_AT_ONCE = {Format.BFLOAT16: 2, Format.INT8: 4, Format.FLOAT32: 1} | {
    format: inputs for format, (inputs, _) in _GROUPS.items()
}


def packable(n: int, k: int, format: Format) -> bool:
    """Whether a matrix [n, k] can be packed so: any n, and k a multiple of what the format takes together."""
    return n > 0 and k > 0 and k % _INPUTS_AT_ONCE[format] == 0


def packed_bytes(n: int, k: int, format: Format) -> int:
    """Of a matrix [n, k] that `packable` allows."""
    return -(-n // PANEL) * panel_bytes(k, format)


def panel_bytes(k: int, format: Format) -> int:
    """Bytes of 32 outputs with k inputs each. Raises ValueError: k does not fit the format."""
    if not packable(PANEL, k, format):
        raise ValueError(f"{format.name} packs inputs by {_INPUTS_AT_ONCE[format]}; a layer has {k}")
    if format is Format.BFLOAT16:
        return 2 * k * PANEL
    if format is Format.FLOAT32:
        return 4 * k * PANEL
    if format is Format.INT8:
        return (k + 8) * PANEL
    inputs, size = _GROUPS[format]
    return k // inputs * size + _TAILS.get(format, 0)


def bits_of(format: Format) -> float:
    """Of a weight of a long row, with all that belongs to it."""
    k = 4096
    return 8 * panel_bytes(k, format) / (k * PANEL)


def device_packable(n: int, k: int, format: Format) -> bool:
    """The same on a GPU, which has fewer formats, and inputs in groups of 32."""
    group = {Format.BFLOAT16: 1, Format.INT8: 32}.get(format) or _DEVICE_GROUPS.get(format, (0, 0))[0]
    return n > 0 and k > 0 and group > 0 and k % group == 0


def device_bytes(n: int, k: int, format: Format) -> int:
    """Of a matrix [n, k] that `device_packable` allows."""
    if format is Format.BFLOAT16:
        return 2 * n * k
    if format in (Format.INT8, Format.FLOAT8):
        return n * (k + 4)
    inputs, size = _DEVICE_GROUPS[format]
    return n * (k // inputs * size)
