"""What ranks divide among them, and who starts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from engine.errors import ConfigError
from engine.models.placement import ExpertPlacement

ExecutorBackend = Literal["mp", "ray", "external_launcher", "uni"]
RayPlacement = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""Ray's names"""

JOIN_TIMEOUT_S = 300.0


_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHER_VARIABLES = (*_NEEDED, "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE")


class Launch(msgspec.Struct, frozen=True):
    """What torchrun says to each of its processes."""

    rank: int
    size: int
    local_rank: int | None
    """None: nobody knows who is on the same node"""
    local_size: int | None
    """ranks of its node"""
    master: tuple[str, int]
    has_store: bool
    """torchrun's own, at `master`; else rank 0 is to open it"""
    restarts: int

    @property
    def key(self) -> str:
        """Under which rank 0 says where it is."""
        return f"pageloom/{self.restarts}/driver"

    @property
    def node(self) -> str:
        """See `AgentTask.node`: its first rank."""
        return str(self.rank - (self.local_rank or 0))


def launch_of(variables: Mapping[str, str]) -> Launch:
    """Of `LAUNCHER_VARIABLES`. Raises `ConfigError` where it was not torchrun that started this process."""
    if missing := [name for name in _NEEDED if name not in variables]:
        raise ConfigError(
            "distributed_executor_backend='external_launcher' is for programs that torchrun starts: "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
        )
    try:
        rank, size, port = (int(variables[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        local = variables.get("LOCAL_RANK")
        local_rank = None if local is None else int(local)
        local_size = int(variables["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in variables else None
        restarts = int(variables.get("TORCHELASTIC_RESTART_COUNT", "0"))
    except ValueError as error:
        raise ConfigError(f"torchrun's variables (RANK, WORLD_SIZE, MASTER_PORT ...) are no numbers: {error}") from None
    has_store = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(rank, size, local_rank, local_size, (variables["MASTER_ADDR"], port), has_store, restarts)


class EplbConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How experts move while they serve; vLLM's names. Steps are those of all replicas together."""

    window_size: Annotated[int, msgspec.Meta(ge=1)] = 1000
    """steps before a new placement in which tokens are counted for it; at most `step_interval`"""
    step_interval: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 3000
    """steps from one placement to the next"""
    log_balancedness: bool = False
    """tell how even the work of each window was"""
    num_redundant_experts: int = 0
    """0: each expert is in one replica"""


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    tensor: int = 1
    """ranks, each with its part of every matrix"""
    pipeline: int = 1
    """stages, each with its layers, computed by `tensor` ranks"""
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
    launch: Launch | None = None
    """of `external_launcher`: how this process was started; None: not by it"""
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
