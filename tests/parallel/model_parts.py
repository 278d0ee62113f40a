"""A rank's part of a tiny checkpoint, joined with the others of a group of threads."""

from __future__ import annotations

import torch
from thread_group import ThreadGroup

from engine.models.decoder import Decoder
from engine.models.description import describe
from engine.models.parallel import join
from engine.models.placement import ExpertPlacement
from engine.models.sharding import Shard, sharded
from engine.models.stages import Stage, stage_of
from engine.weights.loader import load_weights


def filled(path: str, shard: Shard | None = None, stage: Stage | None = None) -> Decoder:
    """The whole model, or that part, or that stage of either, in float32."""
    description = describe(path)
    assert description.spec is not None
    spec = description.spec if shard is None else sharded(description.spec, shard)
    spec = spec if stage is None else stage_of(spec, stage, description.spec)
    model = Decoder(spec, dtype=torch.float32)
    load_weights(model, description, shard=shard, stage=stage)
    return model


def part_of(
    path: str, group: ThreadGroup, placement: ExpertPlacement | None = None, stage: Stage | None = None
) -> Decoder:
    model, whole = filled(path, Shard(group.rank, group.size, placement), stage), describe(path).spec
    assert whole is not None
    join(model, whole if stage is None else stage_of(whole, stage), group)
    return model
