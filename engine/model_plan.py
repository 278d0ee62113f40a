"""What is told of a model before it is fetched: figures, and the same as text."""

from __future__ import annotations

import msgspec

from engine.kv_cache.ledger import human

PROCESS_BYTES = 250 << 20
"""of an interpreter with torch that has loaded nothing, beside what processes share"""


class RankPlan(msgspec.Struct, kw_only=True):
    """Of one replica's."""

    stage: int
    part: int
    """of the matrices"""
    layers: tuple[int, int]
    """the first, and the one behind the last"""
    weight_bytes: int
    activation_bytes: int


class ModelPlan(msgspec.Struct, kw_only=True):
    """Bytes, but where a name says otherwise. What could not be found out is None."""

    model: str
    device: str
    fits: bool = False
    problems: list[str] = []
    """why not"""
    advice: list[str] = []
    """settings, as options of engine-serve, each of which would make it fit"""
    file_bytes: int
    """of the weights on disk, or on the hub"""
    download_bytes: int = 0
    """of all that is not here yet"""
    disk_place: str | None = None
    disk_free: int | None = None
    memory_total: int
    memory_free: int
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    weight_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    """tokens of the longest sequence"""
    sequences: float | None = None
    """of that length, that the KV cache holds"""
    replicas: int = 1
    ranks: list[RankPlan] = []
    """where several compute it together, stage by stage"""
    warnings: list[str] = []
    table: str = ""
    """the memory ledger"""

    def text(self) -> str:
        size = human(self.file_bytes)
        if self.download_bytes:
            size += f", {human(self.download_bytes)} of it and its texts to be fetched"
            size += f" to {self.disk_place}, which has {human(self.disk_free or 0)} free"
        lines = [f"{self.model} on {self.device}", f"files: {size}"]
        if self.table:
            lines += [
                f"weights as {self.quantization if self.quantization != 'none' else self.dtype}, KV cache as "
                f"{self.kv_cache_dtype}, {human(self.kv_bytes_per_token or 0)} a token; longest sequence "
                f"{self.max_model_len} tokens",
                self.table,
            ]
        lines += [
            f"stage {rank.stage}, part {rank.part}: layers {rank.layers[0]} to {rank.layers[1] - 1}, "
            f"weights {human(rank.weight_bytes)}, activations {human(rank.activation_bytes)}"
            for rank in self.ranks
        ]
        if (processes := self.replicas * max(len(self.ranks), 1)) > 1:
            lines.append(
                f"{processes} processes compute it ({self.replicas} replicas of {max(len(self.ranks), 1)} ranks); each "
                f"takes some {human(PROCESS_BYTES)} of main memory for itself, which is not in these figures"
            )
        lines += [f"warning: {warning}" for warning in self.warnings]
        if self.device != "cpu":
            lines.append("CUDA graphs and the workspace of attention come on top")
        lines += [f"it does not fit: {problem}" for problem in self.problems]
        lines += [f"it would with {advice}" for advice in self.advice]
        return "\n".join(lines if self.problems else [*lines, "it fits"])
