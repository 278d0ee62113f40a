"""What waits for the loop: messages of the front end, and news of other threads of this process."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from queue import SimpleQueue

import msgspec

from engine.adapters.request import LoRARequest
from engine.core.wire import SequenceDelta, ToCore
from engine.kv_transfer.interface import News


class StepDone(Enum):
    """What the executor puts into the inbox when a step can be collected."""

    STEP_DONE = 0


STEP_DONE = StepDone.STEP_DONE


class StatsChanged(Enum):
    """What makes the loop tell its stats though no step was collected."""

    STATS_CHANGED = 0
    PIECES_TOOK_OVER = 1
    """compiled ones, or they never will"""


STATS_CHANGED, PIECES_TOOK_OVER = StatsChanged.STATS_CHANGED, StatsChanged.PIECES_TOOK_OVER


class GrammarCompiled(msgspec.Struct, frozen=True):
    """What the thread that compiles puts into the inbox."""

    grammar: str


class AdapterLoaded(msgspec.Struct, frozen=True):
    """What the thread that loads puts into the inbox."""

    adapter: LoRARequest


Message = ToCore | SequenceDelta | StepDone | StatsChanged | GrammarCompiled | AdapterLoaded | News
Post = Callable[[Message], None]
Inbox = SimpleQueue[Message]
"""What waits for the loop. A `SequenceDelta` is the answer to a message that did not decode; it passes as it is."""
