"""Which rank has which expert, where experts are whole (`--enable-expert-parallel`). Torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.errors import ConfigError
from engine.models.json_file import read_json_object

_FILE_BYTES = 16 << 20
"""at most, of a placement's file"""


class ExpertPlacement(msgspec.Struct, frozen=True):
    """Each expert is whole in one rank; a rank computes what tokens ask of its own, and ranks add up."""

    ranks: tuple[tuple[int, ...], ...] = ()
    """of each layer, of each of its experts: the rank; empty for a layer that has none. (): every layer's are divided
    in their order, the first ranks have one more"""

    def ranks_of(self, layer: int, count: int, size: int) -> tuple[int, ...]:
        """Of each of the layer's `count` experts which of `size` ranks has it."""
        if self.ranks:
            return self.ranks[layer]
        each, more = divmod(count, size)
        return tuple(rank for rank in range(size) for _ in range(each + (rank < more)))

    def own(self, layer: int, count: int, rank: int, size: int) -> tuple[int, ...]:
        """Of the layer's `count` experts those of one of `size` ranks, in ascending order."""
        return tuple(expert for expert, of in enumerate(self.ranks_of(layer, count, size)) if of == rank)

    def check(self, counts: list[int], size: int) -> None:
        """`counts`: experts of each layer. Raises ConfigError unless each expert has a rank, and each rank an expert
        in every layer that has some."""
        if not any(counts):
            raise ConfigError("enable_expert_parallel: the model has no experts; leave it out")
        if few := [count for count in counts if 0 < count < size]:
            raise ConfigError(f"enable_expert_parallel: {few[0]} experts are too few for {size} ranks")
        if not self.ranks:
            return
        if len(self.ranks) != len(counts):
            raise ConfigError(f"expert_placement is of {len(self.ranks)} layers, and the model has {len(counts)}")
        for layer, (count, ranks) in enumerate(zip(counts, self.ranks, strict=True)):
            if len(ranks) != count:
                raise ConfigError(f"expert_placement: layer {layer} has {count} experts, {len(ranks)} are placed")
            if count and set(ranks) != set(range(size)):
                raise ConfigError(
                    f"expert_placement: layer {layer} names the ranks {sorted(set(ranks))}; each of 0 to {size - 1} "
                    "must have an expert, and there are no others"
                )


def balanced(loads: Sequence[Sequence[int]], size: int) -> ExpertPlacement:
    """`loads`: of each layer, tokens that each of its experts was given. Ranks have as many of a layer's experts as in
    their order. Raises ConfigError where a layer has fewer than ranks."""
    placement = ExpertPlacement()
    placement.check([len(layer) for layer in loads], size)
    layers = []
    for layer, of_layer in enumerate(loads):
        ranks = list(placement.ranks_of(layer, len(of_layer), size))
        for first, second in exchanges(ranks, of_layer, size):
            ranks[first], ranks[second] = ranks[second], ranks[first]
        layers.append(tuple(ranks))
    return ExpertPlacement(tuple(layers))


def exchanges(ranks: Sequence[int], loads: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Pairs of a layer's experts that are to take each other's place, one pair after another, so that ranks have as
    much to do as each other; `ranks` and `loads`: of each expert.

    Each time one of the busiest rank's goes where the busier of the two ranks then has least, as long as that is less
    by more than a 256th of what ranks have in the mean. So few move where little has changed."""
    import numpy as np  # not at the top: --help is instant

    held, load = np.array(ranks, dtype=np.int64), np.array(loads, dtype=np.int64)
    least_gain = int(load.sum()) // (256 * size)
    found: list[tuple[int, int]] = []
    while size > 1 and len(held):
        work = np.zeros(size, dtype=np.int64)
        np.add.at(work, held, load)
        busiest = int(work.argmax())
        own, others = np.flatnonzero(held == busiest), np.flatnonzero(held != busiest)
        less = load[own][:, None] - load[others]
        after = np.maximum(work[busiest] - less, work[held[others]] + less)
        best = int(after.argmin())
        if work[busiest] - after.flat[best] <= least_gain:
            break
        first, second = int(own[best // len(others)]), int(others[best % len(others)])
        held[[first, second]] = held[[second, first]]
        found.append((first, second))
    return found


def imbalance(placement: ExpertPlacement, loads: Sequence[Sequence[int]], size: int) -> float:
    """What the busiest rank of each layer has to do, added up, over the mean of ranks."""
    busiest = total = 0
    for layer, of_layer in enumerate(loads):
        work = [0] * size
        for rank, load in zip(placement.ranks_of(layer, len(of_layer), size), of_layer, strict=True):
            work[rank] += load
        busiest, total = busiest + max(work), total + sum(work)
    return busiest * size / total if total else 1.0


def read_placement(file: str) -> ExpertPlacement:
    """What `write_placement` wrote. Raises ConfigError."""
    content = read_json_object(Path(file), _FILE_BYTES)
    try:
        return ExpertPlacement(msgspec.convert(content["layers"], tuple[tuple[int, ...], ...]))
    except (KeyError, msgspec.ValidationError):
        raise ConfigError(f'{file}: expected {{"layers": [[rank of each expert], ...]}}') from None


def write_placement(placement: ExpertPlacement, file: str) -> None:
    Path(file).write_text(json.dumps({"layers": placement.ranks}) + "\n")
