"""Matrices of whole numbers as GPTQ, AWQ and compressed-tensors store them, in one form; shapes were checked by
`engine.weights.stored_matrices`.

A 32-bit word holds eight numbers of four bits or four of eight, the first in its lowest bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import WeightsError
from engine.models.quantization import StoredFormat
from engine.weights.group_integers import GroupIntegers
from engine.weights.safetensors_source import SafetensorsSource
from engine.weights.stored_matrices import StoredMatrix, tensor_name

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""where in a word AWQ puts each of eight consecutive outputs (it stores them in the order 0 2 4 6 1 3 5 7)"""


def gptq_integers(source: SafetensorsSource, matrix: StoredMatrix, stored: StoredFormat) -> GroupIntegers:
    """qweight [k / 8, n], qzeros [groups, n / 8], scales [groups, n], g_idx [k]. The first format stores a zero point
    less one, in as many bits, so that 0 is stored as 15."""
    read, prefix, bits = source.tensor, matrix.prefix, matrix.bits
    zeros = _numbers(read(f"{prefix}.qzeros"), bits)
    zeros = (zeros + stored.zero_offset) & (2**bits - 1)
    return GroupIntegers(
        bits,
        _bytes(read(f"{prefix}.qweight").t()),
        _finite(source, f"{prefix}.scales").t().contiguous(),
        _unless_middle(zeros.t(), matrix),
        matrix.group,
        _order(source, f"{prefix}.g_idx", matrix),
    )


def awq_integers(source: SafetensorsSource, matrix: StoredMatrix, stored: StoredFormat) -> GroupIntegers:
    """qweight [k, n / 8], qzeros [groups, n / 8], scales [groups, n]; outputs within a word in AWQ's order."""
    read, prefix = source.tensor, matrix.prefix
    levels = _in_order(_numbers(read(f"{prefix}.qweight"), 4)).t().contiguous()
    zeros = _in_order(_numbers(read(f"{prefix}.qzeros"), 4)).t()
    return GroupIntegers(
        4,
        levels[:, ::2] | (levels[:, 1::2] << 4),
        _finite(source, f"{prefix}.scales").t().contiguous(),
        _unless_middle(zeros, matrix),
        matrix.group,
    )


def packed_integers(source: SafetensorsSource, matrix: StoredMatrix, stored: StoredFormat) -> GroupIntegers:
    """weight_packed [n, k / 8], weight_scale [n, groups], weight_zero_point [n / 8, groups]: numbers with a sign, of
    which half the range was added, to zero points, too."""
    n, k = matrix.shape
    prefix, zero = matrix.prefix, f"{matrix.prefix}.weight_zero_point"
    zeros = None
    if matrix.has_zeros:
        zeros = _numbers(source.tensor(zero).t(), matrix.bits)[:, :n].t().to(torch.int16)
    levels = _bytes(source.tensor(f"{prefix}.weight_packed"))[:, : -(-k * matrix.bits // 8)]
    if k * matrix.bits % 8:
        raise WeightsError(f"{source.file_of(f'{prefix}.weight_packed')}: {prefix}.weight has an odd number of inputs")
    return GroupIntegers(
        matrix.bits,
        levels.contiguous(),
        _scales(source, matrix, stored),
        zeros,
        matrix.group,
        _order(source, f"{prefix}.weight_g_idx", matrix),
    )


def int8_integers(source: SafetensorsSource, matrix: StoredMatrix, stored: StoredFormat) -> GroupIntegers:
    """weight int8 [n, k], weight_scale [n, groups], weight_zero_point of the same shape."""
    zero, zeros = tensor_name(stored, matrix.prefix, "weight_zero_point"), None
    if matrix.has_zeros:
        given = _for_outputs(source.tensor(zero), matrix).to(torch.int64)
        if not bool((given.abs() <= 128).all()):
            raise WeightsError(f"{source.file_of(zero)}: tensor {zero} holds zero points that are no int8")
        zeros = given.to(torch.int16) + 128
        zeros = None if bool((zeros == 128).all()) else zeros
    levels = source.tensor(tensor_name(stored, matrix.prefix, "weight")).contiguous().view(torch.uint8) ^ 128
    return GroupIntegers(8, levels, _scales(source, matrix, stored), zeros, matrix.group)


def llm_int8_integers(source: SafetensorsSource, matrix: StoredMatrix, stored: StoredFormat) -> GroupIntegers:
    """weight int8 [n, k], SCB float32 [n]: what 127 stands for."""
    levels = source.tensor(f"{matrix.prefix}.weight").contiguous().view(torch.uint8) ^ 128
    scales = _finite(source, f"{matrix.prefix}.SCB").float().view(-1, 1) / 127
    return GroupIntegers(8, levels, scales, None, matrix.group)


def _bytes(words: Tensor) -> Tensor:
    """int32 [rows, words] → uint8 [rows, 4 * words]"""
    return words.flatten().view(torch.uint8).view(len(words), -1)


def _numbers(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] → uint8 [rows, numbers]"""
    packed = _bytes(words)
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def _in_order(numbers: Tensor) -> Tensor:
    return numbers.view(len(numbers), -1, 8)[:, :, _AWQ_PLACES].flatten(1)


def _unless_middle(zeros: Tensor, matrix: StoredMatrix) -> Tensor | None:
    """int16 [n, groups]; None where the config says that they are in the middle, and they are."""
    if not matrix.has_zeros and bool((zeros == 2 ** (matrix.bits - 1)).all()):
        return None
    return zeros.to(torch.int16).contiguous()


def _scales(source: SafetensorsSource, matrix: StoredMatrix, stored: StoredFormat) -> Tensor:
    return _for_outputs(_finite(source, tensor_name(stored, matrix.prefix, "weight_scale")), matrix)


def _for_outputs(numbers: Tensor, matrix: StoredMatrix) -> Tensor:
    """One for all, or one for each output, or for its groups → [n, groups]"""
    n = matrix.shape[0]
    return numbers.reshape(-1, matrix.groups).expand(n, matrix.groups).contiguous()


def _finite(source: SafetensorsSource, name: str) -> Tensor:
    scales = source.tensor(name)
    if not bool(scales.isfinite().all()):
        raise WeightsError(f"{source.file_of(name)}: tensor {name} holds scales that are not finite")
    return scales


def _order(source: SafetensorsSource, name: str, matrix: StoredMatrix) -> Tensor | None:
    """The group of each input; None: consecutive inputs share one."""
    if name not in source.shapes():
        return None
    order = source.integers(name)
    if bool((order == -1).all()):  # compressed-tensors: it was never set
        return None
    if int(order.min()) < 0 or int(order.max()) >= matrix.groups:
        raise WeightsError(
            f"{source.file_of(name)}: tensor {name} names groups from {int(order.min())} to {int(order.max())}, and "
            f"there are {matrix.groups}"
        )
    return None if torch.equal(order, torch.arange(len(order)) // matrix.group) else order
