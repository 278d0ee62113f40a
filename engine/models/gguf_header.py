"""What a GGUF file says about itself: metadata and where its tensors lie, checked against the file's length.

Start-up reads a file several times (front end, core, weights), and gguf's own reader builds objects for each of a
vocabulary's tokens and merges (1.9 s for 49k tokens). None is needed here, so long arrays are stepped over.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import msgspec
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import WeightsError
from engine.models.json_file import shown

_LONGEST_KEPT_ARRAY = 1024
_MAX_DIMS = 4
# Counts are read before what they count: a file of zeros would keep the parser busy for hours, or fill the memory.
_MAX_TENSORS = 2**20
_MAX_VALUES = 2**16
_MAX_ARRAY = 2**26
_MAX_STRING = 2**26
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


class ArrayLength(msgspec.Struct, frozen=True):
    """Stands for an array too long to be configuration (tokens, merges, scores)."""

    count: int


MetadataValue = bool | int | float | str | tuple[bool | int | float | str, ...] | ArrayLength


class TensorExtent(msgspec.Struct, frozen=True):
    """One tensor of the file. `shape` in torch's order; `offset` from the file's start; `size_bytes` as encoded."""

    name: str
    encoding: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class GgufHeader(msgspec.Struct, frozen=True):
    path: str
    metadata: dict[str, MetadataValue]
    tensors: dict[str, TensorExtent]

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, key: str) -> float | None:
        value = self.metadata.get(key)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Read and check the header; no tensor data is touched.

    Raises WeightsError when the file is not GGUF version 2 or 3 (little-endian), is one part of a split model, is cut
    short, or holds a tensor that does not lie within it.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(str(path), data).parse()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error
    except ValueError as error:  # mmap of an empty file
        raise WeightsError(f"{path}: not a GGUF file: {error}") from error


class _Parser:
    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def fail(self, what: str) -> WeightsError:
        return WeightsError(f"{self.path}: damaged GGUF file: {what}; download the file again")

    def advance(self, size: int, what: str) -> int:
        start = self.at
        if size < 0 or start + size > self.size:
            raise self.fail(f"{what} at byte {start} needs {size} bytes, the file ends at {self.size}")
        self.at = start + size
        return start

    def scalar(self, layout: str, what: str) -> int | float | bool:
        start = self.advance(struct.calcsize(layout), what)
        value: int | float | bool = struct.unpack_from(layout, self.data, start)[0]
        return value

    def count(self, layout: str, what: str) -> int:
        return int(self.scalar(layout, what))

    def bounded(self, layout: str, what: str, largest: int) -> int:
        value = self.count(layout, what)
        if value > largest:
            raise self.fail(f"{what} of {value} (at most {largest} is plausible)")
        return value

    def string(self, what: str) -> str:
        length = self.bounded("<Q", f"{what}: length", _MAX_STRING)
        start = self.advance(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} at byte {start} is not UTF-8") from error

    def skip_strings(self, count: int, what: str) -> None:
        length_at = struct.Struct("<Q").unpack_from
        data, at, last = self.data, self.at, self.size - 8
        for _ in range(count):
            if at > last:
                raise self.fail(f"{what} runs past the file's end at {self.size}")
            at += 8 + length_at(data, at)[0]
        self.at = at
        self.advance(0, what)

    def value(self, kind: int, key: str) -> MetadataValue:
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.fail(f"{key} has the unknown value type {kind}")
        return self.scalar(_SCALARS[kind], key)

    def array(self, key: str) -> MetadataValue:
        kind, count = self.count("<I", key), self.bounded("<Q", f"{key}: length", _MAX_ARRAY)
        if kind == _ARRAY:
            raise self.fail(f"{key} is an array of arrays")
        if count <= _LONGEST_KEPT_ARRAY:
            items = [self.value(kind, key) for _ in range(count)]
            return tuple(item for item in items if isinstance(item, (bool, int, float, str)))
        if kind == _STRING:
            self.skip_strings(count, key)
        elif kind in _SCALARS:
            self.advance(count * struct.calcsize(_SCALARS[kind]), key)
        else:
            raise self.fail(f"{key} has the unknown element type {kind}")
        return ArrayLength(count)

    def parse(self) -> GgufHeader:
        start = self.advance(4, "the magic number")
        if self.data[start : start + 4] != b"GGUF":
            raise WeightsError(f"{self.path}: not a GGUF file (no GGUF magic number)")
        version = self.count("<I", "the version")
        if version not in (2, 3):
            raise WeightsError(f"{self.path}: GGUF version {version} is not supported (2 and 3 little-endian are)")
        num_tensors = self.bounded("<Q", "the tensor count", _MAX_TENSORS)
        num_values = self.bounded("<Q", "the metadata count", _MAX_VALUES)
        metadata: dict[str, MetadataValue] = {}
        for _ in range(num_values):
            key = self.string("a metadata key")
            said = f"metadata {shown(key)}"
            if key in metadata:
                raise self.fail(f"{said} stands there twice")
            metadata[key] = self.value(self.count("<I", said), said)
        infos = [self.tensor_info() for _ in range(num_tensors)]
        header = GgufHeader(self.path, metadata, {})
        if (header.integer("split.count") or 1) > 1:
            raise WeightsError(f"{self.path}: one part of a split model; merge the parts with llama-gguf-split --merge")
        alignment = header.integer("general.alignment") or 32
        if alignment <= 0 or alignment % 8:
            raise self.fail(f"general.alignment is {alignment}")
        data_start = -(-self.at // alignment) * alignment
        for name, shape, encoding, offset in infos:
            if name in header.tensors:
                raise self.fail(f"two tensors are named {shown(name)}")
            if offset % alignment:
                raise self.fail(f"tensor {shown(name)} lies at {offset} of the data, no multiple of {alignment}")
            header.tensors[name] = self.extent(name, shape, encoding, data_start + offset)
        return header

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string("a tensor name")
        said = f"tensor {shown(name)}"
        num_dims = self.count("<I", said)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self.fail(f"{said} has {num_dims} dimensions")
        innermost_first = [self.count("<Q", said) for _ in range(num_dims)]
        return name, tuple(reversed(innermost_first)), self.count("<I", said), self.count("<Q", said)

    def extent(self, name: str, shape: tuple[int, ...], encoding_id: int, offset: int) -> TensorExtent:
        said = f"tensor {shown(name)}"
        try:
            encoding = GGMLQuantizationType(encoding_id)
            block_elements, block_bytes = GGML_QUANT_SIZES[encoding]
        except (ValueError, KeyError) as error:
            raise self.fail(f"{said} has the unknown encoding {encoding_id}") from error
        elements = 1
        for size in shape:
            elements *= size
        if elements == 0 or shape[-1] % block_elements:
            raise self.fail(f"{said} has shape {shape}, {encoding.name} needs rows of {block_elements} n")
        size_bytes = elements // block_elements * block_bytes
        end = offset + size_bytes
        if end > self.size:
            raise self.fail(f"{said} lies at bytes {offset}..{end}, the file ends at {self.size}")
        return TensorExtent(name, encoding, shape, offset, size_bytes)
