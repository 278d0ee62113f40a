"""Whether the rows of a model have bits of their own: `batch_invariant` promises it, and refuses where it cannot. On a
CPU the packed layers have them anyway; on a GPU layers are told to (`fix_sums`)."""

from __future__ import annotations

import torch
from torch import nn

from engine.adapters.linear import AdaptedLinear
from engine.cpu_kernels.formats import Format
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.device_packed import StoredExperts, StoredLinear
from engine.models.experts import Experts
from engine.models.facts import ModelFacts
from engine.models.layers import Linear
from engine.models.linear_op import FIXED
from engine.models.packed import PackedLinear
from engine.models.packed_experts import PackedExperts
from engine.weights.packing import Packer

_WHOLE_ROWS = (Format.BFLOAT16, Format.INT8, Format.FLOAT8, Format.FLOAT8_BLOCK, Format.FLOAT32)
"""formats for which tiles (AMX) compute what vectors do; of the others many rows are multiplied as bfloat16, and few as
int8"""


def make_invariant(model: nn.Module, packer: object, device: torch.device) -> None:
    """Raises `ConfigError` where it cannot be."""
    if device.type == "cuda":
        fix_sums(model)
    else:
        check_invariant(model, packer)


def check_facts(facts: ModelFacts, kind: str) -> None:
    """What needs no weights to be refused. Raises `ConfigError`."""
    if not facts.keeps_kv:
        raise ConfigError("batch_invariant: an encoder's attention is the library's, which cuts sums by the batch")
    if kind == "cuda" and facts.states:
        raise ConfigError("batch_invariant on a GPU: states are computed in chunks of the step, in another order")
    if kind == "cuda" and facts.keeps_latents:
        raise ConfigError("batch_invariant on a GPU: attention to latents is cut by the batch; leave it out")


def fix_sums(model: nn.Module) -> None:
    """Have a GPU's products compute each row by one tile, whatever the number of rows. Raises `ConfigError` for a layer
    whose sums are the library's, or cut by the batch."""
    decoder = _check_native(model)
    for name, module in decoder.named_modules():
        if isinstance(module, Linear):
            module.choice = FIXED
        elif isinstance(module, StoredLinear | StoredExperts) or (isinstance(module, Experts) and module.kernel_gate):
            module.fixed = True
        elif isinstance(module, nn.Linear | Experts):
            raise ConfigError(f"batch_invariant: {name} is computed by the library, which cuts sums by the batch")


def _check_native(model: nn.Module) -> Decoder:
    if not isinstance(model, Decoder):
        raise ConfigError(
            "batch_invariant needs a model that runs natively: the library's modules cut sums by the batch"
        )
    return model


def check_invariant(model: nn.Module, packer: object) -> None:
    """Raises `ConfigError` for a layer whose products are the library's, which cuts sums by the number of rows, or are
    computed in two ways by it."""
    if not isinstance(packer, Packer):
        raise ConfigError("batch_invariant needs the engine's own products, and their kernels cannot be built here")
    decoder = _check_native(model)
    if not all(layer.is_native for layer in decoder.mixing):
        raise ConfigError("batch_invariant: states of these sizes have no kernel, and are computed 64 tokens at a time")
    by_tiles = "amx" in packer.ops.isas
    for name, module in model.named_modules():
        if isinstance(module, (Linear, nn.Linear, Experts, AdaptedLinear)):
            raise ConfigError(f"batch_invariant: {name} is computed by the library, which cuts sums by the batch")
        twofold = [Format(each) for each in _formats(module) if each not in _WHOLE_ROWS] if by_tiles else []
        if twofold:
            stored = twofold[0].name.lower()
            raise ConfigError(
                f"batch_invariant: with AMX, weights as {stored} ({name}) are multiplied in two ways, by the number of "
                "rows; use quantization='int8' or 'none'"
            )


def _formats(module: nn.Module) -> tuple[int, ...]:
    """In which a layer's matrices are packed."""
    if isinstance(module, PackedLinear):
        return (module.format,)
    return (module.gate_up_format, module.down_format) if isinstance(module, PackedExperts) else ()
