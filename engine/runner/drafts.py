"""A draft model or head on its way into a runner: its weights, its layers behind the target's, its proposer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attention_backends.interface import AttentionBackend
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.description import ModelDescription
from engine.models.drafts import DraftDescription, check_length, describe_draft
from engine.models.eagle import EagleHead
from engine.models.facts import ModelFacts
from engine.models.fallback.model import FallbackModel
from engine.models.mtp import MtpHead
from engine.runner.draft_model import DraftModelProposer
from engine.runner.head_drafts import HeadProposer
from engine.runner.proposals import Proposer
from engine.weights.eagle_loader import load_eagle
from engine.weights.loader import load_mtp, load_weights

if TYPE_CHECKING:
    from engine.runner.draft_passes import DraftPasses
    from engine.weights.packing import Packer


@dataclass(frozen=True)
class DraftParts:
    model: Decoder | EagleHead
    facts: ModelFacts
    """of its layers"""
    weight_bytes: int
    """less what it shares with the target"""


def draft_of(config: EngineConfig, target: ModelDescription) -> DraftDescription | None:
    """Raises what `describe_draft` and `check_length` do."""
    draft = describe_draft(config.scheduler.speculation, target)
    if draft is not None:
        check_length(draft, config.model.max_model_len)
    return draft


def check_backend(backend: AttentionBackend, device: torch.device) -> None:
    """Raises ConfigError: it must be told what only the device knows when drafts are made."""
    if backend.needs_host_lengths and device.type != "cpu":
        raise ConfigError(
            f"speculative_config: attention backend {backend.name!r} must be told exact lengths by the host, and those "
            "of drafts from a model are the device's; set attention_backend='cuda', or use method 'ngram'"
        )


def load_draft(
    config: EngineConfig, description: DraftDescription, target: Decoder | FallbackModel, packer: Packer | None
) -> DraftParts:
    """Raises WeightsError."""
    dtype, device = target.dtype, next(target.parameters()).device
    length = config.model.max_model_len
    if description.mtp is not None:
        assert isinstance(target, Decoder)
        mtp = MtpHead(description.mtp, target, max_position=length)
        how, seed = config.model.load_format, config.model.seed
        return DraftParts(mtp, description.facts, load_mtp(mtp, description.mtp, how, seed, packer))
    if description.model is not None:
        model = Decoder(description.spec, dtype=dtype, device=device, max_position=length)
        weight_bytes = load_weights(
            model, description.model, load_format=config.model.load_format, seed=config.model.seed, packer=packer
        )
        return DraftParts(model, description.facts, weight_bytes)
    assert description.head is not None and isinstance(target, Decoder)
    head = EagleHead(description.head, target.embed_tokens, dtype=dtype, max_position=length, device=device)
    return DraftParts(head, description.facts, load_eagle(head, description.path, packer))


def draft_proposer(draft: DraftParts, passes: DraftPasses, first_layer: int) -> Proposer:
    """`first_layer`: the draft's, counted behind the target's."""
    if isinstance(draft.model, EagleHead | MtpHead):
        return HeadProposer(draft.model, first_layer, passes)
    attend = passes.attention.attend
    draft.model.set_attention(lambda q, k, v, out, layer: attend(q, k, v, out, first_layer + layer))
    return DraftModelProposer(draft.model, passes)
