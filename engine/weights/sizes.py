"""What a model's weights take in memory, by its dimensions, before any of them is there. Torch-free.

The same sums as `loader.weight_bytes` makes of a model that has been loaded (a test compares them).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Literal

from engine.config import Quantization
from engine.cpu_kernels.formats import (
    FORMAT_OF_GGUF,
    IN_EIGHT_BITS,
    Format,
    device_bytes,
    device_packable,
    packable,
    packed_bytes,
)
from engine.models.gguf_header import TensorExtent
from engine.models.heads import head_values
from engine.models.mixers import ConvSpec, DeltaSpec, LatentSpec, MambaSpec, MixerSpec, StateSpec
from engine.models.quantization import StoredFormat
from engine.models.spec import DecoderSpec
from engine.weights.safetensors_headers import CheckpointHeaders
from engine.weights.stored_matrices import WHOLE_NUMBERS, Kind, StoredMatrix, stored_matrices

Place = Literal["cpu", "gpu"]
"""where matrices are packed"""
_MATRIX_FORMAT = {"int8": Format.INT8, "int4": Format.Q4_1, "fp8": Format.FLOAT8}
_FLOATS = {Kind.MXFP4: Format.MXFP4, Kind.EXPERTS: Format.MXFP4, Kind.NVFP4: Format.NVFP4}
_FLOAT8_GROUP = 128
_IN_16_BITS = ("per_layer_token_embd.weight", "layer_output_scale.weight")
"""tensors of GGUF files that have 16 bits in memory, whatever the file has"""
_KV_B = ".kv_b_proj.weight"
"""and of other checkpoints, because whoever attends to latents multiplies with it"""


def weight_bytes(spec: DecoderSpec, dtype_bytes: int, quantization: Quantization, place: Place | None) -> int:
    """Of a checkpoint that is read element by element. `place`: matrices are packed there (in 16 bits)."""
    matrix = _MATRIX_FORMAT.get(quantization, Format.BFLOAT16) if place is not None else None
    head = Format.INT8 if matrix is not None and matrix is not Format.BFLOAT16 else matrix
    width = spec.embedding_size or spec.hidden_size
    norms, others = _norm_values(spec), _vector_values(spec)
    total = norms * (4 if spec.norm == "rms_wide" else dtype_bytes) + dtype_bytes * others + _float32_bytes(spec, place)
    total += sum(count * _matrix_bytes(n, k, matrix, dtype_bytes, place) for count, n, k in _matrices(spec))
    rows = spec.table_rows or spec.vocab_size
    if spec.ends or spec.tie_embeddings:  # a first stage packs a tied table, too
        total += _matrix_bytes(rows, width, head, dtype_bytes, place)
    plain = Format.BFLOAT16 if place is not None else None
    total += sum(_matrix_bytes(count, spec.hidden_size, plain, dtype_bytes, place) for count in _routers(spec))
    return total + dtype_bytes * rows * width if spec.begins and not spec.tie_embeddings else total


def mtp_weight_bytes(layer: DecoderSpec, dtype_bytes: int, quantization: Quantization, place: Place | None) -> int:
    """As `weight_bytes`, of a head for multi-token prediction: its layer, and what leads into it."""
    hidden = layer.hidden_size
    matrix = _MATRIX_FORMAT.get(quantization, Format.BFLOAT16) if place is not None else None
    norms = 2 * hidden * (4 if layer.norm == "rms_wide" else dtype_bytes)
    joining = _matrix_bytes(hidden, 2 * hidden, matrix, dtype_bytes, place)
    return weight_bytes(layer, dtype_bytes, quantization, place) + joining + norms


def gguf_weight_bytes(tensors: Mapping[str, TensorExtent], spec: DecoderSpec, place: Place = "cpu") -> int:
    """Of a GGUF file that runs from its blocks."""
    loaded = [extent for name, extent in tensors.items() if not name.startswith("rope_")]  # those are read as numbers
    dense = [2 * prod(extent.shape) for extent in loaded if extent.name.endswith(_IN_16_BITS)]
    others = (extent for extent in loaded if not extent.name.endswith(_IN_16_BITS))
    return sum(dense) + sum(_extent_bytes(extent, spec, place) for extent in others)


def stored_weight_bytes(directory: str, stored: StoredFormat, spec: DecoderSpec, place: Place = "cpu") -> int:
    """Of a quantised Hugging Face checkpoint whose matrices run packed where they can. Raises WeightsError."""
    with CheckpointHeaders(directory) as files:
        matrices, used = stored_matrices(files.headers, stored, files.integers)
        plain = [
            (header.shape, _vector_bytes(name, spec)) for name, header in files.headers.items() if name not in used
        ]
    total = sum(_stored_bytes(shape, Format.BFLOAT16, size, place) for shape, size in plain)
    dense = [2 * prod(matrix.shape) for matrix in matrices if matrix.name.endswith(_KV_B)]
    others = (matrix for matrix in matrices if not matrix.name.endswith(_KV_B))
    return total + sum(dense) + sum(_stored_bytes(_shape_of(matrix), _format_of(matrix), 2, place) for matrix in others)


def _shape_of(matrix: StoredMatrix) -> tuple[int, ...]:
    """Outputs before inputs, as it runs."""
    if matrix.kind is not Kind.EXPERTS:
        return matrix.shape
    experts, k, n = matrix.shape
    return experts, n, k


def _format_of(matrix: StoredMatrix) -> Format:
    """In which a matrix runs, unless its values are in the way (`engine/weights/README.md`). The order of its inputs
    (act-order), 4 bytes each, is left out."""
    if matrix.kind in _FLOATS:
        return _FLOATS[matrix.kind]
    if matrix.kind is Kind.FLOAT8 and (matrix.groups == 1 or matrix.group % _FLOAT8_GROUP == 0):
        return Format.FLOAT8 if matrix.groups == 1 else Format.FLOAT8_BLOCK
    if matrix.kind not in WHOLE_NUMBERS or matrix.group % 32:
        return Format.BFLOAT16
    if matrix.bits == 8:
        return Format.Q8_0
    return Format.INT4_GROUP if matrix.has_zeros else Format.Q4_0


def _vector_bytes(name: str, spec: DecoderSpec) -> int:
    """Of each number of a vector."""
    return 4 if spec.norm == "rms_wide" and "norm" in name else 2


def _extent_bytes(extent: TensorExtent, spec: DecoderSpec, place: Place) -> int:
    format = FORMAT_OF_GGUF.get(extent.encoding, Format.BFLOAT16)
    return _stored_bytes(extent.shape, format, _vector_bytes(extent.name, spec), place)


def _stored_bytes(shape: tuple[int, ...], format: Format, vector_bytes: int, place: Place) -> int:
    """Of a tensor of a checkpoint; what is no matrix, nor stacks some, is not packed."""
    if len(shape) < 2:
        return vector_bytes * prod(shape)
    *stacked, n, k = shape
    return prod(stacked) * _matrix_bytes(n, k, format, 2, place)


def _matrix_bytes(n: int, k: int, format: Format | None, dtype_bytes: int, place: Place | None) -> int:
    """[n, k]: in the format, or where that takes other sizes in eight bits that hold the same, in bfloat16, or as it
    is."""
    if format is None:
        return dtype_bytes * n * k
    fits, size = (device_packable, device_bytes) if place == "gpu" else (packable, packed_bytes)
    for possible in (format, *(Format.Q8_0 for _ in {format} & IN_EIGHT_BITS), Format.BFLOAT16):
        if fits(n, k, possible):
            return size(n, k, possible)
    return dtype_bytes * n * k


def _matrices(spec: DecoderSpec) -> Iterator[tuple[int, int, int]]:
    """(how many, outputs, inputs) of all but the tables."""
    hidden, width = spec.hidden_size, spec.embedding_size or spec.hidden_size
    for layer in spec.layers:
        yield 1, layer.first_size, hidden
        yield 1, hidden, layer.mixer.last_size
        if layer.side is not None:
            yield 1, hidden, layer.side.last_size
        if isinstance(layer.mixer, LatentSpec) and layer.mixer.q_lora_rank is not None:
            yield 1, layer.mixer.q_size, layer.mixer.q_lora_rank
        if isinstance(layer.state, DeltaSpec) and layer.state.rank is not None:
            yield 1, layer.state.value_size, layer.state.rank
            yield 1, layer.state.decay_size, layer.state.rank
        if layer.mlp is not None:
            yield 1, layer.mlp.first_size, hidden
            yield 1, hidden, layer.mlp.intermediate_size
        if layer.experts is not None:
            if layer.experts.gated:
                yield layer.experts.held, layer.experts.first_size, hidden
                yield layer.experts.held, hidden, layer.experts.inner_size
            if layer.experts.gated_beside:
                yield 1, 1, hidden
    inputs = spec.layer_inputs
    if inputs is not None:
        yield 1, spec.num_layers * inputs.size, hidden
        yield spec.num_layers, inputs.size, hidden
        yield spec.num_layers, hidden, inputs.size
    if width != hidden:
        yield int(spec.begins), hidden, width
        yield int(spec.ends), width, hidden


def _routers(spec: DecoderSpec) -> Iterator[int]:
    """Outputs of those that have 16 bits; they keep them."""
    experts = (layer.experts for layer in spec.layers)
    return (each.count for each in experts if each is not None and not each.router.wide)


def _norm_values(spec: DecoderSpec) -> int:
    of_layer = 1 if spec.parallel == "one_norm" else 4 if spec.norm_placement == "around" else 2
    norms = spec.num_layers * of_layer + spec.final_norm
    norms -= of_layer // 2 * sum(layer.ends_with_mixer for layer in spec.layers)
    of_heads = 0
    for mixer in (layer.mixer for layer in spec.layers):
        if isinstance(mixer, MixerSpec) and mixer.qk_norm is not None:
            of_heads += (
                mixer.q_size + mixer.kv_size
                if mixer.qk_norm == "row"
                else (1 + (mixer.shares is None)) * mixer.head_dim
            )
        elif isinstance(mixer, LatentSpec):
            of_heads += (mixer.q_lora_rank or 0) + mixer.latent.kv_lora_rank
    apart = sum(layer.experts is not None and layer.experts.apart for layer in spec.layers)
    values = (norms + 4 * apart) * spec.hidden_size + of_heads
    if spec.layer_inputs is not None:
        values += spec.layer_inputs.size + spec.num_layers * spec.hidden_size
    return values * (2 if spec.norm == "layer" else 1)


def _vector_values(spec: DecoderSpec) -> int:
    """Biases, tables of positions and of layers' inputs, what activations and layers have learnt, what makes keys and
    values of latents, and plain experts, which no kernel packs."""
    hidden = spec.hidden_size
    values = (spec.table_rows or spec.vocab_size) * (spec.head_bias and spec.ends) + spec.num_layers * spec.layer_scales
    if spec.layer_inputs is not None:
        values += spec.layer_inputs.vocab_size * spec.num_layers * spec.layer_inputs.size
    for layer in spec.layers:
        mixer, mlp, experts = layer.mixer, layer.mlp, layer.experts
        values += _state_values(layer.state, hidden)
        if isinstance(mixer, LatentSpec):
            values += mixer.num_heads * mixer.latent.made_size * mixer.latent.kv_lora_rank
        elif isinstance(mixer, MixerSpec):
            values += mixer.first_size * mixer.qkv_bias + hidden * mixer.o_bias
        if mlp is not None:
            values += (mlp.first_size + hidden) * mlp.bias + 2 * (mlp.activation == "xielu")
        if experts is not None:
            values += experts.held * (experts.first_size + hidden) * experts.bias
            if not experts.gated:
                values += experts.held * (experts.first_size + experts.inner_size) * hidden
            values += experts.count * (experts.router.bias and not experts.router.wide)
    if spec.position_offset is not None:
        values += (spec.max_position + spec.position_offset) * hidden
    values += spec.token_types * hidden + spec.embedding_norm * hidden * (2 if spec.norm == "layer" else 1)
    return values


def _state_values(state: StateSpec | None, hidden: int) -> int:
    """Of a layer that keeps one: in the model's dtype, beside its matrices."""
    if isinstance(state, ConvSpec):
        return state.channels * state.taps + (4 * state.channels + hidden) * state.bias
    if isinstance(state, DeltaSpec):
        return state.channels * state.taps + state.value_dim
    if isinstance(state, MambaSpec):
        inner = state.channels * (state.taps + state.conv_bias) + state.inner_size * state.normed
        return inner + (state.first_size + hidden) * state.bias
    return 0


def _float32_bytes(spec: DecoderSpec, place: Place | None) -> int:
    """Of what has 32 bits in any case: sinks, of routers, where a rank's own experts are, and a head that judges."""
    packed = 0
    values = 0 if spec.head is None else head_values(spec.head, spec.hidden_size)
    for layer in spec.layers:
        if isinstance(layer.mixer, MixerSpec):
            values += layer.mixer.num_heads * layer.mixer.sinks
        if isinstance(layer.state, DeltaSpec):
            values += layer.state.value_heads + layer.state.decay_size
        if isinstance(layer.state, MambaSpec):
            values += 3 * layer.state.heads + layer.state.first_size * (layer.state.scales is not None)
        if layer.experts is not None:
            router, count = layer.experts.router, layer.experts.count
            values += count * (router.correction + router.expert_scales + (layer.experts.own is not None))
            if router.wide and place == "cpu" and not router.bias:
                packed += packed_bytes(count, spec.hidden_size, Format.FLOAT32)
            elif router.wide:
                values += count * (spec.hidden_size + router.bias)
    return 4 * values + packed
