"""Where a checkpoint's tensors go: rows of the decoder's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import torch

Stored = Literal[
    "as it is",
    "less one",
    "times root",
    "pairs",
    "heads of qkv",
    "in turns",
    "among ones",
    "gates in heads",
    "delta in heads",
]


class Rows(msgspec.Struct, frozen=True):
    """Rows `start .. start + count` of a parameter of `Decoder`."""

    parameter: str
    start: int
    count: int
    stored: Stored = "as it is"
    """how the checkpoint holds what the parameter is: as 1 less (Gemma's norms); times the root of how many there are
    (Gemma 4's routers); with rows that turn together beside each other in every head (GLM), not half of what turns
    apart; as q, k and v of one head after the other (GPT-NeoX); with a row of the gate and one of up in turns
    (GPT-OSS); with more dimensions, of 1 each; or with the gate of each head behind its query, not all gates before all
    queries (Qwen3.5), or with all that a delta net has of one head of keys behind that of another (Qwen3-Next)"""
    heads: int = 0
    """in those rows, where `stored` speaks of heads"""
    paired: int = 0
    """pairs: rows of a head that turn; delta in heads: those of its query, and of its key"""
    passing: int = 0
    """pairs: rows of a head before them, which do not"""
    transposed: bool = False
    """the checkpoint holds [inputs, outputs] (GPT-2)"""
    expert: int | Literal["all"] | None = None
    """of a parameter that holds a matrix, or a bias, for each expert: of which; "all": the tensor stacks them, too"""

    @property
    def axis(self) -> int:
        """Of the tensor, along which its rows lie."""
        return 1 if self.expert == "all" else 0

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The place in it."""
        whole = parameter[self.expert] if isinstance(self.expert, int) else parameter
        return whole.narrow(self.axis, self.start, self.count)

    def experts(self, count: int) -> list[tuple[int, int | None]]:
        """Whose rows they are, of `count` experts, each with which of the matrices that the tensor stacks is its."""
        if isinstance(self.expert, int):
            return [(self.expert, None)]
        return [(expert, expert) for expert in range(count)]


class ExpertNames(msgspec.Struct, frozen=True, kw_only=True):
    """Of a mixture of experts, below a layer's name: Qwen's, which most families took over."""

    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_stored: Stored = "as it is"
    scales: str = "router.per_expert_scale"
    experts: str = "mlp.experts"
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """of an expert: gate, up and down; or of stacked experts gate with up, and down"""
    stacked: bool = False
    """one tensor for all experts, and no `.weight` behind its name"""
    transposed: bool = False
    turns: Stored = "as it is"
    """how gate and up are stored"""
    shared: tuple[str, ...] = (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    )
    """of the dense MLP beside experts: gate and up, or one for both; and down"""
    shared_gate: str = "mlp.shared_expert_gate"


def linears(
    source: str, names: Iterable[str], target: str, sizes: list[int], bias: bool, start: int = 0
) -> dict[str, Rows]:
    """Matrices, and biases, one below the other in one parameter, from its row `start` on."""
    rows = {}
    for name, count in zip(names, sizes, strict=True):
        for part in ("weight", "bias") if bias else ("weight",):
            rows[f"{source}.{name}.{part}"] = Rows(f"{target}.{part}", start, count)
        start += count
    return rows


def stacked_rows(rows: Mapping[str, Rows]) -> dict[str, Rows]:
    """The same for a file that stacks all experts' matrices of a kind, as GGUF files do: names without an expert's
    number."""
    found: dict[str, Rows] = {}
    for name, row in rows.items():
        if isinstance(row.expert, int):
            start, _, end = name.rpartition(f".{row.expert}.")
            found[f"{start}.{end}"] = msgspec.structs.replace(row, expert="all")
        else:
            found[name] = row
    return found
