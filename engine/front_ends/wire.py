"""Messages between front ends and the hub that has the cores. msgspec only, as between a core and whoever has it."""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.config import EngineConfig
from engine.core.wire import CoreReady, CoreStats, StepOutputs, ToCore


class FrontEndStart(msgspec.Struct, frozen=True, kw_only=True):
    """All that a front end's process needs to know of the hub; written by its parent."""

    number: int
    """not used again"""
    config: EngineConfig
    parent_pid: int
    to_hub: str
    """address that the hub has bound"""
    from_hub: str
    """address that the front end binds"""
    directory: str
    """private directory of all; a front end removes it when its parent died"""


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """A front end listens to the hub: it is told when cores serve."""


class Serves(msgspec.Struct, frozen=True, tag="serves"):
    """A front end takes requests."""


class Question(msgspec.Struct, frozen=True, tag="question"):
    """To every front end; each gives an answer, and whoever asks gets all of them."""

    number: int
    about: str


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    number: int
    text: bytes


class Order(msgspec.Struct, frozen=True, tag="order"):
    """What `ReplicatedClient` does when asked, under the names of its methods."""

    number: int
    what: Literal["sleep", "wake_up", "change", "scale"]
    config: EngineConfig | None = None
    replicas: int = 0
    drain_timeout_s: float | None = None


ToHub = ToCore | Joined | Serves | Question | Answer | Order


class FromFrontEnd(msgspec.Struct, frozen=True, array_like=True):
    front_end: int
    message: ToHub


class Answers(msgspec.Struct, frozen=True, tag="answers"):
    """To whoever asked."""

    number: int
    texts: list[bytes]
    """of each front end"""
    gone: list[bytes] = []
    """of those that are no more, what they said last"""
    missing: int = 0
    """front ends that have not answered in time"""


class CoresState(msgspec.Struct, frozen=True, tag="state"):
    """Of the cores, as `CoreClient` tells it of its own."""

    died: str | None = None
    stalled: str | None = None
    restarting: bool = False
    asleep: bool = False
    stats_of_each: dict[int, CoreStats] = {}
    """where there are replicas"""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """To whoever gave an order."""

    number: int
    kind: str | None = None
    """name of the class in `engine.errors`, where it was not carried out"""
    message: str = ""


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    """Cores serve as this configuration says from now on, which differs in the weights."""

    config: EngineConfig
    ready: CoreReady


FromHub = StepOutputs | CoreReady | CoresState | Question | Answers | Done | Changed
