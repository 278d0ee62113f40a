"""One GGUF file under Hugging Face names: memory-mapped, dequantised into place, llama.cpp's row order undone."""

from __future__ import annotations

import logging
import mmap
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from math import prod

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, TensorNameMap, get_tensor_name_map

from engine.cpu_kernels.formats import FORMAT_OF_GGUF, Format
from engine.errors import WeightsError
from engine.models.facts import ModelFacts
from engine.models.gguf_header import TensorExtent, read_gguf_header
from engine.sizes import size_text
from engine.weights.block_floats import is_finite_e8m0
from engine.weights.gguf_dequant import DENSE, dequantize_into
from engine.weights.source import EncodedRows

logger = logging.getLogger(__name__)

_HANDLED_AS_CONFIG = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_INTERLEAVED_ROPE = frozenset({"llama", "granite", "granitemoe", "smollm3"})
"""whose converter brings rows together that Hugging Face has apart"""
_NORMS_WITH_ONE = frozenset({"gemma2", "gemma3"})
"""whose files hold 1 + weight where Hugging Face has the weight of a norm"""

_KNOWN_AS = {
    "e_score_correction_bias": "e_score_correction.bias",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
}
"""names, in part, that gguf's map does not know, with others that it does"""
_SUFFIXES = (".weight", ".bias", ".scale")


class GgufSource:
    """`names`: the Hugging Face names that the model wants; what they are called in the file follows gguf's own map.

    Raises WeightsError for a damaged file: every tensor is checked to lie within it before any is read.
    """

    def __init__(self, path: str, facts: ModelFacts, names: list[str]) -> None:
        header = read_gguf_header(path)
        self._path = path
        self._heads = facts.layers[0]
        arch_name = header.text("general.architecture") or ""
        self._interleaved = arch_name in _INTERLEAVED_ROPE
        self._norms_with_one = arch_name in _NORMS_WITH_ONE
        architectures = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
        name_map = get_tensor_name_map(architectures.get(arch_name, MODEL_ARCH.LLAMA), facts.num_layers)
        hf_name_of = {_gguf_name(name, name_map): name for name in names}
        self._extents: dict[str, TensorExtent] = {
            hf_name_of.get(name, name): extent
            for name, extent in header.tensors.items()
            if name not in _HANDLED_AS_CONFIG
        }
        with open(path, "rb") as file:
            # Copy-on-write access only because torch warns about buffers that it may not write; nothing writes.
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._widened: dict[str, int] = defaultdict(int)
        """weights of matrices that were asked for in blocks and have none that run packed, by encoding"""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: extent.shape for name, extent in self._extents.items()}

    def file_of(self, name: str) -> str:
        return self._path

    def read_into(self, name: str, destination: torch.Tensor, expert: int | None = None) -> None:
        extent = self._extents[name]
        try:
            dequantize_into(self._bytes_of(extent, expert), extent.encoding, destination)
        except WeightsError as error:
            raise WeightsError(f"{self._path}: tensor {extent.name}: {error}") from error
        heads = self._interleaved_heads(name)
        if heads is not None:
            _pairs_to_halves(destination, heads)
        if self._norms_with_one and name.endswith("norm.weight"):
            destination.sub_(1.0)

    def mapped(self, name: str, expert: int | None = None) -> None:
        """What is not in blocks is small."""

    def encoded(self, name: str, expert: int | None = None) -> EncodedRows | None:
        extent = self._extents[name]
        shape = extent.shape if expert is None else extent.shape[1:]
        if extent.encoding in DENSE or len(shape) != 2:
            return None
        rows = self._bytes_of(extent, expert).view(shape[0], -1).clone()  # a view would keep the map open
        heads = self._interleaved_heads(name)
        if heads is not None:
            _pairs_to_halves(rows, heads)
        format = FORMAT_OF_GGUF.get(extent.encoding)
        if format is None or (format is Format.MXFP4 and not is_finite_e8m0(rows.view(shape[0], -1, 17)[..., 0])):
            self._widened[extent.encoding.name] += prod(shape)
            return None
        return EncodedRows(format, rows)

    def _bytes_of(self, extent: TensorExtent, expert: int | None) -> torch.Tensor:
        size = extent.size_bytes if expert is None else extent.size_bytes // extent.shape[0]
        start = extent.offset + size * (expert or 0)
        return torch.frombuffer(self._data, dtype=torch.uint8, count=size, offset=start)

    def _interleaved_heads(self, name: str) -> int | None:
        """How many heads' rows llama.cpp has re-ordered in this tensor; None: none."""
        if self._interleaved and ".self_attn.q_proj." in name:
            return self._heads.num_heads
        if self._interleaved and ".self_attn.k_proj." in name:
            return self._heads.num_kv_heads
        return None

    def __enter__(self) -> GgufSource:
        return self

    def __exit__(self, *error: object) -> None:
        for encoding, weights in self._widened.items():
            size = size_text(2 * weights)
            logger.warning("%s: no kernel multiplies %s: %s as bfloat16", self._path, encoding, size)
        # After a failure the traceback still holds a view of the map; then it closes with the view.
        with suppress(BufferError):
            self._data.close()


def _gguf_name(name: str, name_map: TensorNameMap) -> str | None:
    """What the file calls a tensor of that Hugging Face name."""
    for ours, known in _KNOWN_AS.items():
        name = name.replace(ours, known)
    found = name_map.get_name(name, try_suffixes=_SUFFIXES)
    return found if found is None or found.endswith(_SUFFIXES) else f"{found}.weight"


def _pairs_to_halves(rows: torch.Tensor, heads: int) -> None:
    """In place: llama.cpp's Llama rotates neighbouring rows (2i, 2i + 1) of a head, ours (i, i + head_dim / 2)."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    rows.copy_(pairs.transpose(1, 2).reshape(rows.shape))
