"""Fill a `Decoder` from a checkpoint, in place: merged parameters receive their parts row by row, one tensor at a time.

Everything that can be wrong with names and shapes is found before the first byte of data is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from engine.errors import WeightsError
from engine.models.decoder import Decoder
from engine.models.description import ModelDescription
from engine.models.experts import Experts
from engine.models.families.common import Family
from engine.models.families.registry import family_named
from engine.models.families.rows import Rows, stacked_rows
from engine.models.head import Head
from engine.models.heads import head_rows
from engine.models.layers import Linear
from engine.models.mixers import MixerSpec
from engine.models.mtp import MtpHead
from engine.models.mtp_spec import MtpSpec
from engine.models.rope import RopeTable
from engine.models.sharding import Shard
from engine.models.spec import DecoderSpec
from engine.models.stages import Stage, stage_rows
from engine.models.taken import shard_rows
from engine.weights.arranged_source import ArrangedSource
from engine.weights.gguf_source import GgufSource
from engine.weights.quantized_source import QuantizedSource
from engine.weights.safetensors_source import SafetensorsSource
from engine.weights.sharded_source import ShardedSource
from engine.weights.source import Part, WeightSource

if TYPE_CHECKING:
    from engine.weights.device_packing import DevicePacker
    from engine.weights.packing import Packer

    AnyPacker = Packer | DevicePacker

_COMPUTED = (".rotary_emb.inv_freq",)
_STACKED = ".experts.gate_up_proj"
_EMBEDDING = "embed_tokens.weight"
_DUMMY_STD = 0.02
_NAMES_SHOWN = 5
_MTP_PARTS = "layers|block|emb_norm|hidden_norm|linear_proj"
"""of layers that predict further tokens, behind mtp_: Ernie's are the last four"""


def load_weights(
    model: Decoder,
    description: ModelDescription,
    *,
    load_format: Literal["auto", "dummy"] = "auto",
    seed: int = 0,
    packer: AnyPacker | None = None,
    shard: Shard | None = None,
    stage: Stage | None = None,
) -> int:
    """Load the described checkpoint into `model`, converting to the model's dtype; returns the model's weight bytes.

    `shard`: `model` is that part of the described one; `stage`: those layers of it (or of that part), of which alone
    bytes are read.
    `load_format="dummy"` reads nothing and draws small weights from `seed` instead (benchmarks). `packer`: puts packed
    layers where it can, matrix by matrix.
    Raises WeightsError naming tensor, file, what was expected and what was found.
    """
    spec = description.spec
    assert spec is not None
    family = family_named(spec.family)
    rows = _rows_of(spec, family.weight_rows)
    if load_format == "dummy":
        rows = rows if shard is None else shard_rows(spec, shard, rows)[0]
        rows = rows if stage is None else stage_rows(spec, stage, rows)
        fill_randomly(model, seed)
        if packer is not None:
            _pack(model, None, rows, packer)
    else:
        source: WeightSource
        if description.source == "gguf":
            rows = stacked_rows(_rows_of(spec, family.gguf_rows or family.weight_rows))
            source = GgufSource(description.path, spec.facts, list(rows))
        else:
            source = _directory(description)
        with source, torch.no_grad():
            if family.stacked_rows is not None and any(name.endswith(_STACKED) for name in source.shapes()):
                rows = _rows_of(spec, family.stacked_rows)
            rows = of_all = _as_named(rows, family, source)
            left_out = _left_out(family, spec)
            if stage is not None:
                rows, left_out = _of_stage(spec, stage, of_all, left_out)
            source = whole = ArrangedSource(source, rows, left_out)
            if shard is not None:
                rows, parts = shard_rows(spec, shard, of_all)
                rows = rows if stage is None else stage_rows(spec, stage, rows)
                source = ShardedSource(whole, parts)
            _fill(model, source, rows, packer)
            if model.head is not None and model.head.spec.token_ids:
                _fill_head(model, model.head, whole, rows)  # whole in each rank
            if description.generates:
                _check_tied_copy(model, whole, rows)
    return weight_bytes(model)


def load_mtp(
    head: MtpHead, spec: MtpSpec, load_format: Literal["auto", "dummy"], seed: int, packer: AnyPacker | None
) -> int:
    """Fill a head from its target's checkpoint; otherwise as `load_weights`."""
    ways, target = spec.rows(), spec.target
    if load_format == "dummy":
        fill_randomly(head, seed)
        if packer is not None:
            _pack(head, None, ways[0], packer)
        return weight_bytes(head)
    assert target.spec is not None
    with _directory(target) as source, torch.no_grad():
        found, family = source.shapes(), family_named(target.spec.family)
        ways = [_as_named(rows, family, source) for rows in ways]
        if not any(name in found for rows in ways for name in rows):
            raise WeightsError(
                f"speculative_config: method 'mtp': {target.path} has no tensor {next(iter(ways[0]))}: its checkpoint "
                "holds no layer that predicts further tokens; use method 'ngram'"
            )
        rows = next((rows for rows in ways if rows.keys() <= found.keys()), ways[0])
        _fill(head, ArrangedSource(source, rows, re.compile("")), rows, packer)
    return weight_bytes(head)


def _directory(description: ModelDescription) -> WeightSource:
    source = SafetensorsSource(description.path)
    return source if description.quantized is None else QuantizedSource(source, description.quantized)


def _rows_of(spec: DecoderSpec, names: Callable[[DecoderSpec], dict[str, Rows]]) -> dict[str, Rows]:
    return names(spec) if spec.head is None else {**names(spec), **head_rows(spec.head, spec.hidden_size)}


def _left_out(family: Family, spec: DecoderSpec) -> re.Pattern[str]:
    """Names of a checkpoint that are not read. Layers that read others' keys may have been trained with their own."""
    endings = [f"{re.escape(ending)}$" for ending in family.ignored]
    mixers = enumerate(layer.mixer for layer in spec.layers)
    sharing = [str(index) for index, mixer in mixers if isinstance(mixer, MixerSpec) and mixer.shares is not None]
    if sharing:
        theirs = r"(self_attn\.(k_proj|v_proj|k_norm|v_norm)|attn_(k|v|k_norm))"
        endings.append(rf"(layers|blk)\.({'|'.join(sharing)})\.{theirs}\.")
    if family.predicts_more:
        model = f"({re.escape(family.prefix)})?"
        endings.append(rf"^(({model}layers|blk)\.{spec.num_layers}|{model}mtp_({_MTP_PARTS})|mtp)\.")
    if family.wrapper is not None:
        endings += [f"^{re.escape(prefix)}" for prefix in family.wrapper.others]
    return re.compile("|".join(endings) if endings else "$^")


def _of_stage(
    spec: DecoderSpec, stage: Stage, rows: dict[str, Rows], left_out: re.Pattern[str]
) -> tuple[dict[str, Rows], re.Pattern[str]]:
    """Other stages' tensors are not looked at; a tied head that is stored again is the first one's to compare."""
    own = stage_rows(spec, stage, rows)
    others = [name for name in rows if name not in own]
    if spec.tie_embeddings and not stage.is_first:
        others.append("lm_head.weight")
    patterns = [left_out.pattern, *(f"^{re.escape(name)}$" for name in others)]
    return own, re.compile("|".join(patterns))


def _as_named(rows: dict[str, Rows], family: Family, source: WeightSource) -> dict[str, Rows]:
    """Under the names of the bare model, or of one that wraps it, where that is what was saved, and under those that
    there once were."""
    saved, wrapper = source.shapes(), family.wrapper
    if wrapper is not None and any(name.startswith(wrapper.prefix) for name in saved):
        rows = {wrapper.name_of(name): row for name, row in rows.items()}
    elif not any(name.startswith(family.prefix) for name in saved):
        rows = {name.removeprefix(family.prefix): row for name, row in rows.items()}
    for ending, formerly in family.formerly.items():
        older = {name: name.removesuffix(ending) + formerly for name in rows if name.endswith(ending)}
        rows = {older[name] if older.get(name) in saved else name: row for name, row in rows.items()}
    return rows


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights, dense and packed; tied ones once, tables that are computed not at all."""
    computed = {id(rope.table) for rope in model.modules() if isinstance(rope, RopeTable)}
    buffers = [buffer for buffer in model.buffers() if id(buffer) not in computed]
    return sum(tensor.nbytes for tensor in (*model.parameters(), *buffers))


def _fill(model: Decoder, source: WeightSource, rows: Mapping[str, Rows], packer: AnyPacker | None) -> None:
    shapes = source.shapes()
    places = {name: row.of(model.get_parameter(row.parameter)) for name, row in rows.items()}
    _check(source, shapes, {name: tuple(place.shape) for name, place in places.items()}, model)
    matrices = _matrices(model, rows) if packer is not None else {}
    packed = {part.name for parts in matrices.values() for part in parts}
    for name, place in places.items():
        if name not in packed:
            source.read_into(name, place)
    del places, name, place  # what a packed layer replaces is freed at once
    if packer is not None:
        _pack(model, source, rows, packer)


def _fill_head(model: Decoder, head: Head, source: WeightSource, rows: Mapping[str, Rows]) -> None:
    unembedding = _EMBEDDING if model.spec.tie_embeddings else "lm_head.weight"
    (name,) = (name for name, row in rows.items() if row.parameter == unembedding)
    whole = torch.empty(source.shapes()[name], dtype=model.dtype)
    source.read_into(name, whole)
    head.take_tokens(whole[list(head.spec.token_ids)])


def _matrices(model: Decoder, rows: Mapping[str, Rows]) -> dict[str, list[Part]]:
    """What a packer takes, by parameter: the parts of linear layers' weights, the unembedding's among them, and the
    embedding of tokens; and of experts, one expert's after another's."""
    parts: dict[str, list[tuple[int, Part]]] = {}
    for name, row in rows.items():
        path, _, kind = row.parameter.rpartition(".")
        module = model.get_submodule(path)
        is_linear = kind == "weight" and isinstance(module, Linear)
        found = []
        if (is_linear and model.get_parameter(row.parameter).dtype == model.dtype) or row.parameter == _EMBEDDING:
            found = [(0, Part(name, row.count))]
        elif isinstance(module, Experts) and kind in ("gate_up", "down"):
            found = [(expert, Part(name, row.count, index)) for expert, index in row.experts(module.count)]
        parts.setdefault(row.parameter, []).extend(found)
    return {name: [part for _, part in sorted(found, key=itemgetter(0))] for name, found in parts.items() if found}


def _pack(model: Decoder, source: WeightSource | None, rows: Mapping[str, Rows], packer: AnyPacker) -> None:
    matrices = _matrices(model, rows)
    embedding, head = (matrices.pop(name, [None])[0] for name in (_EMBEDDING, "lm_head.weight"))
    _pack_tables(model, embedding, head, source, packer)
    for parameter, parts in matrices.items():
        path, _, name = parameter.removesuffix(".weight").rpartition(".")
        layer = getattr(model.get_submodule(path), name)
        if isinstance(layer, Linear):
            with _named(parts, source):
                packed_layer = packer.pack_linear(layer, parts, source)
            setattr(model.get_submodule(path), name, packed_layer)
        elif name == "gate_up":
            above, _, name = path.rpartition(".")
            experts = model.get_submodule(path)
            assert isinstance(experts, Experts)
            down = matrices[f"{path}.down"]
            with _named([*parts, *down], source):
                packed = packer.pack_experts(experts, parts, down, source)
            setattr(model.get_submodule(above), name, packed)
    packer.fuse_heads_and_norms(model)


def _pack_tables(
    model: Decoder, embedding: Part | None, head: Part | None, source: WeightSource | None, packer: AnyPacker
) -> None:
    with _named([part for part in (embedding, head) if part is not None], source):
        if model.spec.begins and model.spec.ends:
            assert embedding is not None
            packer.pack_tables(model, embedding, head, source)
        elif embedding is not None:
            packer.pack_embedding(model, embedding, source, tied=model.spec.tie_embeddings)
        elif head is not None:
            packer.pack_head(model, head, source)


@contextmanager
def _named(parts: Sequence[Part], source: WeightSource | None) -> Iterator[None]:
    """What a packer refuses (a number that is not finite, among few things), with the tensors that it was given."""
    try:
        yield
    except ValueError as error:
        if source is None or not parts:
            raise
        names = list(dict.fromkeys(part.name for part in parts))
        said = f"tensor {names[0]}" + (f" or one of {len(names) - 1} more" if len(names) > 1 else "")
        raise WeightsError(f"{source.file_of(names[0])}: {said}: {error}") from error


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
    extra = [name for name in extra if not _is_zero_bias(source, found, name)]
    if extra:
        raise WeightsError(
            f"{source.file_of(extra[0])}: {_some(extra)} not part of a {model.spec.family} model with this config"
        )


def _is_zero_bias(source: WeightSource, found: Mapping[str, tuple[int, ...]], name: str) -> bool:
    """AutoGPTQ wrote one for every matrix."""
    module, _, kind = name.rpartition(".")
    if kind != "bias" or found[name] != found.get(f"{module}.weight", ())[:1]:
        return False
    bias = torch.empty(found[name])
    source.read_into(name, bias)
    return not bias.any()


def _check_tied_copy(model: Decoder, source: WeightSource, rows: Mapping[str, Rows]) -> None:
    """A checkpoint may store the tied head again; one that stores another head would be served wrongly."""
    shapes = source.shapes()
    if "lm_head.weight" not in shapes or "lm_head.weight" in rows:
        return
    (embedding,) = (name for name, row in rows.items() if row.parameter == _EMBEDDING)
    if shapes["lm_head.weight"] == shapes[embedding]:
        pair = torch.empty(2, *shapes[embedding], dtype=model.dtype)
        source.read_into(embedding, pair[0])
        source.read_into("lm_head.weight", pair[1])
        if torch.equal(pair[0], pair[1]):
            return
    raise WeightsError(
        f"{source.file_of('lm_head.weight')}: tensor lm_head.weight differs from the embedding, expected the same "
        "because config.json says tie_word_embeddings; set it to false"
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {shown}{more} {'are' if len(names) > 1 else 'is'}"


def fill_randomly(model: nn.Module, seed: int) -> None:
    """Small weights that depend on `seed` alone."""
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
                continue
            generator = torch.Generator(device=parameter.device).manual_seed(seed + index)
            parameter.normal_(0.0, _DUMMY_STD, generator=generator)
