"""A model of the transformers library with its weights: read by the library, which knows how its checkpoints were named
in every version, then packed where that serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.errors import WeightsError
from engine.models.description import ModelDescription
from engine.models.fallback.division import divide, join_library
from engine.models.fallback.facts import module_of, probed, quiet, read_config
from engine.models.fallback.model import ATTENTION, FallbackModel, attention
from engine.models.sharding import Shard
from engine.weights.device_packing import DevicePacker
from engine.weights.fallback_packing import pack_library_experts, pack_library_model
from engine.weights.loader import fill_randomly

if TYPE_CHECKING:
    from engine.parallel.group import Group
    from engine.weights.packing import Packer

_SHOWN = 5


def load_fallback(
    description: ModelDescription,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int,
    dummy: bool,
    seed: int,
    packer: Packer | None = None,
    group: Group | None = None,
) -> FallbackModel:
    """`group`: of ranks, of which each computes a part. Raises UnsupportedModelError, or WeightsError for a checkpoint
    that does not fit its config."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION, attention)
    config = read_config(description.path)
    _, layers = probed(config)
    if dummy:
        whole = module_of(config, "cpu", dtype)
        fill_randomly(whole, seed)
    else:
        try:
            with quiet():
                whole, found = AutoModelForCausalLM.from_pretrained(
                    description.path,
                    config=config,
                    dtype=dtype,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,  # they are told below
                    output_loading_info=True,
                )
        except Exception as error:
            raise WeightsError(f"{description.path}: the library does not read its weights: {error}") from error
        _check(description, found)
    whole = whole.eval().requires_grad_(False)
    parted = [] if group is None else divide(whole, layers, Shard(group.rank, group.size))
    if device.type == "cuda":
        pack_library_experts(whole, DevicePacker("none", dtype, device))
    whole = whole.to(device)
    if packer is not None:
        pack_library_model(whole, packer)
    if group is not None:
        join_library(whole, parted, group)
    model = FallbackModel(whole, layers, max_position)
    model.check_token_wise(description.vocab_size)
    if (unembedding := whole.get_output_embeddings()) is not None:
        model.find_plain_head(unembedding)
    return model


def _check(description: ModelDescription, found: dict[str, Any]) -> None:
    """What the library says of a checkpoint's names and shapes. A bare model lacks its head."""
    allowed = () if description.generates else ("lm_head",)
    missing = sorted(name for name in found["missing_keys"] if not name.startswith(allowed))
    wrong = sorted(str(name) for name in found["mismatched_keys"])
    extra = sorted(found["unexpected_keys"])
    for names, why in ((missing, "missing from it"), (wrong, "of another shape"), (extra, "no part of the model")):
        if names:
            shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
            raise WeightsError(f"{description.path}: the checkpoint does not fit its config: {why}: {shown}")
