"""Fill a `Decoder` from a checkpoint, in place: merged parameters receive their parts row by row, one tensor at a time.

Everything that can be wrong with names and shapes is found before the first byte of data is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch

from engine.errors import WeightsError
from engine.models.decoder import Decoder
from engine.models.description import ModelDescription
from engine.models.families.common import Rows
from engine.models.families.registry import family_named
from engine.weights.gguf_source import GgufSource
from engine.weights.safetensors_source import SafetensorsSource
from engine.weights.source import WeightSource

_COMPUTED = (".rotary_emb.inv_freq",)
_DUMMY_STD = 0.02
_NAMES_SHOWN = 5


def load_weights(
    model: Decoder, description: ModelDescription, *, load_format: Literal["auto", "dummy"] = "auto", seed: int = 0
) -> int:
    """Load the described checkpoint into `model`, converting to the model's dtype; returns the model's weight bytes.

    `load_format="dummy"` reads nothing and draws small weights from `seed` instead (benchmarks).
    Raises WeightsError naming tensor, file, what was expected and what was found.
    """
    rows = family_named(description.spec.family).weight_rows(model.spec)
    if load_format == "dummy":
        _fill_randomly(model, seed)
    else:
        source: WeightSource
        if description.source == "gguf":
            source = GgufSource(description.path, model.spec, list(rows))
        else:
            source = SafetensorsSource(description.path)
        with source, torch.no_grad():
            _fill(model, source, rows)
    return sum(parameter.nbytes for parameter in model.parameters())


def _fill(model: Decoder, source: WeightSource, rows: Mapping[str, Rows]) -> None:
    shapes = source.shapes()
    places = {name: model.get_parameter(row.parameter)[row.start : row.start + row.count] for name, row in rows.items()}
    _check(source, shapes, {name: tuple(place.shape) for name, place in places.items()}, model)
    for name, place in places.items():
        source.read_into(name, place)
    if "lm_head.weight" in shapes and "lm_head.weight" not in places:
        _check_tied_copy(model, source)


def _check(
    source: WeightSource, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], model: Decoder
) -> None:
    missing = [name for name in expected if name not in found]
    if missing:
        where = source.file_of(next(iter(found))) if found else "the checkpoint"
        raise WeightsError(f"{_some(missing)} missing from {where}: the checkpoint does not fit its config")
    for name, shape in expected.items():
        if found[name] != shape:
            raise WeightsError(f"{source.file_of(name)}: tensor {name} has shape {found[name]}, expected {shape}")
    tied = {"lm_head.weight"} if model.spec.tie_embeddings else set()
    extra = [name for name in found if name not in expected and name not in tied and not name.endswith(_COMPUTED)]
    if extra:
        raise WeightsError(
            f"{source.file_of(extra[0])}: {_some(extra)} not part of a {model.spec.family} model with this config"
        )


def _check_tied_copy(model: Decoder, source: WeightSource) -> None:
    """A checkpoint may store the tied head again; one that stores another head would be served wrongly."""
    embedding = model.embed_tokens.weight
    stored = source.shapes()["lm_head.weight"]
    if stored == tuple(embedding.shape):
        copy = torch.empty_like(embedding)
        source.read_into("lm_head.weight", copy)
        if torch.equal(copy, embedding):
            return
    raise WeightsError(
        f"{source.file_of('lm_head.weight')}: tensor lm_head.weight differs from the embedding, expected the same "
        "because config.json says tie_word_embeddings; set it to false"
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more} {'are' if len(names) > 1 else 'is'}"


def _fill_randomly(model: Decoder, seed: int) -> None:
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
                continue
            generator = torch.Generator(device=parameter.device).manual_seed(seed + index)
            parameter.normal_(0.0, _DUMMY_STD, generator=generator)
