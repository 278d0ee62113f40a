"""What ranks divide among them, and who starts them."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.models.placement import ExpertPlacement

ExecutorBackend = Literal["mp", "ray", "external_launcher", "uni"]
RayPlacement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Ray's names"""

JOIN_TIMEOUT_S = 300.0


class EplbConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How experts move while they serve; vLLM's names. Steps are those of all replicas together."""

    window_size: int = 1000
    """steps before a new placement in which tokens are counted for it"""
    step_interval: int = 3000
    """steps from one placement to the next"""
    log_balancedness: bool = False
    """tell how even the work of each window was"""
    num_redundant_experts: int = 0


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    tensor: int = 1
    """ranks, each with its part of every matrix"""
    pipeline: int = 1
    """stages, each with its layers; this or `tensor` is 1"""
    data: int = 1
    """replicas, each with the whole model, or all but others' experts"""
    data_rank: int = 0
    """of the data-parallel replicas, which one this is"""
    context: int = 1
    """parts of a sequence's positions; 1, or as many as `tensor`: a rank keeps its positions of all KV heads"""
    experts: ExpertPlacement | None = None
    """each rank, or replica, has some whole; None: a part of every one, or all"""
    eplb: EplbConfig | None = None
    """experts move between replicas; None: they stay"""
    backend: Literal["mp", "ray", "external_launcher"] = "mp"
    """who starts the ranks"""
    ray_placement: RayPlacement = "PACK"
    timeout_s: float = JOIN_TIMEOUT_S
    """how long ranks that others start may take to join"""

    @property
    def kv_copies(self) -> int:
        """Ranks that keep one KV head at least, of each token; where they divide positions, a token is kept once."""
        return self.tensor if self.context == 1 else 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline
