"""Fill an `EagleHead` from its checkpoint, under the names of public ones, and pack its matrices where that serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.errors import WeightsError
from engine.models.eagle import EagleHead
from engine.models.eagle_spec import eagle_weight_rows
from engine.models.layers import Embedding, Linear
from engine.models.packed import HeadRotation
from engine.weights.loader import weight_bytes
from engine.weights.safetensors_source import SafetensorsSource

if TYPE_CHECKING:
    from engine.weights.packing import Packer

_EMBEDDING = "embed_tokens.weight"
_OFFSETS, _COVERED = "d2t", "t2d"


def load_eagle(head: EagleHead, directory: str, packer: Packer | None = None) -> int:
    """Read the head's weights, its vocabulary and, where the checkpoint has one, an embedding of its own; returns the
    bytes of what is not the target's.

    Raises WeightsError naming tensor, file, what was expected and what was found.
    """
    layer = head.spec.layer
    with SafetensorsSource(directory) as source, torch.no_grad():
        shapes = source.shapes()
        rows = eagle_weight_rows(head.spec)
        is_lent = _EMBEDDING not in shapes
        if not is_lent:
            parameter = next(head.layer.parameters())
            head.embed_tokens = Embedding(layer.vocab_size, layer.hidden_size, head.dtype, parameter.device)
            _read(source, _EMBEDDING, head.embed_tokens.weight)
        elif layer.hidden_size != head.spec.target_hidden_size:
            raise WeightsError(
                f"{directory}: no tensor {_EMBEDDING}, and the target's has {head.spec.target_hidden_size} columns, "
                f"not {layer.hidden_size}"
            )
        extra = sorted(set(shapes) - set(rows) - {_EMBEDDING, _OFFSETS, _COVERED})
        if extra:
            raise WeightsError(f"{source.file_of(extra[0])}: tensor {extra[0]} is not part of an EAGLE-3 head")
        for name, row in rows.items():
            _read(source, name, head.get_parameter(row.parameter)[row.start : row.start + row.count])
        _take_vocabulary(head, source)
    if packer is not None:
        _pack(head, packer)
    lent = [*head.embed_tokens.parameters(), *head.embed_tokens.buffers()] if is_lent else []
    return weight_bytes(head) - sum(tensor.nbytes for tensor in lent)


def _read(source: SafetensorsSource, name: str, place: torch.Tensor) -> None:
    found = source.shapes().get(name)
    if found is None:
        raise WeightsError(f"tensor {name} is missing from the EAGLE-3 head's checkpoint")
    if found != tuple(place.shape):
        raise WeightsError(f"{source.file_of(name)}: tensor {name} has shape {found}, expected {tuple(place.shape)}")
    source.read_into(name, place)


def _take_vocabulary(head: EagleHead, source: SafetensorsSource) -> None:
    """`d2t` says of each of the head's tokens how much larger its id is in the target's vocabulary. (`t2d`, a flag for
    each of the target's tokens, says the same, and is not read.)"""
    size, vocab_size = head.spec.draft_vocab_size, head.spec.layer.vocab_size
    if _OFFSETS not in source.shapes():
        if size != vocab_size:
            raise WeightsError(f"tensor {_OFFSETS} is missing: the head guesses {size} of {vocab_size} tokens")
        return
    offsets = source.integers(_OFFSETS)
    file = source.file_of(_OFFSETS)
    if tuple(offsets.shape) != (size,):
        raise WeightsError(f"{file}: tensor {_OFFSETS} has shape {tuple(offsets.shape)}, expected ({size},)")
    ids = torch.arange(size) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or not bool((ids[1:] > ids[:-1]).all()):
        raise WeightsError(f"{file}: tensor {_OFFSETS} does not name ascending tokens below {vocab_size}")
    head.target_ids = ids.to(next(head.layer.parameters()).device)


def _pack(head: EagleHead, packer: Packer) -> None:
    for owner, name in (
        (head, "fc"),
        (head, "lm_head"),
        *((head.layer, name) for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    ):
        layer = getattr(owner, name)
        assert isinstance(layer, Linear)
        setattr(owner, name, packer.pack_linear(layer, [], None))
    mixer = head.spec.layer.layers[0].attention
    head.layer.rotation = HeadRotation(packer.ops, mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
