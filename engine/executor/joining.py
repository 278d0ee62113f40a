"""How a rank, the driver's or another one, joins the others: by memory that they share, by streams, or by both."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from engine.config import EngineConfig
from engine.executor.frames import RankEnds

if TYPE_CHECKING:
    from engine.parallel.group import OwnGroup  # a worker tells what fails before it imports torch
    from engine.parallel.stage_link import LinkEnd

MakeGroup = Callable[[int, str, int, int, Path], "OwnGroup"]
"""(descriptor of what they share, name, rank, size, cache directory)"""
MakeSocketGroup = Callable[[Sequence[int], str, int, Path], "OwnGroup"]
"""(sockets to the ranks, which are the group's from then on, name, rank, cache directory)"""

GROUP_NAME = "tensor"
"""of those that compute parts of the same matrices: the same in all ranks and at every start, because compiled pieces
call collectives by it (a process's second group has a number behind it)"""
STAGES_NAME = "stages"
"""of all ranks, where there are stages"""


class Transports(Protocol):
    @property
    def make_group(self) -> str:
        """ "module:callable", a `MakeGroup`"""
        ...

    @property
    def make_socket_group(self) -> str:
        """ "module:callable", a `MakeSocketGroup`"""
        ...


def named(name: str) -> object:
    """What "module:callable" stands for."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def join(config: EngineConfig, rank: int, ends: RankEnds, transports: Transports) -> OwnGroup:
    """The rank's place among all, and in its stage. Descriptors of memory and links stay the caller's, streams to ranks
    that add up with it are the group's."""
    parallel, cache_dir = config.parallel, Path(config.compile.cache_dir)
    name = GROUP_NAME if parallel.pipeline == 1 else STAGES_NAME
    all_ranks = range(parallel.ranks)
    group = _group(transports, ends.memory, ends.streams.get("sums", {}), all_ranks, name, rank, cache_dir)
    if parallel.pipeline == 1:
        return group
    from engine.parallel.stage_group import StageGroup, place_of_rank

    stage, part = place_of_rank(rank, parallel.pipeline, parallel.tensor)
    parts, own = None, range(rank - part, rank - part + parallel.tensor)
    if len(own) > 1:
        streams = ends.streams.get("parts", {})
        parts = _group(transports, ends.parts_memory, streams, own, GROUP_NAME, rank, cache_dir)
    return StageGroup(group, parts, stage, *_links(config, rank, ends))


def _group(
    transports: Transports,
    memory: int,
    streams: Mapping[int, int],
    ranks: range,
    name: str,
    rank: int,
    cache_dir: Path,
) -> OwnGroup:
    place = rank - ranks.start
    if memory >= 0:
        make_group = cast(MakeGroup, named(transports.make_group))
        return make_group(memory, name, place, len(ranks), cache_dir)
    make_socket_group = cast(MakeSocketGroup, named(transports.make_socket_group))
    return make_socket_group([streams.get(each, -1) for each in ranks], name, place, cache_dir)


def _links(config: EngineConfig, rank: int, ends: RankEnds) -> tuple[LinkEnd | None, LinkEnd | None]:
    """To the stages before and behind."""
    from engine.parallel.stage_group import neighbours
    from engine.parallel.stage_link import SharedEnd
    from engine.parallel.stream_link import StreamEnd

    if (streams := ends.streams.get("states")) is None:
        before, after = (None if end is None else SharedEnd(*end) for end in (ends.before, ends.after))
        return before, after
    ranks = neighbours(rank, config.parallel.pipeline, config.parallel.tensor)
    first, second = (None if each is None else StreamEnd(streams[each]) for each in ranks)
    return first, second
