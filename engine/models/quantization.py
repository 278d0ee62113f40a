"""What config.json says of quantised weights, read without torch.

What a checkpoint's tensors say themselves (bits, sizes of groups, zero points) is left to
`engine.weights.stored_matrices`, so that modules may differ, and lists of those that were left out, and patterns of
names, need not be read.

Sources: the configs of GPTQModel, AutoAWQ, AutoRound, compressed-tensors, and of transformers' `quantizers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from engine.errors import ConfigError, UnsupportedModelError
from engine.models.json_file import shown

Layout = Literal["gptq", "awq", "compressed-tensors", "fp8", "mxfp4", "bitsandbytes", "torchao"]
"""which names and layouts the tensors of a module have"""
Entries = Mapping[str, object]

SUPPORTED = (
    "GPTQ, AWQ and AutoRound of 4 or 8 bits, compressed-tensors (pack-quantized, int-quantized, float-quantized, "
    "nvfp4-pack-quantized, mxfp4-pack-quantized), fp8, mxfp4, bitsandbytes, torchao (weights of int8, float8, intx, "
    "and plain int4); and GGUF files"
)
_KEYS = ("quantization_config", "compression_config")
_UNQUANTISED = "serve the model's unquantised checkpoint with quantization='int8' or 'int4'"
_INSTEAD = {
    "modelopt": "convert it to compressed-tensors (its entrypoints/convert), or " + _UNQUANTISED,
}
_COMPRESSED_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
    "dense",
)
_TORCHAO = (
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int4WeightOnlyConfig",
)
_TORCHAO_PACKINGS = {"int4_packing_format": "plain", "intx_packing_format": "unpacked_to_int8"}
_ROUND_KERNELS = frozenset({"auto_round", "exllamav2", "triton"})
"""what AutoRound's `packing_format` names beside a packer: its own format, and who was to compute with it"""
_STRATEGIES = {"int": ("tensor", "channel", "group"), "float": ("tensor", "channel", "block", "group", "tensor_group")}
_LARGEST_GROUP = 2**20


class StoredFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the quantised modules of a checkpoint are stored."""

    method: str
    """`quant_method` of the config"""
    layout: Layout
    group_size: int | None = None
    """inputs of a group (GPTQ, AWQ); None: all of them"""
    zero_offset: int = 0
    """what is added to a zero point as it is stored: 1 for GPTQ's first format"""
    symmetric: bool = False
    """by the config's account, all zero points are in the middle"""
    block: tuple[int, int] = (128, 128)
    """outputs and inputs that share a scale, where fp8 has blocks"""


def stored_format(config: Entries) -> StoredFormat | None:
    """None: nothing is quantised. Raises UnsupportedModelError naming the format and what is supported, ConfigError for
    values that mean nothing."""
    for key in _KEYS:
        entries = config.get(key)
        if entries:
            if not isinstance(entries, Mapping):
                raise ConfigError(f"{key} must be an object, found {shown(entries)}")
            return _of_method(key, entries)
    return None


def native_only(stored: StoredFormat, model_impl: str) -> Literal["native"]:
    """Who computes a model that is stored so. Raises UnsupportedModelError where another was asked for."""
    if model_impl == "transformers":
        raise UnsupportedModelError(
            f"model_impl='transformers' reads no quantised checkpoints ({stored.method}); 'auto' reads those of our "
            "own families"
        )
    return "native"


def _of_method(key: str, entries: Entries) -> StoredFormat:
    method = entries.get("quant_method") or ("compressed-tensors" if key == "compression_config" else None)
    name = method.lower().removeprefix("intel/") if isinstance(method, str) else method
    if name in ("gptq", "gptqmodel"):
        return _gptq(str(name), entries, entries.get("checkpoint_format") or "gptq")
    if name == "awq":
        return _awq(str(name), entries, entries.get("version") or entries.get("format") or "gemm")
    if name == "auto-round":
        return _auto_round(entries)
    if name in ("compressed-tensors", "compressed_tensors"):
        return _compressed(entries)
    if name in ("fp8", "fbgemm_fp8"):
        return _fp8(str(name), entries)
    if name == "mxfp4":
        return StoredFormat(method="mxfp4", layout="mxfp4")
    if name == "bitsandbytes":
        return StoredFormat(method="bitsandbytes", layout="bitsandbytes")
    if name == "torchao":
        return _torchao(entries)
    instead = _INSTEAD.get(name) if isinstance(name, str) else None
    raise UnsupportedModelError(
        f"{key} ({shown(method)}) is not supported; supported are {SUPPORTED}" + (f". {instead}" if instead else "")
    )


def _gptq(method: str, entries: Entries, stored_as: object) -> StoredFormat:
    if stored_as not in ("gptq", "gptq_v2"):
        raise _unsupported(method, "checkpoint_format", stored_as, "gptq and gptq_v2 are")
    _check_bits(method, entries.get("bits"))
    return StoredFormat(
        method=method,
        layout="gptq",
        group_size=_group_size(entries),
        zero_offset=1 if stored_as == "gptq" else 0,
        symmetric=_flag(entries, "sym", True),
    )


def _awq(method: str, entries: Entries, version: object) -> StoredFormat:
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _unsupported(method, "version", version, "gemm is")
    bits = entries.get("bits", entries.get("w_bit", 4))
    if bits != 4:
        raise _unsupported(method, "bits", bits, "4 are")
    symmetric = not _flag(entries, "zero_point", True) or _flag(entries, "sym", False)
    return StoredFormat(method=method, layout="awq", group_size=_group_size(entries), symmetric=symmetric)


def _auto_round(entries: Entries) -> StoredFormat:
    """The packer that a file names decides: AutoGPTQ's stores zero points less one, AutoRound's own as they are."""
    packing = entries.get("packing_format") or entries.get("backend")
    if packing in (None, "auto"):
        packing = "auto_round:auto_gptq"
    packers = set(packing.lower().split(":")) - _ROUND_KERNELS if isinstance(packing, str) else {""}
    if packers <= {"auto_awq", "awq"} and packers:
        return _awq("auto-round", entries, "gemm")
    if not packers <= {"auto_gptq", "gptq", "gptqmodel", "gptq_v2"} or len(packers) > 1:
        raise _unsupported("auto-round", "packing_format", packing, "auto_round, auto_gptq, gptqmodel and auto_awq are")
    data_type = entries.get("data_type", "int")
    if data_type != "int":
        raise _unsupported("auto-round", "data_type", data_type, "int is")
    return _gptq("auto-round", entries, "gptq" if packers & {"auto_gptq", "gptq"} else "gptq_v2")


def _fp8(method: str, entries: Entries) -> StoredFormat:
    block = entries.get("weight_block_size")
    return StoredFormat(
        method=method,
        layout="fp8",
        block=(128, 128) if block is None else _block("weight_block_size", block),
    )


def _torchao(entries: Entries) -> StoredFormat:
    types = entries.get("quant_type")
    if not isinstance(types, Mapping):
        raise _unsupported("torchao", "quant_type", types, f"objects of {', '.join(_TORCHAO)} are")
    left = list(types.values())
    while left:
        config = left.pop()
        if config is None:  # modules that are left out
            continue
        name, data = (config.get("_type"), config.get("_data")) if isinstance(config, Mapping) else (config, None)
        if not isinstance(data, Mapping):
            raise ConfigError(f"quant_type must hold objects with _type and _data, found {shown(config)}")
        if name in ("FqnToConfig", "ModuleFqnToConfig"):
            inner = data.get("fqn_to_config") or data.get("module_fqn_to_config")
            left.extend(inner.values() if isinstance(inner, Mapping) else [inner])
            continue
        if name not in _TORCHAO:
            raise _unsupported("torchao", "quant_type", name, f"{', '.join(_TORCHAO)} are")
        for key, supported in _TORCHAO_PACKINGS.items():
            packing = data.get(key)
            packing = packing.get("_data") if isinstance(packing, Mapping) else packing
            if packing is not None and (not isinstance(packing, str) or packing.lower() != supported):
                raise _unsupported("torchao", key, packing, f"{supported} is")
    return StoredFormat(method="torchao", layout="torchao")


def _compressed(entries: Entries) -> StoredFormat:
    method = "compressed-tensors"
    sparsity = entries.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise _unsupported(method, "sparsity_config.format", sparsity["format"], "dense is")
    if entries.get("transform_config"):
        raise UnsupportedModelError(
            f"{method}: transform_config is not supported: the model's activations would have to be turned as it says"
        )
    formats = [entries.get("format", "dense")]
    groups = entries.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise ConfigError(f"config_groups must be an object, found {shown(groups)}")
    blocks = {(128, 128)}
    for group in groups.values():
        if not isinstance(group, Mapping):
            raise ConfigError(f"a group of config_groups must be an object, found {shown(group)}")
        formats.append(group.get("format") or formats[0])
        weights = group.get("weights")
        if isinstance(weights, Mapping):
            blocks |= _checked_scheme(weights)
    for stored_as in formats:
        if stored_as not in _COMPRESSED_FORMATS:
            raise _unsupported(method, "format", stored_as, f"{', '.join(_COMPRESSED_FORMATS[:-1])} are")
    if len(blocks) > 2:
        raise UnsupportedModelError(f"{method}: blocks of several sizes ({shown(sorted(blocks))}) are not supported")
    own = sorted(blocks - {(128, 128)})
    return StoredFormat(method=method, layout="compressed-tensors", block=own[0] if own else (128, 128))


def _checked_scheme(weights: Entries) -> set[tuple[int, int]]:
    """The blocks that a scheme of weights has. Raises UnsupportedModelError for bits, types and strategies that are not
    read."""
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits", 8), weights.get("strategy")
    if not isinstance(kind, str) or kind not in _STRATEGIES or bits not in (4, 8):
        raise UnsupportedModelError(
            f"compressed-tensors: weights of {shown(bits)} bits ({shown(kind)}) are not supported; int and float of 4 "
            "and 8 bits are"
        )
    if strategy is not None and strategy not in _STRATEGIES[kind]:
        raise _unsupported("compressed-tensors", "strategy", strategy, f"{', '.join(_STRATEGIES[kind])} are")
    block = weights.get("block_structure")
    return set() if block is None or strategy != "block" else {_block("block_structure", block)}


def _block(key: str, value: object) -> tuple[int, int]:
    sizes = value
    if isinstance(value, str):  # "128x128"
        sizes = [int(part) if part.isdecimal() and len(part) < 8 else None for part in value.split("x")]
    if isinstance(sizes, list) and len(sizes) == 2 and all(_is_size(size) for size in sizes):
        return int(sizes[0]), int(sizes[1])
    raise ConfigError(f"{key} must be two positive integers, found {shown(value)}")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST_GROUP


def _group_size(entries: Entries) -> int | None:
    size = entries.get("group_size", entries.get("q_group_size", 128))
    if size == -1:
        return None
    if isinstance(size, int) and _is_size(size):
        return size
    raise ConfigError(f"group_size must be -1 or a positive integer, found {shown(size)}")


def _check_bits(method: str, bits: object) -> None:
    if bits not in (4, 8):
        raise _unsupported(method, "bits", bits, "4 and 8 are")


def _flag(entries: Entries, key: str, default: bool) -> bool:
    value = entries.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, found {shown(value)}")
    return default if value is None else value


def _unsupported(method: str, key: str, value: object, supported: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{method}: {key}={shown(value)} is not supported; {supported}")
